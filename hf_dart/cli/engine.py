"""`hf-dart bench engine`: what a round costs, on models of real shapes without real weights."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hf_dart.cli.common import check_file, given, json_option, positive, say, set_threads, show, write_json
from hf_dart.errors import as_user_error

_NUMBERS = {
    "nodes": "of the tree (default: 64, on a CPU 16)",
    "draft-length": "of the head (default: 8)",
    "batch": "default: 1",
    "prompt-tokens": "default: 128, on a CPU 64",
    "new-tokens": "default: 256, on a CPU 32",
    "repeats": "default: 3, on a CPU 2",
    "seconds": "that it may take, but for what is under way then (default: 540, on a CPU 240)",
}


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "engine", help="what a round costs on a device, beside what it has to: shapes of real targets, random weights"
    )
    parser.add_argument("--shape", help="qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b (default) or tiny")
    parser.add_argument("--tau", type=float, help="tokens per round that the head is made to reach (default: 5)")
    for name, text in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=positive, help=text)
    parser.add_argument(
        "--backend", help="of torch.compile; none compiles nothing of ours (default: inductor, on a CPU none)"
    )
    parser.add_argument(
        "--engine",
        nargs="+",
        type=_option,
        metavar="NAME=VALUE",
        help="other options of hf_dart.compile, such as lag=1 first_tier=1024",
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16, on a CPU float32"
    )
    parser.add_argument("--every-method", action="store_true", help="also those that say little on a CPU")
    parser.add_argument("--device", help="default: cuda")
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's choice)")
    json_option(parser)
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    check_file(arguments.json)
    set_threads(arguments.threads)
    from hf_dart.bench import engine

    names = ("shape", "tau", *(name.replace("-", "_") for name in _NUMBERS), "backend", "dtype", "device")
    asked = given(arguments, names)
    if arguments.backend == "none":
        asked["backend"] = None
    if arguments.engine:
        asked["engine"] = dict(arguments.engine)
    if arguments.every_method:
        asked["every_method"] = True
    with as_user_error(ValueError):
        settings = engine.Settings.on(**asked)
    content = engine.measure(settings, say, lambda report: write_json(arguments.json, report))
    show(engine.as_table(content))
    write_json(arguments.json, content)
    return 0 if all(one["same_tokens"] for one in content["results"]) else 1


def _option(text: str) -> tuple[str, Any]:
    """A name and its value, as JSON where it is that."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as lag=1")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
