"""Audits of the packaged pair with its target quantised in every way that this machine loads: `model_cards/quantised`.

    pip install -e '.[quantised]'
    python examples/experiments/quantised.py --package bitsandbytes --json model_cards/quantised/bitsandbytes.json
    python examples/experiments/quantised.py --package torchao --json model_cards/quantised/torchao.json
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hf_dart.bench.audit import audit
from hf_dart.bench.pair import Pair, load_pair
from hf_dart.bench.report import circumstances
from hf_dart.bench.speed import Settings
from hf_dart.bench.suites import cut_prompts, texts
from hf_dart.errors import UserError
from hf_dart.hub.machine import versions
from hf_dart.target.loading import quantization_config
from hf_dart.view.tables import headline, markdown

BITS_AND_BYTES: dict[str, dict[str, Any]] = {
    "bitsandbytes, 4 bits (nf4)": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes, 8 bits": {"load_in_8bit": True},
    "bitsandbytes, 8 bits, no outliers": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}
TORCHAO = {
    "torchao, weights int8": "Int8WeightOnlyConfig",
    "torchao, weights int4": "Int4WeightOnlyConfig",
    "torchao, weights of any bits (8)": "IntxWeightOnlyConfig",
    "torchao, weights float8": "Float8WeightOnlyConfig",
    "torchao, weights int8, activations int8": "Int8DynamicActivationInt8WeightConfig",
    "torchao, weights of any bits, activations int8": "Int8DynamicActivationIntxWeightConfig",
}
PACKAGES = ("torchao", "bitsandbytes", "optimum-quanto")


def quantisations(package: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A name, and the fields of transformers' config, of each that a package brings."""
    if package == "bitsandbytes":
        yield from BITS_AND_BYTES.items()
    elif package == "torchao":
        from torchao import quantization
        from transformers import TorchAoConfig

        for name, kind in TORCHAO.items():
            yield name, TorchAoConfig(getattr(quantization, kind)()).to_dict()
    else:
        yield "quanto, weights int8", {"quant_method": "quanto", "weights": "int8"}


def row_of(pair: Pair, dtype: str, settings: Settings, prompts: list[list[int]]) -> dict[str, Any]:
    """What an audit found."""
    report = audit(pair, prompts, settings)
    found = {
        kind: [one[name] for one in report["findings"] for name in columns if one[name] is not None]
        for kind, columns in {"drafted": ("drafted", "drafted_batch"), "control": ("control",)}.items()
    }
    return {
        "dtype": dtype,
        "rounding": report["rounding"],
        "passed": report["passed"],
        "compared": report["compared"],
        "parted": {kind: len(every) for kind, every in found.items()},
        "largest_ulp": {kind: max((one["gap_ulp"] for one in every), default=None) for kind, every in found.items()},
        "findings": report["findings"],
    }


def as_markdown(content: dict[str, Any]) -> str:
    """The table of a report."""

    def parted(row: dict[str, Any], kind: str, of: int) -> str:
        largest = row["largest_ulp"][kind]
        return f"{row['parted'][kind]} of {of}" + ("" if largest is None else f", at most {largest:.2g} ulp")

    rows = []
    for row in content["results"]:
        if "refused" in row:
            rows.append((row["quantisation"], row["dtype"], "", "", "", row["refused"]))
            continue
        drafted, control = parted(row, "drafted", row["compared"]["rows"]), parted(row, "control", len(row["findings"]))
        verdict = "passed" if row["passed"] else "FAILED"
        rows.append((row["quantisation"], row["dtype"], row["rounding"], drafted, control, verdict))
    names = ["quantisation", "dtype", "rounds like", "drafted, parted from stock", "control: stock's batch", "audit"]
    return "\n".join([headline(content), "", *markdown(names, rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where to write what was found")
    parser.add_argument("--package", choices=PACKAGES, required=True)
    parser.add_argument("--new-tokens", type=int, default=24)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for name, fields in [("none", None), *quantisations(arguments.package)]:
        for dtype in ("float32", "bfloat16"):
            options = {} if fields is None else {"quantization_config": quantization_config(fields)}
            try:
                pair = load_pair(dtype=dtype, **options)
            except UserError as error:
                print(name, dtype, error, flush=True)
                results.append({"quantisation": name, "dtype": dtype, "refused": "does not load here"})
                continue
            text, files = texts(None)
            prompts = cut_prompts(pair.tokenizer, files, 2, 32)
            settings = Settings(prompts=2, prompt_tokens=32, new_tokens=arguments.new_tokens, repeats=1, batches=(1, 2))
            command = ["python", "examples/experiments/quantised.py", "--package", arguments.package]
            about = about or {**circumstances(pair, settings, text, command), "dtype": "float32 and bfloat16"}
            results.append({"quantisation": name, **row_of(pair, dtype, settings, prompts)})
            print(name, dtype, "passed" if results[-1]["passed"] else "FAILED", flush=True)
            content = {**about, "versions": versions(("torch", "transformers", arguments.package)), "results": results}
            content["markdown"] = as_markdown(content)
            arguments.json.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf8")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
