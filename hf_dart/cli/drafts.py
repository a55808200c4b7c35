"""`hf-dart drafts`: ways to make a draft tree of one head, side by side."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_dart.bench.pair import load_head
from hf_dart.cli.common import (
    check_file,
    load,
    pair_options,
    positive,
    set_threads,
    sizes,
    write_json,
)
from hf_dart.errors import UserError, sentence


def add(commands: Any) -> None:
    """Add the command to those of `hf-dart`."""
    parser = commands.add_parser(
        "drafts", parents=[pair_options()], help="ways to make a draft tree of one head, side by side"
    )
    parser.add_argument("--nodes", type=positive, default=60, help="of all trees, root included (default: %(default)s)")
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="default: the source of the installed pytest"
    )
    parser.add_argument("--prompts", type=positive, default=8, help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=positive, default=96, help="of the longest (default: %(default)s)")
    parser.add_argument("--new-tokens", type=positive, default=96, help="per prompt (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=1, help="default: %(default)s")
    parser.add_argument(
        "--batch", dest="batches", type=sizes, default=(1,), metavar="SIZES", help="such as 1,4 (default: 1)"
    )
    parser.add_argument(
        "--others", nargs="+", default=(), metavar="HEAD", help="other heads of the target: their selectors and editors"
    )
    parser.add_argument(
        "--ranks", type=sizes, default=(), metavar="RANKS", help="such as 64,128: of LM heads that score drafts"
    )
    parser.add_argument(
        "--modes", nargs="+", default=("greedy", "sampled, T=1"), metavar="MODE", help="of those of hf-dart bench"
    )
    parser.add_argument("--profile", action="store_true", help="measure costs first, for the trees sized by them")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write what was measured, mode by mode; the same command goes on"
    )
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    check_file(arguments.json)
    set_threads(arguments.threads)
    from hf_dart.bench import draft_methods, profile, report, speed, suites

    names = ("prompts", "prompt_tokens", "new_tokens", "repeats", "batches")
    before: dict[str, Any] = {}
    costs = None
    try:
        if arguments.json is not None and arguments.json.is_file():
            before, costs = draft_methods.earlier(arguments.json)
        settings = speed.Settings(**{name: getattr(arguments, name) for name in names})
        modes = {mode: speed.MODES[mode] for mode in arguments.modes}
    except ValueError as error:
        raise UserError(sentence(error)) from error
    except KeyError as error:
        raise UserError(f"There is no mode {error}; give some of {', '.join(map(repr, speed.MODES))}.") from error
    files = suites.default_files() if arguments.text is None else arguments.text
    text = "pytest's source" if arguments.text is None else ", ".join(path.name for path in files)
    pair = load(arguments)
    others = {Path(path).name: load_head(path, pair.model, pair.tokenizer) for path in arguments.others}
    prompts = suites.cut_prompts(pair.tokenizer, files, settings.prompts, settings.prompt_tokens)
    if not arguments.profile:
        costs = None
    elif costs is None:
        costs = profile.measure(pair, progress=_show)
    ways = draft_methods.draft_methods(pair.head, arguments.nodes, costs)
    ways |= draft_methods.of_others(others, arguments.nodes)
    try:
        ways |= draft_methods.of_ranks(pair.head, arguments.ranks, arguments.nodes)
    except ValueError as error:
        raise UserError(sentence(error)) from error
    about = report.circumstances(pair, settings, pair.head.tree_config, text, ["hf-dart", *arguments.words])
    about["drafts"] = {name: way.describe() for name, way in ways.items()}
    if costs is not None:
        about["costs"] = asdict(costs)
    # As they come back from a file.
    content = json.loads(json.dumps({**about, "results": []}))
    content["results"] = draft_methods.known(before, content)
    done = {one["mode"] for one in content["results"]}
    for mode, options in modes.items():
        if mode in done:
            continue
        _show(mode)
        methods = {name: way.options for name, way in ways.items()}
        measurements = speed.measure(pair, prompts, settings, methods, _show, {mode: options})
        content["results"] += report.as_json(measurements, about)["results"]
        write_json(arguments.json, content)
    print(draft_methods.as_table(content))
    return 0 if all(one.get("identical", True) for one in content["results"]) else 1


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
