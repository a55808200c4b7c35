"""Audits of the packaged pair with its target quantised in every way that this machine loads: `model_cards/quantised`.

    pip install -e '.[quantised]'
    python examples/experiments/quantised.py --package bitsandbytes --json model_cards/quantised/bitsandbytes.json
    python examples/experiments/quantised.py --package torchao --json model_cards/quantised/torchao.json

--package optimum-quanto, compressed-tensors and finegrained (transformers' own FP8) go likewise; the last two load
files.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from quantised_files import save_compressed, save_fp8

from hf_dart.bench.auditing import audit
from hf_dart.bench.pair import Pair, load_pair
from hf_dart.bench.report import circumstances
from hf_dart.bench.speed import Settings
from hf_dart.bench.suites import cut_prompts, texts
from hf_dart.errors import UserError
from hf_dart.hub.loading import PACKAGED
from hf_dart.hub.machine import versions
from hf_dart.hub.tables import headline, markdown

BITS_AND_BYTES: dict[str, dict[str, Any]] = {
    "bitsandbytes, 4 bits (nf4)": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes, 8 bits": {"load_in_8bit": True},
    "bitsandbytes, 8 bits, no outliers": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}
TORCHAO: dict[str, tuple[str, str | None]] = {  # the config, and what it calls the weights in groups of 32
    "torchao, weights int8": ("Int8WeightOnlyConfig", None),
    "torchao, weights int4, packed": ("Int4WeightOnlyConfig", None),
    "torchao, weights int4, in groups": ("IntxWeightOnlyConfig", ""),
    "torchao, weights of any bits (8)": ("IntxWeightOnlyConfig", None),
    "torchao, weights float8": ("Float8WeightOnlyConfig", None),
    "torchao, weights int8, activations int8": ("Int8DynamicActivationInt8WeightConfig", None),
    "torchao, weights int4 in groups, activations int8": ("Int8DynamicActivationIntxWeightConfig", "weight_"),
}
# In published files, as `quantised_files` writes them.
FILES = {
    "compressed-tensors": (
        *("W8A16", "W4A16", "W8A8", "W4A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"),
        *("MXFP4A16", "NVFP4", "MXFP4"),
    ),
    "finegrained": ("FP8 in blocks, unpacked",),
}
DTYPES = {"finegrained": ("bfloat16",)}  # what is not quantised stays in that of the files
PACKAGES = ("torchao", "bitsandbytes", "optimum-quanto", *FILES)


def quantisations(package: str, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A name, and the options of `load_pair`, of each that a package brings; files are written below `folder`."""
    if package == "bitsandbytes":
        yield from ((name, configured(fields)) for name, fields in BITS_AND_BYTES.items())
    elif package == "torchao":
        from torchao import quantization
        from transformers import TorchAoConfig

        for name, (kind, grouped) in TORCHAO.items():
            fields: dict[str, Any] = {}
            if grouped is not None:
                group = quantization.PerGroup(32)
                fields = {"weight_dtype": torch.int4, f"{grouped}granularity": group}
            yield name, configured(TorchAoConfig(getattr(quantization, kind)(**fields)).to_dict())
    elif package in FILES:
        for scheme in FILES[package]:
            pair, path = load_pair(dtype=DTYPES.get(package, ("float32",))[0]), folder / scheme
            path.mkdir()
            vars(pair.model).pop("generate", None)
            if package == "compressed-tensors":
                save_compressed(pair.model, path, scheme)
            else:
                save_fp8(pair.model, path)
            pair.tokenizer.save_pretrained(path)
            yield f"{package}, {scheme}", {"target": str(path), "head": PACKAGED}
    else:
        yield "quanto, weights int8", configured({"quant_method": "quanto", "weights": "int8"})


def configured(fields: dict[str, Any]) -> dict[str, Any]:
    return {"quantization_config": fields}


def row_of(pair: Pair, dtype: str, settings: Settings, prompts: list[list[int]]) -> dict[str, Any]:
    """What an audit found."""
    report = audit(pair, prompts, settings)
    found = {
        kind: [one[name] for one in report["findings"] for name in columns if one.get(name) is not None]
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
        controls = sum("control" in one for one in row["findings"])
        drafted, control = parted(row, "drafted", row["compared"]["rows"]), parted(row, "control", controls)
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
    dtypes = DTYPES.get(arguments.package, ("float32", "bfloat16"))
    with TemporaryDirectory() as folder:
        for name, options in [("none", {}), *quantisations(arguments.package, Path(folder))]:
            for dtype in dtypes:
                try:
                    pair = load_pair(dtype=dtype, **options)
                except UserError as error:
                    print(name, dtype, error, flush=True)
                    refused = "does not load here"
                    if "; call generate without" in str(error):
                        refused = "refused: " + str(error.__cause__).partition("; call generate without")[0]
                    results.append({"quantisation": name, "dtype": dtype, "refused": refused})
                    continue
                text, files = texts()
                prompts = cut_prompts(pair.tokenizer, files, 2, 32)
                words = arguments.new_tokens
                settings = Settings(prompts=2, prompt_tokens=32, new_tokens=words, repeats=1, batches=(1, 2))
                command = ["python", "examples/experiments/quantised.py", "--package", arguments.package]
                about = about or {**circumstances(pair, settings, text, command), "dtype": " and ".join(dtypes)}
                results.append({"quantisation": name, **row_of(pair, dtype, settings, prompts)})
                print(name, dtype, "passed" if results[-1]["passed"] else "FAILED", flush=True)
            used = versions(("torch", "transformers", arguments.package))
            content = {**about, "versions": used, "results": results}
            content["markdown"] = as_markdown(content)
            arguments.json.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf8")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
