"""`TreeConfig`: size, shape, scores and costs of draft trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any

import numpy as np

from hf_dart.errors import check_types, refuse_unknown
from hf_dart.trees import costs
from hf_dart.trees.costs import RoundCost, checked_points, interpolated
from hf_dart.trees.tree import MAX_DRAFT_LENGTH

MAX_NODES = 1024
"""Most nodes of a tree per row, and candidates and paths per depth: memory and time of masks grow with the square."""

_LEVELLED = 16  # most nodes of trees that are computed level by level, where nothing else is said

_RANGES = {
    **dict.fromkeys(("nodes", "top_k", "beam"), (1, MAX_NODES)),
    "depth": (1, inf),
    "refine": (0, MAX_DRAFT_LENGTH),  # each pass fixes one more token, from the first on
    **dict.fromkeys(("lookup", "node_cost", "level_cost", "draft_cost", "ngram_weight"), (0, inf)),
}

_RETIRED = {"calibrate"}  # fields of earlier versions that saved configs may hold


@dataclass(frozen=True)
class TreeConfig:
    """Settings of draft trees; per call by `generate(..., tree_config=TreeConfig(...))`.

    Args:
        nodes: N, nodes per row, the root included, at most 1024; with 1 nothing is drafted. None sizes trees by
            the batch, the device and the worth of each node, and pauses drafting where it does not pay.
        depth: deepest node; None is the drafter's draft length.
        top_k: K, candidates per depth, at most 1024.
        beam: W, paths that are expanded at each depth with n-grams; otherwise the best nodes of all paths are found
            without it. At most 1024.
        lookup: deepest copies of earlier text that may be grafted onto the tree (`hf_dart.trees.copies`); 0 for none.
        node_cost: cost of verifying one more node in one row on a CPU, relative to a round without a draft. None is an
            estimate, and where trees have no given size, it is measured while generating.
        verify_costs: in place of `node_cost`, on any device: costs of a forward of so many tokens, relative to one of a
            single token, as pairs (tokens, cost) of rising tokens from (1, 1) on, which may fall; straight lines
            between them. `hf-dart profile` measures them. Empty for none.
        level_cost: additional cost, in that unit, of each level of nodes on targets that compute trees level by level,
            as some with running states do (`hf_dart.cache.states`). None is an estimate there, and nothing elsewhere.
        draft_cost: cost of a draft, relative to a round without one; None is the drafter's own estimate
            (`Drafter.draft_cost`), and on a CPU, where trees have no given size, it is measured while generating.
            Rounds in which drafts would bring less than they cost have none, and only copied text is verified
            (`decoding.pace`). With numbers here and in `node_cost` or `verify_costs`, the first calls of equal drafters
            make equal rounds.
        selector: ask the drafter's selector, if it has one, which neighbouring tokens go together.
        ngram_weight: how much the drafter's n-gram table counts (`Drafter.ngram`), if it has one: the power that its
            probabilities are raised to.
        scores: how a node's score is put together: "survival", an estimate of its chance, or "paper", DART's
            weighted sum (`hf_dart.trees.scores`), which cannot tell a node's worth: give `nodes` with it.
        refine: how often the drafter looks at its draft again before the tree grows; 0 takes the first draft, and
            31 looks always reach a fixed point. Each costs about as much as the draft itself, which pays where the
            target is much slower.
        shared_noise: when sampling, rank candidates with the noise that the target will draw its tokens
            with. The output is the same either way; more drafts are accepted with it.

    Raises:
        ValueError: a field is out of range.
    """

    nodes: int | None = None
    depth: int | None = None
    top_k: int = 16
    beam: int = 12
    lookup: int = 24
    node_cost: float | None = None
    verify_costs: tuple[tuple[float, float], ...] = ()
    level_cost: float | None = None
    draft_cost: float | None = None
    selector: bool = True
    ngram_weight: float = 0.5
    scores: str = "survival"
    refine: int = 0
    shared_noise: bool = True

    def __post_init__(self) -> None:
        check_types(self, TreeConfig, "TreeConfig.")
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"TreeConfig.{name} is {value}; give {least} or more.")
            if value is not None and value > most:
                raise ValueError(f"TreeConfig.{name} is {value}; give {most} or less.")
        given = self.verify_costs  # lists if they come from a JSON file
        points = () if given in ((), []) else checked_points("TreeConfig.verify_costs", given)
        object.__setattr__(self, "verify_costs", points)
        if self.scores not in ("survival", "paper"):
            raise ValueError(f"TreeConfig.scores is {self.scores!r}; give 'survival' or 'paper'.")
        if self.scores == "paper" and self.nodes is None:
            raise ValueError("TreeConfig.scores 'paper' does not say what a node is worth; give nodes, such as 60.")

    @classmethod
    def paper(cls) -> TreeConfig:
        """Return the paper's trees (DART, arXiv 2601.19278, section 3.3), for a drafter with an n-gram table.

        59 nodes and the root, 25 candidates per depth, a beam of 20, its scores, and nothing that it does not have.
        """
        return cls(nodes=60, top_k=25, beam=20, lookup=0, selector=False, scores="paper", shared_noise=False)

    @classmethod
    def chain(cls, depth: int) -> TreeConfig:
        """One path of `depth` tokens: the width-1 tree."""
        return cls(nodes=depth + 1, depth=depth, top_k=1, beam=1, lookup=0)

    def resolve_depth(self, draft_length: int) -> int:
        """Depth of the deepest node that is drafted, by a drafter of `draft_length` tokens."""
        return min(self.depth or draft_length, draft_length)

    def resolve_nodes(self, batch_size: int, device_type: str) -> int:
        """Most nodes per row in a batch of `batch_size` rows."""
        if self.nodes is not None:
            return self.nodes
        most = max(2, min(64, 256 // batch_size) if device_type != "cpu" else 64 // batch_size)
        return min(most, _LEVELLED) if self.level_cost else most

    def for_levels(self, computed: bool) -> TreeConfig:
        """Return settings for a target whose trees are computed level by level, or (not `computed` so) any other."""
        cost = costs.LEVEL_COST if self.level_cost is None else self.level_cost
        return replace(self, level_cost=cost if computed else 0.0)

    def round_cost(self, batch_size: int, device_type: str, drafted: bool = True) -> RoundCost:
        """Cost of rounds of a batch, from the fields of this config and the estimates of `hf_dart.trees.costs`.

        An accelerator of unknown costs is taken to verify many nodes in the time of one. Nodes cost nothing, either,
        where `nodes` asks for so many anyway.
        """
        sizes = np.arange(1, self.resolve_nodes(batch_size, device_type) + 1)
        once = costs.DRAFT_COST if self.draft_cost is None else self.draft_cost
        if self.nodes is None and self.verify_costs:
            forward = interpolated(self.verify_costs, batch_size * sizes)
            verify = forward / interpolated(self.verify_costs, batch_size)
        elif self.nodes is None and device_type == "cpu":
            node = costs.NODE_COST if self.node_cost is None else self.node_cost
            verify = 1 + node * batch_size * (sizes - 1) + (costs.ANY_TREE if node else 0.0) * (sizes > 1)
        else:
            verify = np.ones(len(sizes))
        return RoundCost(once * (1 + self.refine) if drafted else 0.0, verify, self.level_cost or 0.0)


def checked_tree(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a [`TreeConfig`] that were saved with a drafter, checked, without those of earlier versions alone."""
    kept = {name: value for name, value in saved.items() if name not in _RETIRED}
    known = [one.name for one in fields(TreeConfig)]
    refuse_unknown(sorted(kept), known, "tree has to hold fields of TreeConfig, which has no", ValueError)
    TreeConfig(**kept)
    return kept
