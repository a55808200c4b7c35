"""Training: the prefix-shared pass is the inference pass, the loss is what it says, `Trainer` drives it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hf_dart import DartHead
from hf_dart.training import BlockCollator, DartTrainer, DartTrainingArguments, Mixture, PackedTokens
from hf_dart.training.blocks import build_blocks, draw_anchors, gather_blocks
from hf_dart.training.losses import annealed_kl, annealing_weights, chunked

VOCABULARY = 61


def tiny_target(dtype: torch.dtype = torch.float32) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            initializer_range=0.3,
            tie_word_embeddings=True,
            eos_token_id=0,
            pad_token_id=1,
        )
        return Qwen3ForCausalLM(config).to(dtype).eval()


def tiny_head(target: Any, **config: Any) -> DartHead:
    fields = {"feature_layers": [0, 2, 3], "draft_length": 4, "initializer_range": 0.2}
    return DartHead.from_target(target, **{**fields, **config})


def tiny_trainer(
    folder: Path, head: DartHead, target: Any, rows: Any, collator: Any = None, **arguments: Any
) -> DartTrainer:
    fields: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "anchors_per_row": 6,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 5,
    }
    extra = {} if collator is None else {"data_collator": collator}
    return DartTrainer(head, target, DartTrainingArguments(**{**fields, **arguments}), train_dataset=rows, **extra)


def documents_of(*rows: list[int]) -> Tensor:
    """[B, T] from the lengths of each row's documents; a negative length is padding."""
    return torch.tensor([[i if n > 0 else -1 for i, n in enumerate(row) for _ in range(abs(n))] for row in rows])


def token_rows(lengths: list[list[int]], seed: int = 0) -> list[dict[str, Tensor]]:
    documents = documents_of(*lengths)
    ids = torch.randint(2, VOCABULARY, documents.shape, generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": i, "documents": d} for i, d in zip(ids, documents, strict=True)]


LENGTHS = [[12, 7, 5], [24], [3, 15, -6]]


@pytest.mark.parametrize("draft_length", [1, 2, 4])
def test_mask_and_positions_against_brute_force(draft_length: int) -> None:
    documents = documents_of(*LENGTHS)
    anchors = draw_anchors(documents, 9, draft_length, torch.Generator().manual_seed(1))
    anchors[1, -1] = -1
    blocks = build_blocks(documents, anchors, draft_length)
    length, slots = documents.shape[1], draft_length - 1
    assert blocks.mask.dtype == torch.bool

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
                    sees = k_block == q_block and k_offset <= q_offset
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


@pytest.mark.parametrize("draft_length", [1, 5])
@pytest.mark.parametrize("layers", [1, 2])
def test_blocks_are_what_propose_drafts(tmp_path: Path, draft_length: int, layers: int) -> None:
    """The shared pass over packed documents equals drafting one block at a time from a state."""
    target = tiny_target(torch.float64)
    head = tiny_head(target, draft_length=draft_length, num_layers=layers)
    rows = token_rows(LENGTHS)
    trainer = tiny_trainer(tmp_path, head, target, rows)
    batch = BlockCollator(draft_length, 7)(rows)
    ids, documents, anchors = batch["input_ids"], batch["documents"], batch["anchors"]
    features, logits = trainer.teach(ids, documents)
    blocks = build_blocks(documents, anchors, draft_length)
    with torch.no_grad():
        shared = head(features[:, :-1], head.embed(ids[:, 1:]), blocks.positions, blocks.mask)
    hidden = gather_blocks(shared, anchors, draft_length)

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


def test_annealed_kl_against_the_sum_written_out() -> None:
    random = torch.Generator().manual_seed(0)
    draft = torch.randn(3, 4, 7, generator=random)
    goal = torch.randn(3, 4, 7, generator=random)
    losses = annealed_kl(draft, goal, gamma=0.6)
    weights = [0.6**t for t in range(4)]
    for n in range(3):
        expected = 0.0
        for t in range(4):
            p = [math.exp(x) for x in goal[n, t].tolist()]
            q = [math.exp(x) for x in draft[n, t].tolist()]
            p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
            kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            expected += weights[t] / sum(weights) * kl
        assert losses[n].item() == pytest.approx(expected, rel=1e-5)
    assert annealed_kl(goal, goal).abs().max() < 1e-6
    assert annealing_weights(8, 1.0).tolist() == pytest.approx([1 / 8] * 8)


def test_chunks_give_the_loss_and_gradient_of_the_whole() -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(11, 6, generator=random, dtype=torch.float64)
    goals = torch.randn(5, 4, 11, generator=random, dtype=torch.float64)

    def losses(hidden: Tensor, goals: Tensor) -> Tensor:
        return ((hidden @ weight.T).log_softmax(-1) * goals).sum((1, 2))

    results = []
    for size in (0, 1, 2, 5, 9):
        hidden = torch.linspace(-1, 1, 5 * 4 * 6, dtype=torch.float64).view(5, 4, 6).requires_grad_()
        total = chunked(losses, hidden, goals, size)
        (3 * total).backward()
        results.append((total.item(), hidden.grad))
    for total, gradient in results[1:]:
        assert total == pytest.approx(results[0][0], rel=1e-6)
        torch.testing.assert_close(gradient, results[0][1])


def test_a_few_steps_lower_the_loss_and_touch_the_head_alone(tmp_path: Path) -> None:
    target = tiny_target()
    head = tiny_head(target)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    target_before = {name: value.clone() for name, value in target.state_dict().items()}
    rows = token_rows(LENGTHS * 4)
    trainer = tiny_trainer(
        tmp_path, head, target, rows, max_steps=30, logging_steps=5, save_strategy="steps", save_steps=30
    )
    trainer.train()

    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert float(logs[-1]["loss"]) < 0.8 * float(logs[0]["loss"])
    assert {"agreement_1", "agreement_4"} <= logs[-1].keys()
    assert "agreement_5" not in logs[-1]
    assert all(not torch.equal(value, before[name]) for name, value in head.state_dict().items())
    assert all(torch.equal(value, target_before[name]) for name, value in target.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in target.parameters())
    assert not target.training

    loaded = DartHead.from_pretrained(str(tmp_path / "checkpoint-30"), target=target)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, head.state_dict()[name])


