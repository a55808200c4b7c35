"""Processors of our own do what their source says."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_identical
from support.tiny import prompts, tiny_head, tiny_target

from hf_dart import attach
from hf_dart.decoding.processors import AdditivePenaltyLogitsProcessor, all_known


def test_additive_penalties_count_what_was_written() -> None:
    """Tokens of the text count, none of the prompt: presence once, frequency as often as it is there."""
    text = torch.tensor([[1, 1, 2, 3, 3, 3], [4, 4, 4, 4, 0, 1]])
    scores = torch.randn(2, 5, dtype=torch.float64)
    found = AdditivePenaltyLogitsProcessor(2, 0.5, 0.25)(text, scores)
    expected = scores.clone()
    for row, counts in enumerate(({2: 1, 3: 3}, {4: 2, 0: 1, 1: 1})):
        for token, count in counts.items():
            expected[row, token] -= 0.5 + 0.25 * count
    assert torch.equal(found, expected)


@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_under_additive_penalties(sampled: bool) -> None:
    """A batch of ragged rows is stock's, drafted trees and all."""
    target = attach(tiny_target("llama"))
    processors = [AdditivePenaltyLogitsProcessor(7, 0.8, 0.3)]
    assert all_known(processors)
    options = {"do_sample": sampled, "max_new_tokens": 40, "logits_processor": processors}
    assert_identical(target, tiny_head(target), prompts([7, 4]), **options)
