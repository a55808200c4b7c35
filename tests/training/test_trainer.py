"""`Trainer` drives the head's training, and leaves the target as it was."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.families import HYBRIDS
from support.sentences import refused
from support.tiny_training import ROWS, changed, copies, tiny_head, tiny_target, tiny_trainer, token_rows, trainer_on
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, TrainingArguments

from hf_dart import DartHead, DiffusionDrafter, EagleDrafter, TreeConfig, attach
from hf_dart.training import DartTrainer, DartTrainingArguments, DecodingCallback, DiffusionTrainer, EagleTrainer
from hf_dart.training.trainers.trainer import DrafterTrainer

PROMPT, LENGTH = 4, 40  # tokens of what a target continues, and of its text
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bidirectional": {"num_layers": 2, "block_attention": "bidirectional"},
    "peagle": {"mask_mode": "peagle", "mask_token_id": 60},
    "some tokens": {"draft_vocabulary": list(range(0, 61, 2))},
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_few_steps_lower_the_loss_and_touch_the_head_alone(kind: str, tmp_path: Path) -> None:
    options = {"max_steps": 30, "logging_steps": 5, "save_strategy": "steps", "save_steps": 30, "bf16": kind != "plain"}
    trainer = trainer_on(tmp_path, ROWS * 4, head=partial(tiny_head, **HEADS[kind]), **options)
    target, head = trainer.target, trainer.drafter
    before, target_before = copies(head), copies(target)
    trainer.train()
    logs = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert logs[-1] < (0.8 if kind == "plain" else 0.9) * logs[0]
    assert changed(head, before) == {name for name, _ in head.named_parameters()}
    assert not changed(target, target_before)
    assert all(p.requires_grad and p.grad is None for p in target.parameters())
    assert not target.training
    loaded = DartHead.from_pretrained(str(tmp_path / "checkpoint-30"), target=target)
    assert not changed(loaded, copies(head))


@pytest.mark.parametrize(("counted", "tokens"), [("non_padding", 72 - 6), ("all", 72), ("no", 72 - 6)])
def test_tokens_are_counted(counted: str, tokens: int, tmp_path: Path) -> None:
    options = {"include_num_input_tokens_seen": counted, "max_steps": 2, "logging_steps": 1}
    trainer = trainer_on(tmp_path, ROWS, **options)
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 2 * tokens
    logged = [entry["num_input_tokens_seen"] for entry in trainer.state.log_history if "num_input_tokens_seen" in entry]
    assert logged[:2] == ([] if counted == "no" else [tokens, 2 * tokens])


def test_accumulated_micro_batches_are_one_batch(tmp_path: Path) -> None:
    """Rows with few anchors must not count more for being alone in their micro-batch."""
    rows = token_rows([[24], [8, -16], [12, 12], [6, -18]])
    results = []
    options = {"optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "max_steps": 1}
    options |= {"logging_steps": 1, "loss_chunk": 5}
    options |= {"anchors_per_row": 24}  # all: what is drawn does not depend on how the rows are batched
    for batch, accumulation in ((4, 1), (1, 4)):
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        trainer = trainer_on(tmp_path, rows, dtype=torch.float64, **options, **sizes)
        trainer.train()
        results.append((float(trainer.state.log_history[0]["loss"]), trainer.drafter.state_dict()))
    # The loss is summed in fp32, and logged with four digits.
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-3)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-6, atol=1e-8)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_what_is_taken_from_other_trainers(tmp_path: Path) -> None:
    target = tiny_target()
    plain = TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(TypeError, match="takes DartTrainingArguments, not TrainingArguments"):
        DartTrainer(tiny_head(target), target, plain, train_dataset=ROWS)  # type: ignore[arg-type]
    for texts in ([{"text": "a"}], ["documents are text"], ({"text": "a"},)):
        with pytest.raises(TypeError, match=r"The first row is .*from_dict"):
            trainer_on(tmp_path, texts)
    given = DartTrainingArguments(str(tmp_path), use_cpu=True)
    for name in ("compute_metrics", "compute_loss_func", "model_init"):
        taken: Any = partial(DartTrainer, tiny_head(target), target, given, **{name: print})
        refused(taken, TypeError, f"DartTrainer has a drafter, loss and metrics already; leave {name} out")
    refused(partial(DartTrainer, tiny_head(target), "Qwen/Qwen3-8B", given), TypeError, "is no model of transformers")
    with pytest.raises(TypeError, match="block_states"):
        DrafterTrainer(tiny_head(target), target, given)  # type: ignore[abstract]
    for name in ("include_for_metrics", "gradient_checkpointing", "activation_checkpointing", "bf16_full_eval"):
        refused(partial(DartTrainingArguments, str(tmp_path), **{name: [1]}), ValueError, f"without {name}; leave")
    with pytest.raises(TypeError, match=r"the splits train, test; give one, such as data\['train'\]"):
        trainer_on(tmp_path, {"train": ROWS, "test": ROWS})  # type: ignore[arg-type]
    wrapped = get_peft_model(tiny_head(target), LoraConfig(target_modules=["q_proj"]))
    refused(
        partial(DartTrainer, wrapped, target, given),
        TypeError,
        "not a PeftModel; give that, with LoRA by its own",
    )
    for kind in (DartTrainer, EagleTrainer, DiffusionTrainer):
        settings = kind.training_arguments(str(tmp_path), use_cpu=True)
        swapped: Any = partial(kind, target, tiny_head(target), settings)
        refused(swapped, TypeError, f"trains a {kind.drafter_class.__name__}, not a Qwen3ForCausalLM; give that")


def test_runs_that_stop(tmp_path: Path) -> None:
    """As soon as a step has thrown the weights out of range, and on rows that hold no block."""
    trainer = trainer_on(tmp_path, ROWS * 4, learning_rate=1e30, warmup_steps=2, max_steps=6)
    with pytest.raises(FloatingPointError, match=r"loss of step 3 is nan; .*lower learning_rate"):
        trainer.train()
    short = token_rows([[4, 4, 3], [2, 2, 2, 5]])
    trainer = trainer_on(tmp_path, short, head=partial(tiny_head, draft_length=6), max_steps=20)
    with pytest.raises(ValueError, match="nothing to train on"):
        trainer.train()
    with pytest.raises(ValueError, match="nothing to evaluate"):
        trainer.evaluate(short)


@pytest.mark.parametrize("muon", [True, False])
def test_matrices_learn_by_muon_and_other_weights_by_adamw(tmp_path: Path, muon: bool) -> None:
    rates = {"muon_learning_rate": 1e-2 * muon, "learning_rate": 1e-2 * (not muon)}
    trainer = trainer_on(tmp_path, ROWS * 4, max_steps=2, logging_steps=1, **rates)
    before = copies(trainer.drafter)
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == rates["learning_rate"]
    matrices = {name for name in before if "proj" in name or name == "fc.weight"}
    assert changed(trainer.drafter, before) == (matrices if muon else {*before} - matrices)


def masked(rows: list[dict[str, Any]], learned: bool) -> list[dict[str, Any]]:
    return [{**row, "loss_mask": torch.full((len(row["input_ids"]),), learned)} for row in rows]


def test_rows_without_blocks_leave_the_loss_as_it_is(tmp_path: Path) -> None:
    rows = masked(token_rows([[24], [8, 16], [6, -18]]), True)
    for size in (1, 2, 4):
        trainer = trainer_on(tmp_path, rows, per_device_eval_batch_size=size, anchors_per_row=30)
        found = trainer.evaluate(rows)["eval_loss"]
        if size == 1:
            expected = found  # of blocks, though rows have different numbers of them
        assert found == pytest.approx(expected, rel=1e-5)
        empty = masked(token_rows([[24]] * 3), False)
        assert trainer.evaluate([*empty, *rows])["eval_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bf16", [True, False])
def test_a_head_in_32_bits_learns_beside_a_target_in_16(tmp_path: Path, bf16: bool) -> None:
    """By autocast of both, the LM head outside the head's forward included, or as the target was loaded."""
    options, seen = {"bf16": bf16, "max_steps": 2, "logging_steps": 1}, set()
    dtype, head = torch.float32 if bf16 else torch.bfloat16, lambda target: tiny_head(target).float()
    trainer = trainer_on(tmp_path, ROWS, head=head, dtype=dtype, **options)
    trainer.target.lm_head.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    trainer.train()
    assert seen == {torch.bfloat16}
    assert math.isfinite(float(trainer.state.log_history[0]["loss"]))
    assert trainer.drafter.fc.weight.dtype == torch.float32


