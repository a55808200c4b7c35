"""Draft trees against naive references: which nodes they hold, and which path a text takes through them."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from hf_dart.decoding.rows import Rows, Streaming
from hf_dart.decoding.walk import Walker, follow
from hf_dart.trees.tree import Beam, DraftTree, grow_tree

Path = tuple[int, ...]


def draft(batch: int, depth: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Candidates [B, d, K], distinct within a depth, and their log-scores, best first."""
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.stack(
        [
            torch.stack([torch.randperm(50, generator=generator)[:width] for _ in range(depth)])
            for _ in range(batch)
        ]
    )
    scores = (2 * torch.randn(batch, depth, width, generator=generator)).log_softmax(-1)
    return candidates, scores.sort(-1, descending=True).values


def paths(tree: DraftTree, row: int) -> list[Path]:
    """The drafted tokens from the root to each real node, by parent pointers alone."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    found = []
    for node in range(1, len(tokens)):
        if parents[node] < 0:
            continue
        path = []
        while node > 0:
            assert 0 <= parents[node] < node, "parents precede children"
            path.append(tokens[node])
            node = parents[node]
        found.append(tuple(reversed(path)))
    return found


def reference(
    candidates: list[list[int]], score: Any, *, nodes: int, beam: int, depth_limit: int
) -> dict[Path, float]:
    """The best paths, found by writing all of them down: every beam path times every candidate."""
    pool: dict[Path, float] = {}
    frontier: dict[Path, float] = {(): 0.0}
    for depth, tokens in enumerate(candidates[:depth_limit]):
        extended = {
            (*path, token): total + min(score(depth, path, i), -1e-4)
            for path, total in frontier.items()
            for i, token in enumerate(tokens)
        }
        pool.update(extended)
        frontier = dict(sorted(extended.items(), key=lambda item: -item[1])[:beam])
    return dict(sorted(pool.items(), key=lambda item: -item[1])[: nodes - 1])


def assert_same_up_to_ties(found: list[Path], wanted: dict[Path, float], score_of: Any) -> None:
    assert len(set(found)) == len(found), "a path occurs twice"
    assert len(found) == len(wanted)
    got = sorted(score_of(path) for path in found)
    assert got == pytest.approx(sorted(wanted.values()), abs=1e-4)
    clear = {path for path, score in wanted.items() if score > min(wanted.values()) + 1e-3}
    assert clear <= set(found)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("depth", "width", "nodes", "beam"),
    [(1, 1, 2, 1), (1, 8, 5, 3), (3, 4, 12, 2), (5, 6, 30, 5), (4, 3, 200, 50), (7, 8, 16, 12), (6, 2, 7, 1)],
)
def test_grows_the_best_paths(depth: int, width: int, nodes: int, beam: int, seed: int) -> None:
    candidates, scores = draft(3, depth, width, seed)
    limits = torch.tensor([depth, max(1, depth - 2), 1 + seed % depth])
    tree = grow_tree(
        torch.tensor([[1], [2], [3]]), candidates, scores, nodes=nodes, beam=beam, depth_limit=limits
    )
    assert tree.tokens[:, 0].tolist() == [1, 2, 3]
    for row in range(3):

        def score(at: int, path: Path, i: int, row: int = row) -> float:
            return float(scores[row, at, i])

        def total(path: Path, row: int = row) -> float:
            lists = candidates[row].tolist()
            return sum(
                min(float(scores[row, at, lists[at].index(token)]), -1e-4) for at, token in enumerate(path)
            )

        wanted = reference(
            candidates[row].tolist(), score, nodes=nodes, beam=beam, depth_limit=int(limits[row])
        )
        found = paths(tree, row)
        assert_same_up_to_ties(found, wanted, total)
        assert max(map(len, found)) <= int(limits[row])
        assert {path[:-1] for path in found} <= {(), *found}, "not closed under prefixes"


def test_depths_and_ancestors() -> None:
    candidates, scores = draft(4, 6, 5, 9)
    tree = grow_tree(
        torch.zeros(4, 1, dtype=torch.long),
        candidates,
        scores,
        nodes=40,
        beam=7,
        depth_limit=torch.tensor([6, 2, 0, 1]),
    )
    assert int(tree.depths.max()) <= tree.max_depth
    for row in range(4):
        parents = tree.parents[row].tolist()
        for node in range(tree.size):
            above = [node]
            while parents[above[-1]] >= 0:
                above.append(parents[above[-1]])
            assert tree.ancestors[row, node].nonzero().flatten().tolist() == sorted(above)
            assert int(tree.depths[row, node]) == len(above) - 1
    assert (tree.parents[2] == -1).all(), "a row that may not draft has its root only"


def test_size_is_the_same_for_all_rows_and_limits() -> None:
    candidates, scores = draft(2, 5, 4, 1)
    root = torch.tensor([[1], [2]])
    sizes = {
        grow_tree(root, candidates, scores, nodes=9, beam=3, depth_limit=limit).size
        for limit in (None, torch.tensor([5, 5]), torch.tensor([0, 1]), torch.tensor([-3, 4]))
    }
    assert sizes == {9}


def test_width_one_is_a_chain() -> None:
    candidates, scores = draft(2, 6, 1, 4)
    tree = grow_tree(torch.tensor([[1], [2]]), candidates, scores, nodes=7, beam=1)
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3, 4, 5]] * 2
    assert torch.equal(tree.tokens[:, 1:], candidates[..., 0])
    chain = DraftTree.chain(tree.tokens)
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(chain, name), getattr(tree, name))


def test_chain_with_empty_nodes() -> None:
    tree = DraftTree.chain(torch.arange(8).view(2, 4), torch.tensor([4, 2]))
    assert tree.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -1, -1]]
    assert tree.depths.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert tree.ancestors[1].long().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("limit", [None, [5, 2]])
def test_scorer_sees_the_path(limit: list[int] | None) -> None:
    """A scorer whose answer depends on all drafted tokens and on the history before them."""
    depth, width, nodes, beam = 5, 4, 24, 6
    candidates, scores = draft(2, depth, width, 7)
    history = torch.tensor([[3, 5, 8], [13, 21, 34]])

    def score(path: list[int], token: int, alone: float) -> float:
        return alone - ((sum((i + 1) * t for i, t in enumerate(path)) * 7 + token * 3) % 11) / 4

    def scorer(beam: Beam, alone: Tensor) -> Tensor:
        prefixes, tokens = beam.paths(), candidates[:, beam.depth]
        assert prefixes.shape[-1] == history.shape[1] + beam.depth
        return torch.tensor(
            [
                [
                    [score(path, token, a) for token, a in zip(tokens[b].tolist(), alone[b].tolist(), strict=True)]
                    for path in prefixes[b].tolist()
                ]
                for b in range(2)
            ]
        )

    limits = None if limit is None else torch.tensor(limit)
    tree = grow_tree(
        history, candidates, scores, nodes=nodes, beam=beam, depth_limit=limits, scorer=scorer
    )
    for row in range(2):
        lists = candidates[row].tolist()

        def step(at: int, path: Path, i: int, row: int = row, lists: Any = lists) -> float:
            prefix = [*history[row].tolist(), *path]
            return score(prefix, lists[at][i], float(scores[row, at, i].clamp(max=-1e-4)))

        def total(path: Path, step: Any = step, lists: Any = lists) -> float:
            return sum(
                min(step(at, path[:at], lists[at].index(token)), -1e-4) for at, token in enumerate(path)
            )

        wanted = reference(
            lists, step, nodes=nodes, beam=beam, depth_limit=depth if limit is None else limit[row]
        )
        assert_same_up_to_ties(paths(tree, row), wanted, total)


def test_certain_tokens_keep_their_parents() -> None:
    """Scores of 0 (probability 1) at every depth: children must not crowd out their own parents."""
    candidates, _ = draft(1, 6, 3, 2)
    scores = torch.zeros(1, 6, 3)
    scores[..., 1:] = -inf
    tree = grow_tree(torch.tensor([[1]]), candidates, scores, nodes=4, beam=3)
    assert paths(tree, 0) == [tuple(candidates[0, : i + 1, 0].tolist()) for i in range(3)]


# ---- the walk ---------------------------------------------------------------------------------------------


def random_tree(batch: int, nodes: int, seed: int) -> DraftTree:
    """Random shapes over a vocabulary of five; siblings differ, some nodes are empty."""
    random = Random(seed)
    tokens, parents = [], []
    for _ in range(batch):
        row_tokens, row_parents = [random.randrange(5)], [-1]
        while len(row_tokens) < nodes:
            parent = random.randrange(max(0, len(row_tokens) - 5), len(row_tokens))
            taken = {t for t, p in zip(row_tokens, row_parents, strict=True) if p == parent}
            free = sorted(set(range(5)) - taken)
            empty = parent > 0 and row_parents[parent] < 0
            if random.random() < 0.1 or not free or empty:
                row_tokens.append(random.randrange(5))
                row_parents.append(-1)
            else:
                row_tokens.append(random.choice(free))
                row_parents.append(parent)
        tokens.append(row_tokens)
        parents.append(row_parents)
    return DraftTree.from_parents(torch.tensor(tokens), torch.tensor(parents), max_depth=nodes)


def rows_for(batch: int, room: int, eos: list[int]) -> Rows:
    config = GenerationConfig(max_length=4 + room)
    config._pad_token_tensor = torch.tensor(0)
    criteria = StoppingCriteriaList([MaxLengthCriteria(4 + room)])
    if eos:
        criteria.append(EosTokenCriteria(torch.tensor(eos)))
    return Rows(torch.ones(batch, 4, dtype=torch.long), None, config, criteria, in_step=False)


@pytest.mark.parametrize("eos", [[], [2]])
@pytest.mark.parametrize("seed", range(25))
def test_follow_takes_the_path_of_the_reference_walk(seed: int, eos: list[int]) -> None:
    batch, nodes = 3, 14
    tree = random_tree(batch, nodes, seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, nodes, 5, generator=generator)
    limits = [nodes, 3, 0] if seed % 2 else [nodes] * 3
    outcomes = []
    for walk in ("__call__", "_walk_by_token"):
        rows = rows_for(batch, 20, eos)
        walker = Walker(LogitsProcessorList(), rows, Streaming(None, rows), None)
        accepted = getattr(walker, walk)(tree, logits, limits)
        path = [accepted.path[b, :count].tolist() for b, count in enumerate(accepted.counts)]
        texts = [rows.generated(place).tolist() for place in range(max(rows.emitted))]
        outcomes.append((path, accepted.counts, rows.emitted, texts))
    assert outcomes[0] == outcomes[1]


def test_follow_on_full_paths() -> None:
    """Targets that repeat a whole drafted path are followed to its leaf."""
    for seed in range(20):
        tree = random_tree(1, 20, seed)
        parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
        leaf = int(tree.depths[0].argmax())
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        targets = torch.full((1, 20), 99)
        for node, child in pairwise(path):
            targets[0, node] = tokens[child]
        found, emitted, lengths = follow(tree, targets)
        assert int(lengths) == len(path)
        assert found[0, : len(path)].tolist() == path
        assert emitted[0, : len(path)].tolist() == [*(tokens[node] for node in path[1:]), 99]
