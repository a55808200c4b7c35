"""Evaluation while training: figures counted by hand, decoding in earnest, and checkpoints chosen by them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.tiny_training import LENGTHS, changed, copies, examples, tiny_head, tiny_trainer, token_rows, trainer_on
from torch import Tensor

from hf_dart import TreeConfig
from hf_dart.training import DartTrainer, losses
from hf_dart.training.objective.losses import NO_LABEL
from hf_dart.training.record import training_record
from hf_dart.training.trainers.evaluation import count_drafts, counts_by_row, draft_figures, first_prompts
from hf_dart.trees.tree import best_chain

ROWS = token_rows(LENGTHS * 4)
STEPS = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
PROMPT = torch.tensor([[7, 11, 13, 17]])


@lru_cache
def trained_weights(block_attention: str) -> dict[str, Tensor]:
    with TemporaryDirectory() as folder:
        trainer = trainer_on(Path(folder), ROWS, head=partial(tiny_head, block_attention=block_attention), max_steps=40)
        trainer.train()
    return trainer.drafter.state_dict()


def trained(folder: Path, block_attention: str = "causal", **options: Any) -> Any:
    """A trainer of a head of which some drafts are accepted."""
    head = partial(tiny_head, block_attention=block_attention)
    trainer = trainer_on(folder, ROWS, ROWS[:3], head, torch.float64, **options)
    trainer.drafter.load_state_dict(trained_weights(block_attention))
    return trainer


def figures_of(*blocks: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    return draft_figures(sum(count_drafts(*some).double().sum(0) for some in blocks).numpy())


def test_figures_of_the_targets_own_text_and_of_others() -> None:
    """Of other text, a block is watched up to the first token that the target would not have chosen."""
    draft, plain, _ = examples()
    # 2, 4, 0, 4 and 1 tokens accepted; two more are right after a wrong one.
    best = draft.argmax(-1)
    wrong = (best + 1) % draft.shape[-1]
    right = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 1]]).bool()
    labels = torch.where(right, best, wrong)
    target = plain + 100 * F.one_hot(labels, draft.shape[-1])
    figures = figures_of((draft[:2], target[:2], labels[:2]), (draft[2:], target[2:], labels[2:]))
    lengths = torch.tensor([2.0, 4, 0, 4, 1])
    wanted = {"tau": 1 + float(lengths.mean()), "tau_se": float(lengths.std(correction=0)) / 5**0.5, "waste": 2 / 13}
    wanted |= {f"acceptance_{k}": share for k, share in enumerate((4 / 5, 3 / 4, 2 / 3, 1.0), start=1)}
    wanted["tau_sampled"] = 1 + float(losses.coupled_chain(draft, target, labels).exp().sum(-1).mean())
    assert figures == pytest.approx(wanted)
    hopeless = figures_of((draft[2:3], target[2:3], labels[2:3]))
    assert hopeless["tau"] == 1
    assert hopeless.keys() == {"tau", "tau_se", "tau_sampled", "acceptance_1"}
    assert draft_figures(np.zeros(12)) == {}
    # The draft misses the target's choice at (1, 2); the text leaves that choice at (0, 1) and ends in row 2.
    chosen = best.clone()
    chosen[1, 2] = wrong[1, 2]
    target = plain + 100 * F.one_hot(chosen, draft.shape[-1])
    labels = chosen.clone()
    labels[0, 1] = wrong[0, 1]
    labels[2, 3] = NO_LABEL
    figures = figures_of((draft[:3], target[:3], labels[:3]))
    assert [figures[f"acceptance_{k}"] for k in (1, 2, 3, 4)] == [3 / 3, 3 / 3, 1 / 2, 1 / 1]
    assert figures["tau"] == pytest.approx(1 + 1 + 1 + 1 / 2 + 1 / 2)
    assert figures["waste"] == 1 / 11
    sampled = losses.coupled_chain(draft[:2], target[:2], labels[:2]).exp().sum(-1).mean()
    assert figures["tau_sampled"] == pytest.approx(1 + float(sampled))


def rounds_of(trainer: Any, tree: TreeConfig, **options: Any) -> tuple[Tensor, list[tuple[int, int]]]:
    """Text [1, T] that was decoded, and of each round its anchor and how many tokens it committed, where drafts fit."""
    fields = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": None, **options}
    mask, head = torch.ones_like(PROMPT), trainer.drafter
    decoded = trainer.target.generate(PROMPT, attention_mask=mask, assistant=head, tree_config=tree, **fields)
    committed = [tokens for (tokens,) in head.last_stats.committed][:-1]
    anchors = itertools.accumulate(committed, initial=PROMPT.shape[1] - 1)
    rounds = zip(anchors, committed, strict=False)
    return decoded, [(at, count) for at, count in rounds if at + head.draft_length + 1 < decoded.shape[1]]


@torch.no_grad()
def offline(trainer: DartTrainer, decoded: Tensor, *anchors: int) -> dict[str, float]:
    """The figures of the blocks at these anchors."""
    documents = torch.zeros_like(decoded)
    batch = {"input_ids": decoded, "documents": documents, "anchors": torch.tensor([anchors])}
    trainer.evaluates = True
    drafts = trainer.compute_loss(trainer.drafter, batch, return_outputs=True)[1]["drafts"]
    return draft_figures(counts_by_row(trainer.drafter, drafts, 64).double().sum(0).numpy())


@pytest.mark.parametrize("block_attention", ["causal", "bidirectional"])
def test_offline_lengths_are_those_of_decoding(block_attention: str, tmp_path: Path) -> None:
    """On greedy text of the target: from the anchor of every round, as many tokens as that round committed."""
    trainer = trained(tmp_path, block_attention)
    decoded, rounds = rounds_of(trainer, TreeConfig.chain(4))
    assert max(committed for _, committed in rounds) > 1
    for anchor, committed in rounds:
        assert offline(trainer, decoded, anchor)["tau"] == committed


@torch.no_grad()
def test_a_selector_chooses_the_chain(tmp_path: Path) -> None:
    """From the anchor of every round: what drafting there gives, and for one token what decoding has accepted."""
    trainer = trained(tmp_path)
    head = trainer.drafter.add_selector(8)
    torch.nn.init.normal_(head.selector.context.weight, std=3.0, generator=torch.Generator().manual_seed(7))
    decoded, rounds = rounds_of(trainer, TreeConfig(nodes=2, depth=1, lookup=0))
    output = trainer.target(decoded, output_hidden_states=True)
    features = torch.cat([output.hidden_states[layer] for layer in head.feature_layers], dim=-1)
    alone = 0
    for anchor, committed in rounds:
        figures = offline(trainer, decoded, anchor)
        assert figures["acceptance_1"] == committed - 1
        state, known = head.begin(1, decoded.shape[1]), features[:, : anchor + 1]
        proposal = head.propose(state, known, decoded[:, 1 : anchor + 2], torch.tensor([anchor + 1]), None)
        scores, candidates = proposal.logits.log_softmax(-1).topk(head.tree_config.top_k)
        chain = best_chain(candidates, head.transitions(proposal, decoded[:, anchor + 1], candidates, scores))
        right = (chain == output.logits[:, anchor + 1 : anchor + 1 + head.draft_length].argmax(-1)).cummin(-1).values
        assert figures["tau"] == 1 + int(right.sum())
        alone += int((proposal.logits.argmax(-1) != chain).any())
    assert 0 < sum(committed - 1 for _, committed in rounds) < len(rounds)
    assert alone > 0  # the selector did choose


def test_sampled_lengths_are_those_of_decoding_on_average(tmp_path: Path) -> None:
    """On sampled text, from where the rounds began: the sum of what each could expect is what they committed."""
    trainer = trained(tmp_path)
    torch.manual_seed(1)
    decoded, rounds = rounds_of(trainer, TreeConfig.chain(4), do_sample=True, top_k=0, max_new_tokens=400)
    anchors, committed = zip(*rounds, strict=True)
    expected = offline(trainer, decoded, *anchors)["tau_sampled"]
    lengths = torch.tensor(committed).double()
    assert lengths.mean() > 1.3
    assert abs(float(lengths.mean()) - expected) < 3 * float(lengths.std()) / len(anchors) ** 0.5


def test_evaluation_says_how_good_the_drafts_are(tmp_path: Path) -> None:
    """Every time on the same blocks, whatever the seed and the chunks."""
    figures, results = ("eval_loss", "eval_tau", "eval_waste", "eval_acceptance"), []
    for seed, chunk in ((1, 64), (2, 64), (2, 3)):
        trainer = trained(tmp_path, loss_chunk=chunk)
        torch.manual_seed(seed)
        metrics = trainer.evaluate(ROWS)
        results.append({name: value for name, value in metrics.items() if name.startswith(figures)})
    assert results[0] == results[1]
    assert results[0] == pytest.approx(results[2], rel=1e-4)
    named = {"eval_loss", "eval_tau", "eval_tau_se", "eval_tau_sampled", "eval_waste", "eval_acceptance_1"}
    assert named <= results[0].keys()


def test_early_stopping_and_the_best_checkpoint_by_tau(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that were saved: step 3 was not."""
    taus = iter([1.5, 2.0, 2.1, 1.9, 1.8, 3.0])
    weights: list[dict[str, Tensor]] = []
    trainer = trained(tmp_path, **{**STEPS, "save_steps": 2}, max_steps=6, early_stopping_patience=2)
    assert trainer.args.metric_for_best_model == "tau"

    def figures(counts: np.ndarray) -> dict[str, float]:
        weights.append(copies(trainer.drafter))
        return {"tau": next(taus)}

    monkeypatch.setattr("hf_dart.training.trainers.evaluation.draft_figures", figures)
    trainer.train()
    assert (trainer.state.global_step, trainer.state.best_metric) == (5, 2.1)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert not changed(trainer.drafter, weights[1])
    for tau in (2.0, 3.0):
        record = training_record(trainer)
        assert (record["steps"], record["evaluation"]["eval_tau"]) == (2, tau)
        if tau == 2.0:
            trainer.evaluate(metric_key_prefix="eval")