@pytest.mark.parametrize("takes_positions", [True, False])
def test_a_target_that_mixes_documents_is_refused(tmp_path: Path, takes_positions: bool) -> None:
    target = tiny_target()
    head = tiny_head(target)

    def deaf(module: Any, given: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.pop("position_ids", None) is not None and not takes_positions:
            raise TypeError("unexpected keyword argument 'position_ids'")
        return given, kwargs

    target.register_forward_pre_hook(deaf, with_kwargs=True)
    with pytest.raises(ValueError, match=r"\(packing=False, or share_rows=False\)"):
        tiny_trainer(tmp_path, head, target, ROWS).train()
    tiny_trainer(tmp_path, head, target, token_rows([[24], [20, -4]]), max_steps=1).train()


def test_what_could_not_be_trained_or_kept_is_refused(tmp_path: Path) -> None:
    target, rows = tiny_target(), ROWS
    eagle = EagleDrafter.from_target(target, feature_layers=[0, 2, 3], draft_length=4, own_lm_head=True)
    for kind, own in ((DartTrainer, tiny_head(target, own_lm_head=True)), (EagleTrainer, eagle)):
        refused(partial(tiny_trainer, tmp_path, own, target, rows, kind=kind), ValueError, "loss_chunk=0")
        before = own.lm_head.weight.clone()
        tiny_trainer(tmp_path, own, target, rows, kind=kind, loss_chunk=0, max_steps=1).train()
        assert not torch.equal(own.lm_head.weight, before)
        own.lm_head.requires_grad_(False)
        tiny_trainer(tmp_path, own, target, rows, kind=kind)

    tiny_head(target, selector_rank=4).save_pretrained(tmp_path / "head")
    adapted = DartHead.from_pretrained(str(tmp_path / "head"), target=target)
    adapted.add_adapter(LoraConfig(r=2))
    with pytest.raises(ValueError, match="merge it into its head first"):
        tiny_trainer(tmp_path, adapted, target, rows, selector_only=True)
    with pytest.raises(ValueError, match="add_selector"):
        tiny_trainer(tmp_path, tiny_head(target), target, rows, selector_only=True)
    args = DartTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert args.n_gpu <= 1
    args._n_gpu = 2
    refused(lambda: DartTrainer(tiny_head(target), target, args, train_dataset=rows), ValueError, "device_map='auto'")
    target.hf_device_map = {"model.embed_tokens": 0, "lm_head": 1}  # it takes all GPUs itself
    assert DartTrainer(tiny_head(target), target, args, train_dataset=rows).args.n_gpu == 1


def own_text(target: Any, rows: int, seed: int) -> list[dict[str, Tensor]]:
    """Rows that a target wrote itself, greedily."""
    torch.manual_seed(seed)
    prompts = torch.randint(2, target.config.vocab_size, (rows, PROMPT))
    greedy = {"do_sample": False, "max_new_tokens": LENGTH - PROMPT, "eos_token_id": None}
    written = target.generate(prompts, attention_mask=torch.ones_like(prompts), **greedy)
    return [{"input_ids": row, "documents": torch.zeros_like(row)} for row in written]


@pytest.mark.parametrize(("loss", "block_attention"), [("dart", "causal"), ("left_to_right", "bidirectional")])
def test_tau_rises(loss: str, block_attention: str, tmp_path: Path) -> None:
    target = tiny_target()
    assert_tau_rises(target, tiny_head(target, block_attention=block_attention), tmp_path, loss)


def test_tau_of_a_diffusion_drafter_rises(tmp_path: Path) -> None:
    target, fields = tiny_target(), {"draft_length": 4, "initializer_range": 0.2, "context_window": 24}
    drafter = DiffusionDrafter.from_target(target, **fields, tree={"nodes": 4, "lookup": 0})
    assert_tau_rises(target, drafter, tmp_path, "left_to_right", kind=DiffusionTrainer)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["nemotron_h", "mamba2"])
