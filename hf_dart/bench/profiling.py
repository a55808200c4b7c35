"""Costs of drafting on this machine: rounds of growing trees, timed against stock's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from hf_dart.bench import speed
from hf_dart.bench.exact import run
from hf_dart.bench.pair import Pair
from hf_dart.hub.tables import STOCK
from hf_dart.models.features import vocabulary_size
from hf_dart.models.running_states.mixers import takes_levels
from hf_dart.trees.config import TreeConfig

SIZES = (1, 2, 4, 8, 16, 32, 64)
_LONGEST = 8  # levels of a chain whose cost is measured, at most
_CHAIN, _BUSHY = "chain", "bushy"  # names of the ways that are no tree size


class Profile(NamedTuple):
    """Costs at batch 1: those of a `TreeConfig` are relative to a round without a draft."""

    # `verify_costs`, `draft_cost` and, where levels of nodes are computed one by one, `level_cost`.
    tree: dict[str, Any]
    token_ms: float  # stock's time per token
    plain_ms: float  # that of a round without a draft


def measure(
    pair: Pair,
    *,
    depth: int | None = None,  # of the drafts; None is what the head's own trees have
    context: int = 192,  # tokens of a random prompt
    rounds: int = 24,  # that are timed at a time, or fewer where trees bring more tokens
    repeats: int = 3,
    sizes: Sequence[int] = SIZES,  # of trees, rising from 1; two or more
    quiet: bool = True,
) -> Profile:
    """Time greedy rounds at batch 1, interleaved with stock, and keep the quickest repeat of each.

    Rounds are counted, whatever their drafts are worth. What grows with the tree besides the target's forward
    (growth, walk, masks) is part of its cost. The results are rounded. Copied text fills no tree of a given size.
    """
    head, levels = pair.head, takes_levels(pair.model)
    vocabulary = vocabulary_size(pair.model)
    prompt = torch.randint(vocabulary, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    # If levels are computed one by one, each has a cost of its own: sizes are measured on one level, and a level costs
    # what a chain costs more than as many nodes on one level.
    flat = TreeConfig(depth=1, lookup=0, top_k=min(max(sizes[-1], _LONGEST), vocabulary))
    deep = TreeConfig(depth=depth or head.tree_config.depth, lookup=0, top_k=16)
    trees = {str(size): replace(flat if levels else deep, nodes=size) for size in sizes}
    longest = min(_LONGEST, head.draft_length)
    if has_level := levels and longest > 1:
        trees |= {_CHAIN: TreeConfig.chain(longest), _BUSHY: replace(flat, nodes=longest + 1)}

    mode = {"do_sample": False, "eos_token_id": None, "stop_strings": None}  # over the target's own: no text ends early
    settings = speed.Settings(1, context, rounds + 1, repeats, batches=(1,))
    methods = {name: {"assistant": head, "tree_config": tree} for name, tree in trees.items()}
    measured = speed.measure(pair, [prompt], settings, methods, {"greedy": mode}, quiet)
    runs: dict[str, list[Any]] = {one.method: list(chain.from_iterable(one.runs)) for one in measured}
    prefill = min(run(pair.model, runs[STOCK][0].inputs, {**mode, "max_new_tokens": 1}).seconds for _ in range(repeats))
    # Noise may put the two in the wrong order.
    token = max(min(one.seconds for one in runs[STOCK]) - prefill, 0.0) / rounds

    def quickest(name: str, spent: Callable[[Any], float]) -> float:
        """Least seconds per round of the runs of a tree."""
        return min(spent(one) / max(one.stats.rounds, 1) for one in runs[name])

    def rest_of(one: Any) -> float:  # without what a call costs of its own, however few its rounds
        return sum(one.stats.seconds.values()) - one.stats.seconds["prefill"] - one.stats.seconds["draft"]

    plain = quickest("1", lambda one: rest_of(one) + one.stats.seconds["draft"])
    drafted = [_CHAIN] if has_level else trees.keys() - {"1"}
    draft = min(quickest(name, lambda one: one.stats.seconds["draft"]) for name in drafted)
    found: dict[str, Any] = {"draft_cost": round(draft / plain, 3)}
    if has_level:
        more = quickest(_CHAIN, rest_of) - quickest(_BUSHY, rest_of)
        found["level_cost"] = round(max(more / plain / (longest - 1), 0.0), 3)
    verify = [(1.0, 1.0)]
    for size in sizes[1:]:
        alone = quickest(str(size), rest_of) / plain - found.get("level_cost", 0.0)
        verify.append((float(size), max(round(alone, 3), 0.001)))  # steps may fall
    return Profile({"verify_costs": tuple(verify), **found}, 1000 * token, 1000 * plain)
