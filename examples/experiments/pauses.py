"""Cost of drafting where it does not pay: stock, copies alone, a trained head and an untrained one, side by side.

    python examples/experiments/pauses.py --batch 1 4 --new-tokens 500
    python examples/experiments/pauses.py --target examples/deep_pair/model --head examples/deep_pair/head

Ratios are of the time that one thread computed for (`time.thread_time`), which other processes on the machine change
little; calls are interleaved, and their texts compared. A target of `--target` alone has no trained head.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hf_dart import DartHead, LookupDrafter
from hf_dart.bench.pair import load_pair
from hf_dart.bench.speed import MODES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder; the packaged pair by default")
    parser.add_argument("--head", help="folder of a trained head")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["sampled, T=1", "sampled, T=0.7", "greedy"])
    parser.add_argument("--new-tokens", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, trained, tokenizer, *_ = load_pair(arguments.target, arguments.head, "float32")
    untrained = DartHead.from_target(model, tokenizer=tokenizer).eval()
    drafters: dict[str, Any] = {"copies": LookupDrafter(), "untrained head": untrained}
    if trained.draft_length:
        drafters["trained head"] = trained
    spec = find_spec("_pytest")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The prompts are from pytest's source: install pytest.")
    text = (Path(spec.submodule_search_locations[0]) / "fixtures.py").read_text(encoding="utf8")
    ids = torch.tensor(tokenizer(text)["input_ids"])

    def timed(prompts: torch.Tensor, seed: int, **options: Any) -> tuple[float, torch.Tensor]:
        torch.manual_seed(seed)
        began = time.thread_time()
        mask = torch.ones_like(prompts)
        options |= {"max_new_tokens": arguments.new_tokens, "eos_token_id": None}
        written = model.generate(prompts, attention_mask=mask, **options)
        return time.thread_time() - began, written

    print("| batch | mode | drafter | x stock | x copies | rounds | paused | plain | τ |\n|" + "---|" * 9)
    for batch in arguments.batch:
        prompts = torch.stack([ids[300 * row : 300 * row + 64] for row in range(batch)])
        for mode in arguments.modes:
            spent: dict[str, list[float]] = {name: [] for name in ("stock", *drafters)}
            for repeat in range(arguments.repeats + 1):
                stock, expected = timed(prompts, repeat, **MODES[mode])
                found = {name: timed(prompts, repeat, assistant=one, **MODES[mode]) for name, one in drafters.items()}
                if not all(torch.equal(expected, written) for _, written in found.values()):
                    sys.exit("The texts differ.")
                if repeat:  # the first one warms up
                    spent["stock"].append(stock)
                    for name, (seconds, _) in found.items():
                        spent[name].append(seconds)
            for name, one in drafters.items():
                ratios = [
                    f"{statistics.median(a / b for a, b in zip(spent[base], spent[name], strict=True)):.3f}"
                    for base in ("stock", "copies")
                ]
                stats = one.last_stats
                counts = [stats.rounds, stats.paused_rounds, stats.plain_rounds, f"{stats.tau:.2f}"]
                print("|", " | ".join(map(str, [batch, mode, name, *ratios, *counts])), "|", flush=True)


if __name__ == "__main__":
    main()
