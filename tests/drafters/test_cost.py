"""Estimated costs of drafts, before any was timed."""

from __future__ import annotations

import pytest
from support.tiny import tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target

from hf_dart.drafters.cost import _CALL
from hf_dart.drafters.lookup import LookupDrafter


def test_a_draft_costs_what_its_weights_do() -> None:
    """By weights and by their number: a head beside which the target is small is charged for it."""
    target = tiny_target("llama")
    small, large = tiny_head(target), tiny_head(target, num_layers=5)
    assert 0.2 < small.draft_cost(target) < large.draft_cost(target)
    lm_head, embeddings = target.get_output_embeddings().weight, target.get_input_embeddings().weight
    own, read = ([weight.numel() for weight in model.parameters()] for model in (small, target))
    looked_up = 0 if lm_head is embeddings else embeddings.numel()
    ratio = (sum(own) + lm_head.numel() + _CALL * (len(own) + 1)) / (sum(read) - looked_up + _CALL * len(read))
    assert small.draft_cost(target) == pytest.approx(0.1 + ratio)
    alone = tiny_head(target, own_lm_head=True)
    assert alone.lm_head_weights == 0
    few = tiny_head(target, draft_vocab_size=12)
    assert few.draft_cost(target) < small.draft_cost(target)
    step = tiny_eagle_drafter(target)
    assert step.draft_cost(target, 4) - 0.1 == pytest.approx(4 * (step.draft_cost(target, 1) - 0.1))
    several = tiny_diffusion_drafter(target)
    assert [several.passes(depth) for depth in (1, 3, 5)] == [3, 3, 3]
    assert LookupDrafter().tree_config.draft_cost == 0
