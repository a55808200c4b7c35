"""The bigram selector: its scores, and that they change no token."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_identical, run
from support.tiny import prompts, tiny_head, tiny_target

from hf_dart import TreeConfig

GREEDY = {"do_sample": False, "max_new_tokens": 40}
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 24}


def test_an_untrained_selector_changes_no_draft() -> None:
    target = tiny_target("qwen3")
    head = tiny_head(target)
    for inputs in (prompts([7]), prompts([9, 3, 7, 12])):
        counts = []
        for rank in (0, 4):
            if rank:
                head.add_selector(rank)
                torch.nn.init.zeros_(head.selector.context.weight)
            run(target, inputs, 0, assistant=head, **SAMPLED)
            counts.append(head.last_stats.to_dict() | {"seconds": None})
            head.selector = None
        assert counts[0] == counts[1]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_selector_changes_no_token(size: int, options: dict[str, object]) -> None:
    target = tiny_target("qwen3")
    before = torch.get_rng_state()
    head = tiny_head(target).add_selector(4)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        for weight in head.selector.parameters():
            weight.add_(0.5 * torch.randn(weight.shape, dtype=weight.dtype))
    inputs = prompts([7] if size == 1 else [9, 3, 7, 12])
    for lookup in (0, 24):
        assert_identical(target, head, inputs, **options, tree_config=TreeConfig(nodes=8, lookup=lookup))


@torch.no_grad()
def test_tables_of_the_vocabulary_are_the_pairs() -> None:
    """What is made once for all tokens equals the selector's own pass, also after its weights change."""
    target = tiny_target("qwen3")
    head = tiny_head(target).add_selector(4)
    embeddings = target.get_input_embeddings()
    hidden = torch.randn(2, 3, head.config.hidden_size, dtype=torch.float64)
    previous, candidates = torch.randint(48, (2, 3, 5)), torch.randint(48, (2, 3, 6))
    logits = torch.randn(2, 3, 6, dtype=torch.float64)
    for _ in range(2):
        fast = head.selector.lookup(hidden, logits, embeddings, previous, candidates)
        plain = head.selector(hidden, logits, embeddings.weight, previous, candidates)
        assert fast.shape == (2, 3, 5, 6)
        torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)
        for weight in head.selector.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, dtype=weight.dtype))