def test_a_selector_is_trained_on_a_frozen_head(tmp_path: Path) -> None:
    target = tiny_target()
    head = tiny_head(target)
    rows = token_rows(LENGTHS * 4)
    with pytest.raises(ValueError, match="add_selector"):
        tiny_trainer(tmp_path, head, target, rows, max_steps=1, selector_only=True)
    head.add_selector(8)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    trainer = tiny_trainer(
        tmp_path,
        head,
        target,
        rows,
        max_steps=40,
        logging_steps=5,
        learning_rate=1e-2,
        selector_only=True,
        selector_candidates=8,
        save_strategy="steps",
        save_steps=40,
    )
    trainer.train()
    logs = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert logs[-1] < logs[0]
    changed = {name for name, value in head.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.startswith("selector.")}
    loaded = DartHead.from_pretrained(str(tmp_path / "checkpoint-40"), target=target)
    assert loaded.config.selector_rank == 8
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_accumulated_micro_batches_are_one_batch(tmp_path: Path) -> None:
    """Rows with few anchors must not count more for being alone in their micro-batch."""
    rows = token_rows([[24], [8, -16], [12, 12], [6, -18]])
    results = []
    for batch, accumulation in ((4, 1), (1, 4)):
        target = tiny_target(torch.float64)
        head = tiny_head(target)
        trainer = tiny_trainer(
            tmp_path,
            head,
            target,
            rows,
            # Every possible anchor: what is drawn does not depend on how the rows are batched.
            collator=BlockCollator(head.draft_length, 24),
            max_steps=1,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            optim="sgd",
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            logging_steps=1,
            loss_chunk=5,
        )
        trainer.train()
        results.append((float(trainer.state.log_history[0]["loss"]), head.state_dict()))
    # The loss is summed in fp32, and logged with four digits.
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-3)
    for name, value in results[0][1].items():
        torch.testing.assert_close(value, results[1][1][name], rtol=1e-6, atol=1e-8)


@pytest.mark.matrix
def test_two_processes_are_one(tmp_path: Path) -> None:
    """DDP over gloo: unequal numbers of blocks on the two sides, one step, the weights of one process."""
    weights = []
    for processes in (1, 2):
        path = tmp_path / f"{processes}.pt"
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        subprocess.run(
            [sys.executable, *launch, __file__, str(path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            timeout=300,
        )
        weights.append(torch.load(path))
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=0, atol=1e-12)


def one_distributed_step(path: str) -> None:
    target = tiny_target(torch.float64)
    head = tiny_head(target)
    trainer = tiny_trainer(
        Path(path).parent,
        head,
        target,
        token_rows([[24], [8, -16], [12, 12], [6, -18]]),
        collator=BlockCollator(head.draft_length, 24),
        max_steps=1,
        per_device_train_batch_size=4 // int(os.environ["WORLD_SIZE"]),
        optim="sgd",
        max_grad_norm=0.0,
    )
    trainer.train()
    if trainer.args.process_index == 0:
        torch.save(head.state_dict(), path)


def test_a_resumed_run_is_the_run(tmp_path: Path) -> None:
    rows = token_rows(LENGTHS * 4)
    weights = []
    for resume in (False, True):
        target = tiny_target()
        head = tiny_head(target)
        folder = tmp_path / "run"
        # Every possible anchor: the loader draws those of one batch ahead, before the state is saved.
        collator = BlockCollator(head.draft_length, 24)
        trainer = tiny_trainer(folder, head, target, rows, collator, save_strategy="steps", save_steps=4)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if resume else None)
        assert trainer.state.global_step == 8
        weights.append(head.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name])


