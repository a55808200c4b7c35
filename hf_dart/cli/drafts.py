"""`hf-dart drafts`: ways to make a draft tree of one head, side by side."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_dart.bench.pair import load_head
from hf_dart.cli.common import (
    check_file,
    command_line,
    given,
    json_option,
    load,
    pair_options,
    positive,
    progress_bar,
    say,
    set_threads,
    show,
    sizes,
    text_option,
    write_json,
)
from hf_dart.errors import UserError, as_user_error


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "drafts", parents=[pair_options()], help="ways to make a draft tree of one head, side by side"
    )
    parser.add_argument("--nodes", type=positive, default=60, help="of all trees, root included (default: %(default)s)")
    text_option(parser)
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
        "--modes", nargs="+", default=("greedy", "sampled, T=1"), metavar="MODE", help="of those of hf-dart bench"
    )
    parser.add_argument("--profile", action="store_true", help="measure costs first, for the trees sized by them")
    json_option(parser)
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    check_file(arguments.json)
    set_threads(arguments.threads)
    from hf_dart.bench import draft_methods, profile, report, speed, suites

    names = ("prompts", "prompt_tokens", "new_tokens", "repeats", "batches")
    with as_user_error(ValueError):
        settings = speed.Settings(**given(arguments, names))
    if wrong := set(arguments.modes) - speed.MODES.keys():
        raise UserError(f"There is no mode {min(wrong)!r}; give some of {', '.join(map(repr, speed.MODES))}.")
    text, files = suites.texts(arguments.text)
    pair = load(arguments, trained=True)
    others = {Path(path).name: load_head(path, pair.model, pair.tokenizer) for path in arguments.others}
    prompts = suites.cut_prompts(pair.tokenizer, files, settings.prompts, settings.prompt_tokens)
    costs = profile.measure(pair, progress=say) if arguments.profile else None
    ways = draft_methods.draft_methods(pair.head, arguments.nodes, costs)
    ways |= draft_methods.of_others(others, arguments.nodes)
    methods = {name: way.options for name, way in ways.items()}
    modes = {mode: speed.MODES[mode] for mode in arguments.modes}
    with progress_bar() as advance:
        measurements = speed.measure(pair, prompts, settings, methods, advance, modes)
    content = {
        **report.circumstances(pair, settings, text, command_line(arguments)),
        **report.describe_tree(pair, pair.head.tree_config, settings.batches),
        "drafts": {name: way.describe() for name, way in ways.items()},
        **({} if costs is None else {"costs": asdict(costs)}),
        "results": report.results(measurements),
    }
    show(draft_methods.as_table(content))
    write_json(arguments.json, content)
    return 0 if all(one.identical for one in measurements) else 1
