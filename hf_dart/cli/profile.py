"""`hf-dart profile`: what drafting costs on this machine, for trees whose size follows it."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from hf_dart.cli import common
from hf_dart.errors import UserError


def add(commands: Any) -> None:
    about = "measure the costs of drafting, by which trees are sized"
    parser = commands.add_parser("profile", parents=[common.pair_options()], help=about)
    save = "write the costs into the config.json of the head's folder (--head)"
    parser.add_argument("--save", action="store_true", help=save)
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    config = Path(arguments.head or "", "config.json")
    if arguments.save and (arguments.head is None or not config.is_file()):
        raise UserError("--save writes into a head's own folder: give one with --head.")
    common.check_file(config if arguments.save else None)
    from hf_dart.bench import profiling
    from hf_dart.drafters.trained import TrainedDrafter
    from hf_dart.hub.machine import hardware
    from hf_dart.hub.tables import markdown

    pair = common.load(arguments)
    if not pair.head.draft_length:
        raise UserError("Copied text costs nothing to draft; name a head with --head.")
    content = json.loads(config.read_text(encoding="utf8")) if arguments.save else {}
    if arguments.save and not (
        isinstance(pair.head, TrainedDrafter) and content.get("model_type") == pair.head.config.model_type
    ):
        raise UserError("--save writes into heads of hf_dart's own format; give other heads a TreeConfig.")
    found = profiling.measure(pair, quiet=False)
    print(f"{pair.target_name}, {pair.head_name}, {hardware(pair.model.device)}")
    print(f"one token of stock generate: {found.token_ms:.2f} ms")
    print(f"one round without a draft: {found.plain_ms:.2f} ms")
    sizes, costs = zip(*found.tree["verify_costs"], strict=True)
    units = {"a round without a draft": 1.0, "a token of stock": found.plain_ms / (found.token_ms or math.inf)}
    rows = [[f"cost, of {name}", *(f"{cost * unit:.2f}" for cost in costs)] for name, unit in units.items()]
    common.show("\n".join(markdown(["nodes", *(f"{size:g}" for size in sizes)], rows)))
    print(f"a draft: {found.tree['draft_cost']:.2f}")
    if "level_cost" in found.tree:
        print(f"each level, in addition: {found.tree['level_cost']:.2f}")
    print("tree=" + json.dumps(found.tree))
    if arguments.save:
        content["tree"] = {**content.get("tree", {}), **found.tree}
        content["tree"].pop("nodes", None)
        common.write_json(config.resolve(), content)
    return 0