def test_bf16_casts_the_target_and_its_lm_head_too(tmp_path: Path) -> None:
    target = tiny_target()
    head = tiny_head(target)
    seen = set()
    target.lm_head.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    rows = token_rows(LENGTHS)
    trainer = tiny_trainer(tmp_path, head, target, rows, bf16=True, max_steps=2, logging_steps=1)
    trainer.train()
    assert seen == {torch.bfloat16}
    assert math.isfinite(float(trainer.state.log_history[0]["loss"]))
    assert head.fc.weight.dtype == torch.float32


def test_evaluation_reports_the_mean_block_loss(tmp_path: Path) -> None:
    target = tiny_target()
    head = tiny_head(target)
    rows = token_rows([[24], [24]])
    trainer = tiny_trainer(tmp_path, head, target, rows, collator=BlockCollator(4, 30))
    batch = trainer.data_collator(rows)
    with torch.no_grad():
        expected = trainer.compute_loss(head, batch).item()
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_packing_keeps_short_documents_whole(tmp_path: Path) -> None:
    lengths = [5, 30, 9, 3, 12, 2, 20]
    stream = np.concatenate([[*(100 * i + j + 1 for j in range(n - 1)), 0] for i, n in enumerate(lengths)]).astype(
        np.uint16
    )
    path = tmp_path / "ids.bin"
    stream.tofile(path)
    rows = PackedTokens(path, length=16, eos=0, minimum=3)
    found: list[list[int]] = []
    for row in rows:
        assert row["input_ids"].shape == row["documents"].shape == (16,)
        for document in range(int(row["documents"].max()) + 1):
            found.append(row["input_ids"][row["documents"] == document].tolist())
        assert (row["input_ids"][row["documents"] < 0] == 0).all()
    pieces = []
    for start, n in zip(np.cumsum([0, *lengths[:-1]]).tolist(), lengths, strict=True):
        document = stream[start : start + n].tolist()
        pieces += [document[i : i + 16] for i in range(0, n, 16)]
    assert found == [piece for piece in pieces if len(piece) >= 3]

    alone = PackedTokens(path, length=16, eos=0, minimum=3, share_rows=False)
    assert [row["input_ids"][row["documents"] == 0].tolist() for row in alone] == found
    assert all(row["documents"].max() == 0 for row in alone)


@pytest.mark.parametrize("takes_positions", [True, False])
def test_a_target_that_mixes_documents_is_refused(tmp_path: Path, takes_positions: bool) -> None:
    target = tiny_target()
    head = tiny_head(target)
    forward = target.forward

    def deaf(position_ids: Any = None, **kwargs: Any) -> Any:
        if position_ids is not None and not takes_positions:
            raise TypeError("unexpected keyword argument 'position_ids'")
        return forward(**kwargs)

    target.forward = deaf
    with pytest.raises(ValueError, match="share_rows=False"):
        tiny_trainer(tmp_path, head, target, token_rows(LENGTHS)).train()
    tiny_trainer(tmp_path, head, target, token_rows([[24], [20, -4]]), max_steps=1).train()


def test_mixture_keeps_its_shares_and_repeats_what_is_short() -> None:
    mixture = Mixture([list(range(3)), list(range(100, 200))], (0.25, 0.75), rows=40)  # type: ignore[list-item]
    drawn = [mixture[i] for i in range(len(mixture))]
    assert len(drawn) == 40
    short, long = [x for x in drawn if x < 100], [x for x in drawn if x >= 100]
    assert len(short) == 10
    assert all(short.count(x) in (3, 4) for x in range(3))
    assert len(set(long)) == len(long) == 30


def test_arguments_say_what_is_wrong(tmp_path: Path) -> None:
    for wrong in ({"gamma": 0.0}, {"anchors_per_row": 0}, {"remove_unused_columns": True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DartTrainingArguments(output_dir=str(tmp_path), **wrong)  # type: ignore[arg-type]


def test_the_packaged_head_fits_the_packaged_target() -> None:
    pair = Path(__file__).parents[1] / "hf_dart" / "demo_pair"
    target = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    head = DartHead.from_pretrained(str(pair / "head"), target=target)
    assert head.config.target_name == "py8m"
    assert head.config.tokenizer_hash is not None
    assert sum(file.stat().st_size for file in pair.rglob("*") if file.is_file()) <= 24e6


if __name__ == "__main__":
    one_distributed_step(sys.argv[1])
