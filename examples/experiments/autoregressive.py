"""A DART head and an autoregressive one (EAGLE-3), trained alike and measured in one run.

    python examples/experiments/autoregressive.py corpus.bin regenerated.bin runs/rivals --max-steps 4000

Both begin from nothing and see the same rows, in the same order, for the same number of steps; both read the same
features through one layer of the same width, and both are evaluated with trees of several depths, since a deeper draft
costs the autoregressive head another pass and the DART head nothing. What each costs is measured first, as `hf-dart
profile` does, and trees have the size that pays at that cost. Both choose their candidates with the noise that the
target will sample with. Prints the table of `hf-dart bench` with all of them and, per mode, how the best of each
compare. What is trained stays in the output folder: a second call measures without training again.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hf_dart import load_drafter
from hf_dart.bench import baselines, profiling, report, speed, suites
from hf_dart.bench.pair import Pair
from hf_dart.bench.profiling import Profile
from hf_dart.hub.loading import load_target
from hf_dart.hub.tables import as_table
from hf_dart.training.recipe import read_recipe
from hf_dart.training.run import run

_NAMES = {"dart": "DART", "eagle": "EAGLE"}
Costs = dict[str, dict[int, Profile]]
"""By kind of drafter and depth of its drafts."""


def train(kind: str, arguments: argparse.Namespace) -> Path:
    """The folder of a trained drafter, which is trained unless it lies there already."""
    final = arguments.output / kind / "final"
    if not final.is_dir():
        options = {
            "drafter": kind,
            "output_dir": arguments.output / kind,
            "feature_layers": arguments.feature_layers,
            "draft_length": arguments.draft_length,
            "train_data": [arguments.corpus, arguments.regenerated],
            "shares": [1 - arguments.own_share, arguments.own_share],
            "max_length": arguments.length,
            "train_on": "all",
            "max_steps": arguments.max_steps,
            "per_device_train_batch_size": arguments.batch_size,
            "anchors_per_row": arguments.anchors,
            "learning_rate": arguments.learning_rate,
            "adam_beta2": 0.95,
            "lr_scheduler_type": "cosine",
            "warmup_steps": arguments.max_steps // 20,
            "save_strategy": "no",
            "logging_steps": max(arguments.max_steps // 20, 1),
            "report_to": "none",
            "seed": arguments.seed,
        }
        words = []
        for name, value in options.items():
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        run(read_recipe(words))
    return final


def methods(drafters: dict[str, Any], costs: Costs) -> dict[str, dict[str, Any]]:
    """Every drafter with trees of every depth, and stock's prompt lookup."""
    found: dict[str, dict[str, Any]] = {baselines.LOOKUP: {"prompt_lookup_num_tokens": 10}}
    for kind, drafter in drafters.items():
        for depth, cost in costs[kind].items():
            # Copies of earlier text would hide what the drafters know.
            tree = replace(drafter.tree_config, nodes=None, depth=depth, lookup=0, **cost.tree)
            found[f"{_NAMES[kind]}, depth {depth}"] = {"assistant": drafter, "tree_config": tree}
    return found


def cost_table(costs: Costs) -> list[str]:
    """What a draft of each depth costs, in tokens of stock's at batch 1."""
    depths = list(next(iter(costs.values())))
    lines = ["| cost of a draft | " + " | ".join(f"depth {depth}" for depth in depths) + " |"]
    lines.append("|---" * (len(depths) + 1) + "|")
    for kind, of_kind in costs.items():
        cells = [f"{of_kind[depth].tree['draft_cost']:.2f}" for depth in depths]
        lines.append(f"| {_NAMES[kind]} | " + " | ".join(cells) + " |")
    return lines


def comparison(results: list[dict[str, Any]]) -> list[str]:
    """Per mode and batch, the fastest setting of each drafter and the ratio of their speeds."""
    lines = ["| batch | mode | best DART | best EAGLE | DART / EAGLE |", "|---|---|---|---|---|"]
    for batch, mode in {(one["batch"], one["mode"]): None for one in results}:
        here = [one for one in results if (one["batch"], one["mode"]) == (batch, mode)]
        best = [
            max((one for one in here if one["method"].startswith(name)), key=lambda one: one["ratio"]["median"])
            for name in _NAMES.values()
        ]
        cells = [f"{one['ratio']['median']:.2f} x, τ {one['tau']:.2f} ({one['method']})" for one in best]
        ratio = best[0]["tokens_per_second"]["median"] / best[1]["tokens_per_second"]["median"]
        lines.append(f"| {batch} | {mode} | {' | '.join(cells)} | **{ratio:.2f}** |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("regenerated", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--max-steps", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=129, help="tokens of a row")
    parser.add_argument("--anchors", type=int, default=24)
    parser.add_argument("--own-share", type=float, default=0.5, help="of the rows, text that the target wrote itself")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--feature-layers", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--draft-length", type=int, default=8)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 3, 5, 8])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    arguments = parser.parse_args()
    if max(arguments.depths) > arguments.draft_length:
        parser.error(f"--depths go up to --draft-length, {arguments.draft_length}")

    torch.set_num_threads(arguments.threads)
    folders = {kind: train(kind, arguments) for kind in _NAMES}
    model, tokenizer = load_target()
    drafters = {kind: load_drafter(str(path), target=model, tokenizer=tokenizer) for kind, path in folders.items()}
    pair = Pair(model, drafters["dart"], tokenizer, "packaged target", "a DART and an EAGLE head")
    settings = speed.Settings(
        prompts=arguments.prompts, new_tokens=arguments.new_tokens, repeats=arguments.repeats, batches=(1,)
    )
    prompts = suites.cut_prompts(tokenizer, suites.texts()[1], settings.prompts, settings.prompt_tokens)

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    costs: Costs = {kind: {} for kind in drafters}
    for depth in arguments.depths:
        for kind, drafter in drafters.items():
            progress(f"what a draft of {_NAMES[kind]} costs, depth {depth}")
            costs[kind][depth] = profiling.measure(pair._replace(head=drafter), depth=depth)
    measured = methods(drafters, costs)
    measurements = speed.measure(pair, prompts, settings, measured)
    command = ["python", "examples/experiments/autoregressive.py", *sys.argv[1:]]
    trained = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    content = {
        **report.circumstances(pair, settings, "pytest's source", command),
        "results": report.results(measurements),
        "drafters": baselines.parameters(pair, measured),
        "training": trained,
        "costs": {kind: {str(depth): one._asdict() for depth, one in found.items()} for kind, found in costs.items()},
    }
    sections = [cost_table(costs), comparison(content["results"]), [as_table(content)]]
    content["markdown"] = "\n\n".join("\n".join(lines) for lines in sections)
    print(content["markdown"])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")
    if not all(one.verdict.identical for one in measurements if one.ours):
        sys.exit("An output was not stock's.")


if __name__ == "__main__":
    main()