def test_tau_rises_on_running_states(family: str, tmp_path: Path) -> None:
    """The text of such random targets is simpler if their weights are smaller than those of `support.tiny`."""
    kind, fields = HYBRIDS[family]
    torch.manual_seed(3)
    fields = {**fields, "initializer_range": 0.3, "tie_word_embeddings": True, "eos_token_id": 0, "pad_token_id": 1}
    target = attach(AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields)).eval())
    assert_tau_rises(target, tiny_head(target, feature_layers=[0, 1, 2]), tmp_path, "dart", untrained=1.3)


def assert_tau_rises(
    target: Any, head: Any, folder: Path, loss: str, untrained: float = 1.2, kind: Any = DartTrainer
) -> None:
    rows, held_out = own_text(target, 48, seed=1), own_text(target, 12, seed=2)
    options = {"loss": loss, "max_steps": 50, "per_device_train_batch_size": 8}
    trainer = tiny_trainer(folder, head, target, rows, held_out, kind, **options)
    chain = TreeConfig.chain(head.draft_length)
    prompts = [row["input_ids"][:PROMPT] for row in held_out[:4]]
    trainer.add_callback(DecodingCallback(trainer, prompts, max_new_tokens=32, tree_config=chain))
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    for figure in ("eval_tau", "eval_tau_decoded"):
        assert before[figure] < untrained
        assert after[figure] > before[figure] + 0.25
