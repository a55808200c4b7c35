"""The prefix-shared pass: its mask, its anchors, and that it is the inference pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_training import LENGTHS, batch_of, taught, tiny_head, tiny_target, tiny_trainer, token_rows

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
    """The shared pass over packed documents equals drafting one block at a time from a state."""
    target = tiny_target(torch.float64)
    head = tiny_head(target, draft_length=draft_length, num_layers=layers, block_attention=block_attention)
    rows = token_rows(LENGTHS)
    trainer = tiny_trainer(tmp_path, head, target, rows)
    batch = batch_of(rows, draft_length, 7)
    ids, documents, anchors = batch["input_ids"], batch["documents"], batch["anchors"]
    features, goals = taught(trainer, batch)
    blocks = build_blocks(documents, anchors, draft_length, block_attention == "bidirectional")
    with torch.no_grad():
        shared = head(features[:, :-1], head.embed(ids[:, 1:]), blocks.positions, blocks.mask)
    hidden = take(shared, blocks.entries).unflatten(1, (-1, draft_length))
    torch.testing.assert_close(trainer.block_states(head, batch, features, goals), hidden, rtol=0, atol=1e-12)

    losses = []
    for row, block in (anchors >= 0).nonzero().tolist():
        anchor = int(anchors[row, block])
        begin = int((documents[row] == documents[row, anchor]).nonzero()[0])
        end = int((documents[row] == documents[row, anchor]).nonzero()[-1]) + 1
        with torch.no_grad():
            alone = target(ids[row : row + 1, begin:end], output_hidden_states=True)
            own = torch.cat([alone.hidden_states[layer] for layer in head.feature_layers], dim=-1)
            state = head.begin(1, 8)
            split = (anchor - begin) // 2
            following = ids[row : row + 1, begin + 1 : anchor + 2]
            if split:
                head.extend(state, own[:, :split], following[:, :split], torch.tensor([split]))
            rest = anchor + 1 - begin
            proposal = head.propose(state, own[:, split:rest], following[:, split:], torch.tensor([rest - split]))
        torch.testing.assert_close(hidden[row, block], proposal.hidden[0], rtol=0, atol=1e-12)
        # Draft token t is token n + 1 + t, which the target predicts at position n + t.
        at = anchor - begin + 1
        wanted = alone.logits[0, at : at + draft_length]
        places = row * ids.shape[1] + torch.arange(anchor + 1, anchor + 1 + draft_length)
        torch.testing.assert_close(goals.at(places), wanted, rtol=0, atol=1e-12)
        losses.append(annealed_kl(proposal.logits, wanted[None]).item())
    assert len(losses) >= 15
    with torch.no_grad():
        assert trainer.compute_loss(head, batch).item() == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize("layers", [1, 2])
def test_gradients_do_not_miss_what_is_not_computed(tmp_path: Path, layers: int) -> None:
    """The last layer leaves out the real positions that draft nothing; the reference computes all of them."""
    target = tiny_target(torch.float64)
    head = tiny_head(target, num_layers=layers)
    rows = token_rows(LENGTHS)
    trainer = tiny_trainer(tmp_path, head, target, rows)
    batch = batch_of(rows, head.draft_length, 5)
    ids, documents, anchors = batch["input_ids"], batch["documents"], batch["anchors"]
    features, goals = taught(trainer, batch)
    blocks = build_blocks(documents, anchors, head.draft_length)
    everything = head(features[:, :-1], head.embed(ids[:, 1:]), blocks.positions, blocks.mask)
    states = [take(everything, blocks.entries).unflatten(1, (-1, head.draft_length))]
    states.append(trainer.block_states(head, batch, features, goals))
    gradients = [torch.autograd.grad(some.sin().sum(), list(head.parameters())) for some in states]
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
