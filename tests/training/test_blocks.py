"""The prefix-shared pass: its mask, its anchors, and that it is the inference pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_training import LENGTHS, batch_of, documents_of, tiny_head, tiny_target, tiny_trainer, token_rows

from hf_dart.drafters.layers import take
from hf_dart.training.objective.blocks import build_blocks, draw_anchors
from hf_dart.training.objective.losses import annealed_kl


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("draft_length", [1, 2, 4])
def test_mask_and_positions_against_brute_force(draft_length: int, bidirectional: bool) -> None:
    documents = documents_of(*LENGTHS)
    anchors = draw_anchors(documents, 9, draft_length, torch.Generator().manual_seed(1))
    anchors[1, -1] = -1
    blocks = build_blocks(documents, anchors, draft_length, bidirectional)
    length, slots = documents.shape[1], draft_length - 1
    assert blocks.mask.dtype == torch.bool
    for row, entries in enumerate(blocks.entries):
        assert torch.equal(blocks.entries_mask[row, 0], blocks.mask[row, 0, entries])
        for anchor, block in zip(anchors[row].tolist(), entries.view(-1, draft_length).tolist(), strict=True):
            assert block[0] == max(anchor, 0)
    slot_entries = blocks.entries.view(3, 9, draft_length)[:, :, 1:].flatten(1)
    assert slot_entries.tolist() == [[*range(length - 1, length - 1 + 9 * slots)]] * 3

    for row in range(len(documents)):
        # What each entry is: (document, position in it, block, offset in the block).
        starts: dict[int, int] = {}
        entries = []
        for i in range(length - 1):
            document = int(documents[row, i])
            entries.append((document, i - starts.setdefault(document, i), -1, -1))
        for block, anchor in enumerate(anchors[row].tolist()):
            document = int(documents[row, max(anchor, 0)])
            for offset in range(slots):
                entries.append((document, max(anchor, 0) - starts[document] + 1 + offset, block, offset))
        assert blocks.positions[row].tolist() == [entry[1] for entry in entries]

        for q, (q_document, _, q_block, q_offset) in enumerate(entries):
            for k, (k_document, _, k_block, k_offset) in enumerate(entries):
                if q_block < 0:
                    sees = k_block < 0 and k <= q and k_document == q_document
                elif k_block < 0:
                    sees = k <= int(anchors[row, q_block]) and k_document == q_document
                else:
                    sees = k_block == q_block and (bidirectional or k_offset <= q_offset)
                assert bool(blocks.mask[row, 0, q, k]) == sees, (row, q, k)


def test_anchors_are_different_and_leave_room_for_the_draft() -> None:
    documents = documents_of(*LENGTHS)
    possible = [{*range(8), *range(12, 15), 19}, set(range(20)), set(range(3, 14))]
    for count in (5, 40):
        anchors = draw_anchors(documents, count, 4)
        for row, expected in zip(anchors.tolist(), possible, strict=True):
            chosen = [anchor for anchor in row if anchor >= 0]
            assert len(set(chosen)) == len(chosen) == min(count, len(expected))
            assert set(chosen) <= expected
            assert row == sorted(chosen) + [-1] * (count - len(chosen))
    assert (draw_anchors(documents[:, :3], 2, 4) == -1).all()


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
    features, logits = trainer.teach(ids, documents)
    blocks = build_blocks(documents, anchors, draft_length, block_attention == "bidirectional")
    with torch.no_grad():
        shared = head(features[:, :-1], head.embed(ids[:, 1:]), blocks.positions, blocks.mask)
    hidden = take(shared, blocks.entries).unflatten(1, (-1, draft_length))
    torch.testing.assert_close(trainer.block_states(head, batch, features, logits), hidden, rtol=0, atol=1e-12)

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
        goals = alone.logits[0, at : at + draft_length]
        torch.testing.assert_close(logits[row, anchor + 1 : anchor + 1 + draft_length], goals, rtol=0, atol=1e-12)
        losses.append(annealed_kl(proposal.logits, goals[None]).item())
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
    features, target_logits = trainer.teach(ids, documents)
    blocks = build_blocks(documents, anchors, head.draft_length)
    everything = head(features[:, :-1], head.embed(ids[:, 1:]), blocks.positions, blocks.mask)
    states = [take(everything, blocks.entries).unflatten(1, (-1, head.draft_length))]
    states.append(trainer.block_states(head, batch, features, target_logits))
    gradients = [torch.autograd.grad(some.sin().sum(), list(head.parameters())) for some in states]
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
