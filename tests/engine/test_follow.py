"""The path that the target's own tokens take through a tree on fixed shapes, against the host's walk."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from hf_dart.decoding.rows import Rows, Streaming
from hf_dart.decoding.walk import Walker
from hf_dart.engine.fixed_round import follow
from hf_dart.trees.tree import DraftTree


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
def test_follow_takes_the_path_of_the_hosts_walk(seed: int, eos: list[int]) -> None:
    batch, nodes = 3, 14
    tree = random_tree(batch, nodes, seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, nodes, 5, generator=generator)
    for row, node in (tree.parents >= 0).nonzero().tolist():  # longer paths come true, beyond the limits too
        logits[row, tree.parents[row, node], tree.tokens[row, node]] += 2
    limits = [nodes, 3, 0] if seed % 2 else [nodes] * 3
    rows = rows_for(batch, 20, eos)
    accepted = Walker(LogitsProcessorList(), rows, Streaming(None, rows), None)(tree, logits, limits)
    path, tokens, lengths = follow(tree, logits.argmax(-1))
    assert accepted.counts == rows.emitted
    for row, (count, limit) in enumerate(zip(accepted.counts, limits, strict=True)):
        followed = tokens[row, : min(int(lengths[row]), limit)].tolist()
        ends = [place for place, token in enumerate(followed, 1) if token in eos]
        assert rows.tokens[row][4:] == followed[: min(ends, default=limit)]
        assert accepted.path[row, :count].tolist() == path[row, :count].tolist()


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
