"""The demo pair's corpus: Python source that every machine has, as one file of token ids.

    python examples/demo_pair/corpus.py corpus.bin [--tokenizer hf_dart/demo_pair/model] [--wide]

Writes uint16 ids with the end-of-text token after every file, as `hf-dart train` reads .bin files.
Packages that are held out for evaluation never enter it.
"""

from __future__ import annotations

import argparse
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

HELD_OUT = ("_pytest", "httpx", "peft", "pytest")
PACKAGES = (
    *("accelerate", "aiohttp", "datasets", "fsspec", "huggingface_hub", "jinja2", "networkx", "numpy"),
    *("pandas", "pip", "pyarrow", "pygments", "rich", "safetensors", "sympy", "tokenizers", "torch"),
    *("transformers", "yaml"),
)
WIDE_PACKAGES = (
    *PACKAGES,
    *("IPython", "absl", "anyio", "attr", "black", "blib2to3", "botocore", "celery", "charset_normalizer", "click"),
    *("dateutil", "dill", "django", "evaluate", "fastapi", "filelock", "flask", "jedi", "joblib", "lm_eval"),
    *("markdown_it", "matplotlib", "more_itertools", "mpl_toolkits", "mpmath", "multiprocess", "mypy", "mypyc"),
    *("narwhals", "nltk", "openai", "opentelemetry", "packaging", "parso", "portalocker", "psutil", "pydantic"),
    *("pytablewriter", "regex", "requests", "sacrebleu", "scipy", "scrapy", "setuptools", "skimage", "sklearn"),
    *("sphinx", "sqlalchemy", "starlette", "statsmodels", "tabulate", "torchgen", "tornado", "trl", "twisted"),
    *("typer", "urllib3", "uvicorn", "werkzeug"),
)
"""The deep pair's; like the others, under permissive licences (MIT, BSD, Apache-2.0, PSF and their like)."""


def source_files(packages: Sequence[str]) -> list[Path]:
    """Files of the standard library and of those `packages` that are installed, in a fixed random order."""
    paths = sysconfig.get_paths()
    installed = ("site-packages", "dist-packages")
    found = [p for p in Path(paths["stdlib"]).rglob("*.py") if not any(name in p.parts for name in installed)]
    for package in packages:
        if package in HELD_OUT:
            raise ValueError(f"{package} is held out for evaluation; leave it out of the corpus.")
        found += (Path(paths["purelib"]) / package).rglob("*.py")
    found = sorted(p for p in found if 200 < p.stat().st_size < 200_000)
    random.Random(0).shuffle(found)
    return found


def held_out_files() -> list[Path]:
    """Files of pytest's source, on which targets and heads are measured."""
    return sorted(p for p in Path(sysconfig.get_path("purelib"), "_pytest").rglob("*.py") if p.stat().st_size > 200)


def texts(files: list[Path]) -> Iterator[str]:
    """The files' text without the licence comment at the top, which would be the corpus's commonest text."""
    for path in files:
        yield re.sub(r"\A(#[^\n]*\n)+", "", path.read_text(encoding="utf8", errors="ignore"))


def write(files: list[Path], tokenizer: Any, output: Path) -> int:
    """Write the ids of `files` to `output`; returns how many there are."""
    total = 0
    with output.open("wb") as stream:
        for start in range(0, len(files), 500):
            batch = list(texts(files[start : start + 500]))
            for ids in tokenizer(batch, add_special_tokens=False)["input_ids"]:
                np.array([*ids, tokenizer.eos_token_id], dtype=np.uint16).tofile(stream)
                total += len(ids) + 1
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokenizer", default="hf_dart/demo_pair/model")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--packages", nargs="*", default=PACKAGES)
    wide = which.add_argument("--wide", dest="packages", action="store_const", const=WIDE_PACKAGES)
    wide.help = "the packages of the deep pair"
    parser.add_argument("--max-files", type=int)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    files = source_files(arguments.packages)[: arguments.max_files]
    total = write(files, tokenizer, arguments.output)
    print(f"{total / 1e6:.1f} M tokens of {len(files)} files in {arguments.output}")


if __name__ == "__main__":
    main()
