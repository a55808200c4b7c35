"""Two versions of the library beside each other: ratios to stock `generate`, and whether both write the same tokens.

    git worktree add ../old b1c1801
    python examples/experiments/versions.py ../old . --pairs packaged deep --compiled --json versions.json
    python examples/experiments/versions.py ../old . --pairs google/gemma-3-270m --new-tokens 48 --json versions.json

Each version drafts for the target that it holds itself, in a process of its own; the two take turns. In a process,
drafted calls and stock's take turns over the same prompts of pytest's source. Times are those of one thread's work
(`time.thread_time`), which other processes on the machine change little. A named target is drafted for by copies. What
the newer version gains is by the medians of all turns [of single turns: least, most].
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy, penalty 1.1": {"do_sample": False, "repetition_penalty": 1.1},
    "sampled, T=0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "sampled, T=1": {"do_sample": True, "temperature": 1.0, "top_k": 0},
}
FOLDERS = {"packaged": ("hf_dart/demo_pair",), "deep": ("examples/deep_pair", "hf_dart/deep_pair")}
PROMPT, TEXTS = 80, 8  # tokens, and prompts


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratio, tau and tokens of each batch and mode, by the version of the library that is imported."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_dart

    torch.set_num_threads(1)
    (name,), tree = arguments.pairs, arguments.trees[0]
    folder = next((tree / folder for folder in FOLDERS.get(name, ()) if (tree / folder / "head").is_dir()), None)
    # Older versions called the folder of a pair's target otherwise.
    path = name if folder is None else next(one for one in (folder / "model", folder / "target") if one.is_dir())
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    drafter: Any = hf_dart.LookupDrafter()
    if folder is not None:
        drafter = hf_dart.DartHead.from_pretrained(folder / "head", target=model, dtype=torch.float32).eval()
    hf_dart.attach(model)
    if arguments.compiled:
        hf_dart.compile(model, drafter)
    tokenizer = AutoTokenizer.from_pretrained(path)
    spec = find_spec("_pytest")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The prompts are from pytest's source: install pytest.")
    files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
    texts = (tokenizer(file.read_text(encoding="utf8"), verbose=False)["input_ids"] for file in files)
    prompts = [ids[:PROMPT] for ids in texts if len(ids) >= 4 * PROMPT][:TEXTS]
    found = {}
    for batch in arguments.batch:
        groups = [torch.tensor(prompts[row : row + batch]) for row in range(0, max(4, 2 * batch), batch)]
        for mode in arguments.modes:
            options = MODES[mode]
            ratios, tokens = [], []
            for repeat in range(arguments.repeats + 1):
                spent = dict.fromkeys(("stock", "drafted"), 0.0)
                for number, ids in enumerate(groups):
                    for kind in spent:
                        torch.manual_seed(number)
                        began = time.thread_time()
                        written = model.generate(
                            ids,
                            attention_mask=torch.ones_like(ids),
                            max_new_tokens=arguments.new_tokens,
                            **options,
                            **({"assistant": drafter} if kind == "drafted" else {}),
                        )
                        spent[kind] += time.thread_time() - began
                        if kind == "drafted" and repeat == 0:
                            tokens.append(written.tolist())
                if repeat:  # the first calls time drafts, and compile
                    ratios.append(spent["stock"] / spent["drafted"])
            found[f"{mode}, batch {batch}"] = {"ratio": median(ratios), "tokens": tokens}
    return found


def in_its_own_process(tree: Path, pair: str, compiled: bool, words: Iterable[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, str(tree), "--measure", "--pairs", pair, *words]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command + ["--compiled"] * compiled, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path, nargs="+", help="folders of the older and the newer version")
    parser.add_argument("--pairs", nargs="+", default=["packaged"], help="packaged, deep, or a target")
    parser.add_argument("--compiled", action="store_true", help="measure pairs a second time, compiled")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--modes", nargs="+", default=[*MODES], choices=MODES)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="in each process")
    parser.add_argument("--turns", type=int, default=2, help="processes of each version")
    parser.add_argument("--json", type=Path, help="file of figures, in which these rows are replaced")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.trees = [tree.resolve() for tree in arguments.trees]
    if arguments.measure:
        print(json.dumps(measure(arguments)))
        return
    import torch

    from hf_dart.hub.machine import circumstances

    words = ["--batch", *map(str, arguments.batch), "--new-tokens", str(arguments.new_tokens)]
    words += ["--repeats", str(arguments.repeats), "--modes", *arguments.modes]
    rows: dict[str, list[str]] = {}
    if arguments.json is not None and arguments.json.exists():
        rows = json.loads(arguments.json.read_text())["rows"]
    for pair in arguments.pairs:
        for compiled in (False, True) if arguments.compiled and pair in FOLDERS else (False,):
            name = f"{pair.rpartition('/')[2]}{', compiled' if compiled else ''}"
            turns = [
                [in_its_own_process(tree, pair, compiled, words) for tree in arguments.trees]
                for _ in range(arguments.turns)
            ]
            by_case = {row.split(" | ")[1]: row for row in rows.get(name, [])}
            for case in turns[0][0]:
                ratios = [[turn[tree][case]["ratio"] for tree in (0, 1)] for turn in turns]
                old, new = map(median, zip(*ratios, strict=True))
                gains = sorted(newer / older for older, newer in ratios)
                gain = f"{new / old:.2f} [{gains[0]:.2f}, {gains[-1]:.2f}]"
                same = turns[0][0][case]["tokens"] == turns[0][1][case]["tokens"]
                by_case[case] = f"| {name} | {case} | {old:.2f} | {new:.2f} | {gain} | {same} |"
                print(by_case[case], flush=True)
            rows[name] = [*by_case.values()]
    head = ["| pair | case | older, x stock | newer, x stock | newer / older | same tokens |", "|" + "---|" * 6]
    markdown = "\n".join([*head, *(row for some in rows.values() for row in some)])
    print(markdown)
    if arguments.json is not None:
        command = ["python", *sys.argv]
        content = {**circumstances(command, torch.device("cpu")), "rows": rows, "markdown": markdown}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
