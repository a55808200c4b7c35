"""Selectors: trained on a frozen head, with the noise of sampling, against a plain reference."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tiny_training import changed, copies, tiny_head, token_rows, trainer_on

from hf_dart import DartHead
from hf_dart.training.record import training_record
from hf_dart.training.trainers.drafts import Drafts, Goals


def selecting(target: Any) -> DartHead:
    return tiny_head(target).add_selector(4)


@pytest.mark.parametrize("chunk", [64, 0])
def test_a_selector_learns_alone_and_nothing_from_rows_without_blocks(tmp_path: Path, chunk: int) -> None:
    rows = [
        {**row, "loss_mask": torch.full((24,), learned)} for learned in (False, True) for row in token_rows([[24]] * 2)
    ]
    options: dict[str, Any] = {"selector_only": True, "loss_chunk": chunk, "per_device_train_batch_size": 1}
    trainer = trainer_on(tmp_path, rows, rows, selecting, **options, max_steps=16)
    before, loss = copies(trainer.drafter), trainer.evaluate()["eval_loss"]
    selector, tokens = trainer.drafter.selector, torch.arange(16)
    phi, psi = (table[:16].clone() for table in selector._tables(trainer.drafter, tokens))
    trainer.train()
    assert changed(trainer.drafter, before) == {name for name in before if name.startswith("selector.")}
    # Evaluations read tables of the selector's weights, whose writes a fused optimizer does not count.
    assert trainer.args.optim == "adamw_torch_fused"
    now = selector._tables(trainer.drafter, tokens)
    assert not any(torch.equal(old, new[:16]) for old, new in zip((phi, psi), now, strict=True))
    assert 0 < trainer.evaluate()["eval_loss"] < loss


@pytest.mark.parametrize(("share", "chunk"), [(0.0, 64), (0.0, 3), (0.5, 64), (1.0, 64)])
def test_the_loss_is_that_of_the_reference(
    share: float, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, candidates, gamma = 7, 5, 0.8
    monkeypatch.setattr("hf_dart.training.trainers.dart._CANDIDATES", candidates)
    options: dict[str, Any] = {"selector_only": True, "gamma": gamma, "selector_noise": share, "loss_chunk": chunk}
    trainer = trainer_on(tmp_path, token_rows([[24]] * 2), head=selecting, dtype=torch.float64, **options)
    head, generator = trainer.drafter, torch.Generator().manual_seed(3)
    for weight in head.selector.parameters():
        torch.nn.init.normal_(weight, generator=generator)
    depth, size, vocabulary = head.draft_length, head.config.hidden_size, head.config.vocab_size
    hidden = torch.randn(blocks, depth, size, dtype=torch.float64, generator=generator)
    wanted = 3 * torch.randn(40, vocabulary, dtype=torch.float64, generator=generator)
    places = torch.randint(40, (blocks, depth), generator=generator)
    ids = torch.randint(vocabulary, (2, 20), generator=generator)
    drafts = Drafts({"input_ids": ids, "seed": 9}, hidden, Goals(torch.arange(40), wanted), places, places)

    expected, noise = torch.zeros((), dtype=torch.float64), torch.Generator().manual_seed(9)
    weights = gamma ** torch.arange(depth, dtype=torch.float64)
    weights = weights / weights.sum()
    with torch.no_grad():
        logits = head.logits(hidden)
        noisy, gumbel = torch.rand(blocks, generator=noise) < share, torch.zeros_like(logits)
        if noisy.any():
            drawn = torch.empty(logits.shape).exponential_(generator=noise)
            gumbel[noisy] = -drawn.log().double()[noisy]
        for block, place in product(range(blocks), range(depth)):
            goal, own, extra = int(places[block, place]), logits[block, place], gumbel[block, place]
            best = (own + extra).argsort(descending=True)[:candidates]
            tokens = head.embed(torch.cat([ids.flatten()[goal][None], best]))
            zero, others = torch.zeros(depth, 1).long(), torch.arange(1, candidates + 1).expand(depth, -1)
            delta = head.selector(hidden[block], own[best].expand(depth, -1), tokens, zero, others)
            scores = ((own + extra)[best] + delta[place, 0]).log_softmax(-1)
            seen = (wanted[goal] + extra)[best]
            goals = F.one_hot(seen.argmax(), candidates) if noisy[block] else seen.softmax(-1)
            expected += weights[place] * (torch.special.xlogy(goals, goals) - goals * scores).sum()
    assert (bool(noisy.any()), bool(noisy.all())) == (share > 0, share == 1)
    assert trainer._selector_loss(drafts).item() == pytest.approx(expected.item(), rel=1e-9)


def test_evaluations_draw_the_same_noise_and_every_micro_batch_its_own(tmp_path: Path) -> None:
    rows = token_rows([[24]] * 8)
    options: dict[str, Any] = {"selector_only": True, "learning_rate": 0.0, "max_steps": 3}
    trainer = trainer_on(tmp_path, rows, rows, selecting, gradient_accumulation_steps=2, **options)
    seeds = []
    for step in (0, 0, 1):  # a resumed run draws the same again
        trainer.state.global_step = step
        samples, _ = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 2, torch.device("cpu"))
        seeds.append([sample["seed"] for sample in samples])
    assert seeds[0] == seeds[1]
    assert not {*seeds[0]} & {*seeds[2]}
    trainer.state.global_step = 0
    assert len(set(seeds[0])) == 2
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(before, rel=1e-6)
    record = training_record(trainer)
    assert (record["selector_only"], record["selector_noise"]) == (True, 0.5)
