"""Corrections of a depth's chances: learned from what was accepted, the same everywhere, and without a trace."""

from __future__ import annotations

from math import exp, inf, log
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_identical
from support.tiny import prompts, tiny_head, tiny_target

from hf_dart import TreeConfig
from hf_dart.decoding.calibration import Calibration
from hf_dart.decoding.walk import Accepted
from hf_dart.trees.tree import DraftTree


def at(calibration: Calibration, chance: float, depth: int = 0) -> float:
    """The corrected log-chance of a chance."""
    return float(calibration.on_host(depth, np.log(np.array([chance])))[0])


def rounds(calibration: Calibration, count: int, slope: float, offset: float) -> None:
    """Trees of a root and its child, of which the target takes as many as σ(slope · logit(p) + offset) says."""
    random = Random(0)
    for _ in range(count):
        chance = random.uniform(0.05, 0.95)
        truth = 1 / (1 + exp(-slope * log(chance / (1 - chance)) - offset))
        believed = at(calibration, chance)
        right = random.random() < truth
        tree = DraftTree.chain(torch.tensor([[3, 4]]))
        tree = DraftTree(tree.tokens, tree.parents, tree.depths, tree.ancestors, 1, torch.tensor([[0.0, believed]]))
        calibration.learn(tree, Accepted(torch.tensor([[0, 1]]), [1 + right]), [[]])


@pytest.mark.parametrize(("slope", "offset"), [(0.6, -0.5), (1.5, 0.8), (1.0, 0.0)])
def test_finds_the_correction(slope: float, offset: float) -> None:
    calibration = Calibration()
    rounds(calibration, 3000, slope, offset)
    for chance in (0.1, 0.5, 0.9):
        truth = 1 / (1 + exp(-slope * log(chance / (1 - chance)) - offset))
        assert exp(at(calibration, chance)) == pytest.approx(truth, abs=0.06)
    assert at(calibration, 0.3, depth=1) == pytest.approx(log(0.3)), "each depth learns for itself"


def test_few_rounds_change_little() -> None:
    calibration = Calibration()
    rounds(calibration, 2, 1.0, -9.0)
    assert 0.3 < exp(at(calibration, 0.5)) < 0.5


def test_host_and_device_agree() -> None:
    calibration = Calibration()
    rounds(calibration, 100, 0.5, -1.0)
    scores = [0.0, -1e-6, -0.3, -2.0, -50.0, -inf]
    device = calibration.on_device(0, torch.tensor(scores, dtype=torch.float64)[None, None])[0, 0].tolist()
    host = calibration.on_host(0, np.array(scores)).tolist()
    assert device == pytest.approx(host)
    assert host == sorted(host, reverse=True)
    assert all(-31 < score < 0 for score in host[:-1])


def test_who_is_learned_from() -> None:
    """Children of accepted nodes only; no copies, no empty nodes, no rows that stood still."""
    tokens = torch.tensor([[1, 5, 6, 7, 8], [1, 5, 6, 7, 8]])
    parents = torch.tensor([[-1, 0, 0, 2, -1], [-1, 0, 0, 2, -1]])
    tree = DraftTree.from_parents(tokens, parents, 2, torch.tensor([[0, -0.5, -1.0, -1.5, -inf]] * 2))
    for path, counts, copied, depths in (
        ([[0, 1, 0], [0, 0, 0]], [2, 0], [[], []], {0}),
        ([[0, 2, 3], [0, 0, 0]], [3, 0], [[], []], {0, 1}),
        ([[0, 2, 3], [0, 0, 0]], [3, 0], [[9, 7], []], {0}),
        ([[0, 0, 0], [0, 0, 0]], [0, 0], [[], []], set()),
    ):
        calibration = Calibration()
        calibration.learn(tree, Accepted(torch.tensor(path), counts), copied)
        changed = {depth for depth in (0, 1) if at(calibration, 0.4, depth) != pytest.approx(log(0.4))}
        assert changed == depths


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.matrix), 3])
def test_changes_no_token(size: int, options: dict[str, Any]) -> None:
    """And equal calls make equal rounds: nothing that was learned outlives its call."""
    target = tiny_target("llama")
    head = tiny_head(target, selector_rank=4)
    config = TreeConfig(node_cost=1e-3, draft_cost=0, calibrate=True)
    committed = []
    for _ in range(2):
        assert_identical(
            target, head, prompts([9, 3, 7][:size]), **options, max_new_tokens=24, tree_config=config
        )
        assert head.last_stats is not None
        committed.append((head.last_stats.committed, head.last_stats.drafted))
    assert committed[0] == committed[1]
    assert head.last_stats.drafted > 0


def test_the_papers_scores_are_no_chances() -> None:
    with pytest.raises(ValueError, match="calibrate=False"):
        TreeConfig(nodes=60, scores="paper", calibrate=True)
