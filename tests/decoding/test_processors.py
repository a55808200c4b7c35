"""Processors of our own do what their source says."""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList

from hf_dart.decoding.processors import AdditivePenaltyLogitsProcessor, all_known


def test_additive_penalties_count_what_was_written() -> None:
    """Tokens of the text count, none of the prompt: presence once, frequency as often as it is there."""
    text = torch.tensor([[1, 1, 2, 3, 3, 3], [4, 4, 4, 4, 0, 1]])
    scores, processor = torch.randn(2, 5, dtype=torch.float64), AdditivePenaltyLogitsProcessor(2, 0.5, 0.25)
    found = processor(text, scores)
    expected = scores.clone()
    for row, counts in enumerate(({2: 1, 3: 3}, {4: 2, 0: 1, 1: 1})):
        for token, count in counts.items():
            expected[row, token] -= 0.5 + 0.25 * count
    assert torch.equal(found, expected)
    assert all_known(LogitsProcessorList([processor]))
