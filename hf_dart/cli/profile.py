"""`hf-dart profile`: what drafting costs on this machine, for trees whose size follows it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_dart.cli import common
from hf_dart.errors import UserError


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "profile", parents=[common.pair_options()], help="measure the costs of drafting, by which trees are sized"
    )
    common.json_option(parser)
    parser.add_argument(
        "--save", action="store_true", help="write the costs into the config.json of the head's folder (--head)"
    )
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    common.check_file(arguments.json)
    config = Path(arguments.head or "", "config.json")
    if arguments.save and (arguments.head is None or not config.is_file()):
        raise UserError("--save writes into a head's own folder: give one with --head.")
    common.check_file(config if arguments.save else None)
    from hf_dart.bench import profiling
    from hf_dart.hub.machine import hardware, versions
    from hf_dart.view.tables import markdown

    pair = common.load(arguments)
    if arguments.save and not _keeps_trees(config, pair.head):
        raise UserError("--save writes into heads of hf_dart's own format; this is another, so give --json instead.")
    found = profiling.measure(pair, progress=common.say)
    print(f"{pair.target_name}, {pair.head_name}, {hardware(pair.model.device)}")
    print(f"one token of stock generate: {found.token_ms:.2f} ms")
    print(f"one round without a draft: {found.plain_ms:.2f} ms; costs relative to it:")
    sizes, costs = zip(*found.verify, strict=True)
    cells = ["cost", *(f"{cost:.2f}" for cost in costs)]
    print("\n".join(markdown(["nodes", *(f"{size:g}" for size in sizes)], [cells])))
    print(f"a draft: {found.draft:.2f}")
    if found.level is not None:
        print(f"each level, in addition: {found.level:.2f}")
    print("tree=" + json.dumps(found.settings))
    about = {"hardware": hardware(pair.model.device), "versions": versions()}
    times = {"token_ms": found.token_ms, "plain_ms": found.plain_ms}
    common.write_json(arguments.json, {**about, **times, **found.settings})
    if arguments.save:
        content = json.loads(config.read_text(encoding="utf8"))
        content["tree"] = {**content.get("tree", {}), **found.settings}
        content["tree"].pop("nodes", None)
        # Written atomically.
        new = config.with_name(f"{config.name}.new")
        with common.writing(config):
            new.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf8")
            new.replace(config)
    return 0


def _keeps_trees(config: Path, head: Any) -> bool:
    """Return True if the head reads its trees from there; heads of other projects do not."""
    from hf_dart.drafters.trained import TrainedDrafter

    kind = json.loads(config.read_text(encoding="utf8")).get("model_type")
    return isinstance(head, TrainedDrafter) and kind == head.config.model_type
