"""Heads whose mask slots see each other in both directions: drafting, and the contract."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.compare import assert_identical, tally
from support.tiny import VOCABULARY, prompts, tiny_head, tiny_target
from torch import Tensor

from hf_dart import DartHead, TreeConfig

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
EXACT = tally("float64, bidirectional heads")


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("qwen3")


def bidirectional_head(target: Any, **config: Any) -> DartHead:
    return tiny_head(target, block_attention="bidirectional", **config)


def from_scratch(head: DartHead, features: Tensor, tokens: Tensor) -> Tensor:
    """Draft logits [d, V] after T positions, by the training pass over all of them and d - 1 slots."""
    real, slots = features.shape[0], head.draft_length - 1
    mask = torch.ones(real + slots, real + slots, dtype=torch.bool).tril()
    mask[real:, real:] = True
    hidden = head(features[None], head.embed(tokens)[None], torch.arange(real + slots)[None], mask[None, None])
    return head.logits(hidden)[0, real - 1 :]


@torch.no_grad()
@pytest.mark.parametrize(("draft_length", "layers"), [(1, 2), (2, 1), (6, 2)])
@pytest.mark.parametrize("batch", [1, 3])
def test_drafts_are_those_of_one_pass_from_scratch(target: Any, draft_length: int, layers: int, batch: int) -> None:
    """Over many ragged rounds of any depth: the cache never keeps what a mask slot wrote."""
    head = bidirectional_head(target, draft_length=draft_length, num_layers=layers)
    width = head.config.features_width
    generator = torch.Generator().manual_seed(1)
    choose = random.Random(batch)
    state = head.begin(batch, 2)
    features: list[Tensor] = [torch.zeros(0, width, dtype=torch.float64) for _ in range(batch)]
    tokens: list[Tensor] = [torch.zeros(0, dtype=torch.long) for _ in range(batch)]
    for turn in range(12):
        counts = [choose.choice([0, 1, 2, 5] if batch > 1 and turn else [1, 2, 5]) for _ in range(batch)]
        new = torch.randn(batch, max(1, *counts), width, generator=generator, dtype=torch.float64)
        behind = torch.randint(VOCABULARY, new.shape[:2], generator=generator)
        for row, count in enumerate(counts):
            features[row] = torch.cat([features[row], new[row, :count]])
            tokens[row] = torch.cat([tokens[row], behind[row, :count]])
            new[row, count:] = 1e6  # what stands after a row's count must not be looked at
        if turn % 4 == 3:
            head.extend(state, new, behind, torch.tensor(counts))
            continue
        depth = choose.choice([None, 1, draft_length])
        proposal = head.propose(state, new, behind, torch.tensor(counts), depth)
        for row, count in enumerate(counts):
            if count:
                expected = from_scratch(head, features[row], tokens[row])[:depth]
                torch.testing.assert_close(proposal.logits[row], expected, **CLOSE)


@torch.no_grad()
def test_early_slots_look_at_later_ones(target: Any) -> None:
    """What sets it apart from a causal head of the same weights."""
    features = torch.randn(4, 96, dtype=torch.float64)
    tokens = torch.tensor([2, 3, 4, 5])
    proposals = []
    for head in (bidirectional_head(target), tiny_head(target)):
        proposals.append(head.propose(head.begin(1, 8), features[None], tokens[None], torch.tensor([4])).logits[0])
    assert torch.equal(proposals[0][0], proposals[1][0])  # the last real position sees no slot
    assert (proposals[0][1:-1] - proposals[1][1:-1]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_output_is_stocks(family: str, size: int, sample: bool) -> None:
    target = tiny_target(family)
    head = bidirectional_head(target, num_layers=2)
    inputs = prompts([9, 3, 7, 13][:size])
    for tree in (None, TreeConfig(nodes=8, depth=2), TreeConfig.chain(5)):
        options = {"do_sample": sample, "max_new_tokens": 24, **({"top_k": 0} if sample else {})}
        assert_identical(target, head, inputs, **options, tree_config=tree, into=EXACT)


def test_no_other_block_attention(target: Any) -> None:
    assert tiny_head(target).config.block_attention == "causal"
    with pytest.raises(ValueError, match="one of causal, bidirectional"):
        tiny_head(target, block_attention="both")


def test_the_runs_accepted_drafts() -> None:
    assert EXACT.mean_tau > 1.1
