"""The prefix-shared pass: its mask, its anchors, and that it is the inference pass."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_training import ROWS, batch_of, taught, tiny_head, trainer_on

from hf_dart.drafters.layers import take
from hf_dart.training.objective.blocks import build_blocks, draw_anchors
from hf_dart.training.objective.losses import annealed_kl


@pytest.mark.parametrize("draft_length", [1, 2, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_anchors_leave_room_for_the_draft_whose_first_token_counts(draft_length: int, masked: bool) -> None:
    documents = torch.arange(40).div(15, rounding_mode="floor").repeat(6, 1)
    documents[:, 37:] = -1
    mask = torch.rand(6, 40, generator=torch.Generator().manual_seed(1)) < 0.5 if masked else None

    def possible(row: int, anchor: int) -> bool:
        of, first = documents[row].tolist(), anchor + 2
        if mask is not None and not (first < 40 and of[first] == of[anchor] and mask[row, first]):
            return False
        return 0 <= of[anchor] == of[anchor + draft_length]

    wanted = [[anchor for anchor in range(40 - draft_length) if possible(row, anchor)] for row in range(6)]
    for count in (5, 40):
        anchors = draw_anchors(documents, count, draft_length, loss_mask=mask)
        for row, all_of_them in zip(anchors.tolist(), wanted, strict=True):
            chosen = [anchor for anchor in row if anchor >= 0]
            assert len(chosen) == min(count, len(all_of_them))
            assert set(chosen) <= set(all_of_them)
            assert row == sorted(set(chosen)) + [-1] * (count - len(chosen))
    assert (draw_anchors(documents[:, :draft_length], 2, draft_length) == -1).all()


@pytest.mark.parametrize(("draft_length", "layers"), [(1, 1), (1, 2), (5, 1), (5, 2)])
@pytest.mark.parametrize("block_attention", ["causal", "bidirectional"])
def test_blocks_are_what_propose_drafts(tmp_path: Path, draft_length: int, layers: int, block_attention: str) -> None:
    """The shared pass over packed documents equals drafting one block at a time, each document alone.

    The last layer leaves out the real positions that draft nothing; gradients are those of all of them.
    """
    config = {"draft_length": draft_length, "num_layers": layers, "block_attention": block_attention}
    trainer = trainer_on(tmp_path, ROWS, head=partial(tiny_head, **config), dtype=torch.float64)
    head, target, batch = trainer.drafter, trainer.target, batch_of(ROWS, draft_length, 7)
    ids, documents, anchors = batch["input_ids"], batch["documents"], batch["anchors"]
    features, goals = taught(trainer, batch)
    blocks = build_blocks(documents, anchors, draft_length, block_attention == "bidirectional")
    everything = head(features[:, :-1], head.embed(ids[:, 1:]), blocks.positions, blocks.mask)
    whole = take(everything, blocks.entries).unflatten(1, (-1, draft_length))
    hidden = trainer.block_states(head, batch, features, goals)
    torch.testing.assert_close(hidden, whole, rtol=0, atol=1e-12)
    own = {"inputs": list(head.parameters()), "allow_unused": True, "materialize_grads": True}
    gradients = [torch.autograd.grad(some.sin().sum(), **own) for some in (hidden, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)

    losses = []
    for row, block in (anchors >= 0).nonzero().tolist():
        anchor = int(anchors[row, block])
        here = (documents[row] == documents[row, anchor]).nonzero().flatten()
        begin, length = int(here[0]), anchor + 1 - int(here[0])
        with torch.no_grad():
            alone = target(ids[row : row + 1, here], output_hidden_states=True)
            seen = torch.cat([alone.hidden_states[layer] for layer in head.feature_layers], dim=-1)[:, :length]
            following = ids[row : row + 1, begin + 1 : anchor + 2]
            proposal = head.propose(head.begin(1, 8), seen, following, torch.tensor([length]))
        torch.testing.assert_close(hidden[row, block], proposal.hidden[0], rtol=0, atol=1e-12)
        # Draft token t is token n + 1 + t, which the target predicts at position n + t.
        wanted = alone.logits[0, length : length + draft_length]
        places = row * ids.shape[1] + torch.arange(anchor + 1, anchor + 1 + draft_length)
        torch.testing.assert_close(goals.at(places), wanted, rtol=0, atol=1e-12)
        losses.append(annealed_kl(proposal.logits, wanted[None]).item())
    assert len(losses) >= 15
    with torch.no_grad():
        assert trainer.compute_loss(head, batch).item() == pytest.approx(np.mean(losses), rel=1e-5)
