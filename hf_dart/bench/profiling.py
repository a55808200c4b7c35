"""Costs of drafting on this machine: rounds of growing trees, timed against stock's own tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch

from hf_dart.bench.exact import run
from hf_dart.bench.pair import Pair
from hf_dart.models.running_states.mixers import takes_levels
from hf_dart.trees.config import TreeConfig
from hf_dart.trees.costs import Points

SIZES = (1, 2, 4, 8, 16, 32, 64)
_WARMUP = 4  # tokens
_LONGEST = 8  # levels of a chain whose cost is measured, at most
_STOCK, _CHAIN, _BUSHY = "stock", "chain", "bushy"  # names of the ways that are no tree size


@dataclass(frozen=True)
class Profile:
    """Costs relative to a round without a draft, at batch 1.

    Attributes:
        verify: (tokens, cost) of a round less its draft, as `TreeConfig.verify_costs` takes them.
        draft: of a draft, as `TreeConfig.draft_cost` takes it.
        level: of a level of nodes, as `TreeConfig.level_cost` takes it; None where the target computes none one by one.
        token_ms: stock's time per token.
        plain_ms: that of a round without a draft.
    """

    verify: Points
    draft: float
    level: float | None
    token_ms: float
    plain_ms: float

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of a `TreeConfig` that it decides."""
        levels = {} if self.level is None else {"level_cost": self.level}
        return {"verify_costs": self.verify, "draft_cost": self.draft, **levels}


def measure(
    pair: Pair,
    *,
    depth: int | None = None,
    context: int = 192,
    rounds: int = 12,
    repeats: int = 3,
    sizes: Sequence[int] = SIZES,
    progress: Callable[[str], object] = lambda line: None,
) -> Profile:
    """Time greedy rounds at batch 1, interleaved with stock, and keep the quickest repeat of each.

    Rounds are counted, whatever their drafts are worth. What grows with the tree besides the target's forward
    (growth, walk, masks) is part of its cost. The results are rounded.

    Args:
        pair: target and head, which drafts text of its own: copied text fills no tree of a given size.
        depth: of the drafts, which cost autoregressive heads a pass each; None is what the head's own trees have.
        context: tokens of a random prompt.
        rounds: about how many are timed at a time.
        repeats: of everything.
        sizes: of trees, rising from 1; two or more.
    """
    vocabulary = pair.model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocabulary, (1, context), generator=torch.Generator().manual_seed(0)).to(pair.model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    endless = copy.deepcopy(pair.model.generation_config)
    endless.do_sample, endless.eos_token_id = False, None
    head = pair.head
    levels = takes_levels(pair.model)
    # If levels are computed one by one, each has a cost of its own: sizes are measured on one level, and a level costs
    # what a chain costs more than as many nodes on one level.
    flat = TreeConfig(depth=1, lookup=0, top_k=min(max(sizes[-1], _LONGEST), vocabulary))
    depth = depth or head.tree_config.depth
    trees: dict[str | int, TreeConfig] = {
        size: replace(flat, nodes=size) if levels else TreeConfig(nodes=size, depth=depth, lookup=0, top_k=16)
        for size in sizes
    }
    longest = min(_LONGEST, head.draft_length)
    if has_level := levels and longest > 1:
        trees |= {_CHAIN: TreeConfig.chain(longest), _BUSHY: replace(flat, nodes=longest + 1)}

    def timed(tokens: int, way: str | int) -> tuple[float, float, int]:
        """Seconds of a call that writes so many tokens, those of its drafts, and its rounds."""
        options = {"generation_config": endless, "do_sample": False, "max_new_tokens": tokens}
        if way == _STOCK:
            return run(pair.model, inputs, options).seconds, 0.0, tokens
        tree = trees[way]
        done = run(pair.model, inputs, {**options, "assistant": head, "tree_config": tree})
        assert done.stats is not None
        spent = done.stats.seconds
        return done.seconds - spent["prefill"], spent["draft"] if tree.nodes != 1 else 0.0, done.stats.rounds

    best = dict.fromkeys([_STOCK, *trees], inf)
    draft = prefill = inf
    drafts = {_CHAIN} if has_level else trees.keys() - {1}
    for way in best:
        timed(_WARMUP, way)
    for repeat in range(repeats):
        progress(f"repeat {repeat + 1} of {repeats}")
        prefill = min(prefill, timed(1, _STOCK)[0])
        for way in best:
            # A deeper tree brings more tokens per round.
            seconds, drafting, count = timed(rounds * (1 if way in (_STOCK, 1) else 2) + 1, way)
            best[way] = min(best[way], (seconds - drafting) / max(count, 1))
            if way in drafts:
                draft = min(draft, drafting / max(count, 1))
    token = max(best[_STOCK] * (rounds + 1) - prefill, 0.0) / rounds  # noise may put them in the wrong order
    plain = best[1]
    level = max((best[_CHAIN] - best[_BUSHY]) / plain / (longest - 1), 0.0) if has_level else 0.0
    verify: list[tuple[float, float]] = []
    for size in sizes:
        alone = best[size] / plain - level * min(size - 1, 1)
        verify.append((float(size), round(max(alone, verify[-1][1] if verify else 1.0), 3)))
    known = round(level, 3) if has_level else None
    return Profile(tuple(verify), round(draft / plain, 3), known, 1000 * token, 1000 * plain)
