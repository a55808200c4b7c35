"""What forced tokens bring under a JSON schema: the same call in stock `generate` and with drafts, in turn.

    pip install -e '.[grammar]'
    python examples/experiments/grammars.py
    python examples/experiments/grammars.py --target google/gemma-3-270m --schemas readings --json grammars.json

Schemas are compiled by xgrammar with and without free whitespace; `forced` is the share of the text's tokens at which
one string is all that may follow. Ratios are of processor time, of one thread; `without grammar` hides the grammar from
the drafter, so that copies of earlier text are all that is drafted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import xgrammar
from xgrammar.contrib.hf import LogitsProcessor

from hf_dart import LookupDrafter
from hf_dart.bench.pair import load_pair
from hf_dart.decoding.grammars import XGrammar
from hf_dart.hub.machine import circumstances

TEXT = {"type": "string", "maxLength": 12}
LINE = {"type": "string", "minLength": 6, "maxLength": 16}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
ROW = {"identifier": NUMBER, "description": TEXT, "done": {"type": "boolean"}}
ADDRESS = {"street": TEXT, "city": TEXT, "country": {"enum": ["France", "Japan", "Kenya"]}}
DEGREES = {"type": "integer", "minimum": 0, "maximum": 99}
READING = {"temperature": DEGREES, "humidity": DEGREES, "alarm": {"type": "boolean"}}


def fields(properties: dict[str, Any]) -> dict[str, Any]:
    """An object of these fields, all of them."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def several(properties: dict[str, Any], count: int) -> dict[str, Any]:
    """A list of so many objects."""
    return {"type": "array", "minItems": count, "maxItems": count, "items": fields(properties)}


SCHEMAS = {
    "orders": fields({"name": TEXT, "address": fields(ADDRESS), "items": several(ROW, 3)}),
    "notes": fields({"notes": several({"author": LINE, "note": LINE}, 6)}),
    "readings": fields({"station": {"enum": ["Paris", "Osaka", "Mombasa"]}, "readings": several(READING, 12)}),
}
MODES = {"greedy": {"do_sample": False}, "T=1": {"do_sample": True, "temperature": 1.0, "top_k": 0}}


class Hidden(LogitsProcessor):
    """xgrammar's processor by another name, by which its grammar is not asked ahead."""


def share_forced(compiled: Any, text: list[int]) -> float:
    """The share of a text's tokens that begin or go on in a forced string, however that is split."""
    grammar = XGrammar(compiled)
    return statistics.mean(bool(grammar.forced(text[:place])) for place in range(len(text)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or repository; the packaged pair by default")
    parser.add_argument("--head", help="folder of a trained head, for a column of its own")
    parser.add_argument("--prompt", default="# A customer and three orders, as JSON\nrow = ")
    parser.add_argument("--schemas", choices=SCHEMAS, nargs="+", default=["orders", "readings"])
    parser.add_argument("--whitespace", choices=["none", "free"], nargs="+", default=["none", "free"])
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write what was measured there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, head, tokenizer, *_ = load_pair(given.target, given.head, "float32")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.get_output_embeddings().out_features)
    inputs = tokenizer(given.prompt, return_tensors="pt")
    methods: dict[str, tuple[Any, type[Any]]] = {
        "stock": (None, LogitsProcessor),
        "without grammar": (LookupDrafter(), Hidden),
        "forced": (LookupDrafter(), LogitsProcessor),
    }
    if head.draft_length:
        methods["head and forced"] = (head, LogitsProcessor)

    table = ["| schema | whitespace | mode | method | x stock | τ | tokens | forced |", "|" + "---|" * 8]
    print(*table, sep="\n")
    for schema, whitespace, mode in itertools.product(given.schemas, given.whitespace, MODES):
        free, options = whitespace == "free", MODES[mode] | {"max_new_tokens": given.new_tokens}
        form = json.dumps(SCHEMAS[schema])
        compiled = xgrammar.GrammarCompiler(info).compile_json_schema(form, any_whitespace=free)
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        taus: dict[str, list[float]] = {name: [] for name in methods}
        texts = list[list[int]]()
        for repeat in range(given.repeats + 1):
            expected = None
            for name, (assistant, processor) in methods.items():
                torch.manual_seed(repeat)
                began, masks = time.process_time(), [processor(compiled)]
                written = model.generate(**inputs, **options, logits_processor=masks, assistant=assistant)
                if repeat:  # the first one warms up
                    seconds[name].append(time.process_time() - began)
                    taus[name].append(assistant.last_stats.tau if assistant else 1.0)
                expected = written if expected is None else expected
                if not torch.equal(written, expected):
                    raise SystemExit(f"{name}: another text than stock's.")
            if repeat:
                texts.append(expected[0, inputs["input_ids"].shape[1] :].tolist())
        forced = statistics.mean(share_forced(compiled, text) for text in texts)
        tokens = statistics.mean(map(len, texts))
        for name in methods:
            ratio = statistics.median(a / b for a, b in zip(seconds["stock"], seconds[name], strict=True))
            cells = f"{name} | {ratio:.2f} | {statistics.mean(taus[name]):.2f} | {tokens:.0f} | {forced:.0%}"
            table.append(f"| {schema} | {whitespace} | {mode} | {cells} |")
            print(table[-1], flush=True)
    if given.json:
        about = circumstances(["python", *sys.argv], model.device, ("xgrammar",))
        given.json.write_text(json.dumps({**about, "markdown": "\n".join(table)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