def test_decoding_in_earnest_chooses_the_best_checkpoint(tmp_path: Path) -> None:
    options = {"load_best_model_at_end": True, "metric_for_best_model": "tau_decoded"}
    options |= {"decode_prompts": 2, "decode_prompt_tokens": 6}
    trainer = trained(tmp_path, **STEPS, **options, max_steps=3, learning_rate=0.1)
    head = trainer.drafter
    trainer.train()
    logged = [entry["eval_tau_decoded"] for entry in trainer.state.log_history if "eval_tau_decoded" in entry]
    assert len(logged) == 3
    assert trainer.state.best_metric == max(logged) > 1
    tokens = rounds = 0
    for row in ROWS[:2]:
        prompt = row["input_ids"][None, :6]
        tree = replace(head.tree_config, lookup=0, nodes=32)
        trainer.target.generate(prompt, assistant=head, tree_config=tree, do_sample=False, max_new_tokens=64)
        tokens, rounds = tokens + head.last_stats.tokens, rounds + head.last_stats.rounds
    assert tokens / rounds == trainer.state.best_metric  # the best checkpoint was loaded at the end
    trainer.train()  # once more, from these weights
    records = [json.loads((tmp_path / f"checkpoint-{step}" / "training.json").read_text()) for step in (1, 2, 3)]
    assert [record["steps"] for record in records] == [1, 2, 3]
    with pytest.raises(ValueError, match="give an eval_dataset"):
        tiny_trainer(tmp_path, head, trainer.target, ROWS, decode_prompts=2)
    # Prompts are the beginnings of rows.
    packed = {"input_ids": torch.arange(5), "documents": torch.tensor([0, 0, 1, 1, -1])}
    assert first_prompts([packed], 3, 4)[0].tolist() == [0, 1]
    chat = {"input_ids": torch.arange(9), "documents": torch.zeros(9)}
    chat["loss_mask"] = torch.tensor([0, 0, 0, 0, 1, 1, 0, 0, 1]).bool()
    text = {**chat, "loss_mask": torch.tensor([0] + [1] * 8).bool()}
    assert [prompt.tolist() for prompt in first_prompts([chat, text], 2, 3)] == [[1, 2, 3], [0, 1, 2]]
