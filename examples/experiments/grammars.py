"""What forced tokens bring under a JSON schema: the same call in stock `generate` and with drafts, in turn.

    pip install -e '.[grammar]'
    python examples/experiments/grammars.py
    python examples/experiments/grammars.py --target google/gemma-3-270m --json grammars.json

The schema is compiled by xgrammar with and without free whitespace. Ratios are of processor time, of one thread;
`without grammar` hides the grammar from the drafter, so that copies of earlier text are all that is drafted.
"""

from __future__ import annotations

import argparse
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
from hf_dart.hub.machine import circumstances

TEXT = {"type": "string", "maxLength": 12}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
ROW = {"identifier": NUMBER, "description": TEXT, "done": {"type": "boolean"}}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "address": {
            "type": "object",
            "properties": {"street": TEXT, "city": TEXT, "country": {"enum": ["France", "Japan", "Kenya"]}},
            "required": ["street", "city", "country"],
            "additionalProperties": False,
        },
        "items": {
            "type": "array",
            "minItems": 3,
            "maxItems": 3,
            "items": {"type": "object", "properties": ROW, "required": [*ROW], "additionalProperties": False},
        },
    },
    "required": ["name", "address", "items"],
    "additionalProperties": False,
}
MODES = {"greedy": {"do_sample": False}, "T=1": {"do_sample": True, "temperature": 1.0, "top_k": 0}}


class Hidden(LogitsProcessor):
    """xgrammar's processor by another name, by which its grammar is not asked ahead."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or repository; the packaged pair by default")
    parser.add_argument("--head", help="folder of a trained head, for a column of its own")
    parser.add_argument("--prompt", default="# A customer and three orders, as JSON\nrow = ")
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

    table = ["| whitespace | mode | method | x stock | τ | tokens |", "|" + "---|" * 6]
    print(*table, sep="\n")
    for free in (False, True):
        compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=free)
        for mode, options in MODES.items():
            seconds: dict[str, list[float]] = {name: [] for name in methods}
            for repeat in range(given.repeats + 1):
                expected = None
                for name, (assistant, processor) in methods.items():
                    torch.manual_seed(repeat)
                    began, masks = time.process_time(), [processor(compiled)]
                    options |= {"logits_processor": masks, "max_new_tokens": given.new_tokens}
                    written = model.generate(**inputs, **options, assistant=assistant)
                    if repeat:  # the first one warms up
                        seconds[name].append(time.process_time() - began)
                    expected = written if expected is None else expected
                    if not torch.equal(written, expected):
                        raise SystemExit(f"{name}: another text than stock's.")
            for name, (assistant, _) in methods.items():
                ratio = statistics.median(a / b for a, b in zip(seconds["stock"], seconds[name], strict=True))
                tau = assistant.last_stats.tau if assistant else 1.0
                tokens = written.shape[1] - inputs["input_ids"].shape[1]
                whitespace = "free" if free else "none"
                table.append(f"| {whitespace} | {mode} | {name} | {ratio:.2f} | {tau:.2f} | {tokens} |")
                print(table[-1], flush=True)
    if given.json:
        about = circumstances(["python", *sys.argv], model.device, ("xgrammar",))
        given.json.write_text(json.dumps({**about, "markdown": "\n".join(table)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
