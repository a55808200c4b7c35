"""How a head was trained, as JSON beside its weights: what its card is written from (`hf_dart.hub.card`)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dart.hub.facts import TRAINING_RECORD, publishable
from hf_dart.hub.machine import hardware, versions

if TYPE_CHECKING:
    from transformers import TrainerState

    from hf_dart.training.trainers.dart import DartTrainer

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft")


def last_evaluation(state: TrainerState) -> dict[str, float] | None:
    """All that was logged by the last evaluation, what callbacks found included; None if there was none."""
    return _last_evaluation(state.log_history)


def _last_evaluation(logs: list[dict[str, float]]) -> dict[str, float] | None:
    evaluations = [logged for logged in logs if any(name.startswith("eval_") for name in logged)]
    if not evaluations:
        return None
    of_last_step = [logged for logged in evaluations if logged["step"] == evaluations[-1]["step"]]
    return {name: value for logged in of_last_step for name, value in logged.items()}


def _held(trainer: DartTrainer) -> tuple[int, dict[str, float] | None]:
    """The step that the head's weights are of, and their evaluation."""
    logs = trainer.state.log_history
    if trainer.best_from is None:
        return trainer.state.global_step, _last_evaluation(logs)
    step = trainer.state.best_global_step
    behind, at = logs[trainer.best_from :], [logged for logged in logs if logged["step"] == step]
    return step, _last_evaluation(behind) or _last_evaluation(at)


def training_record(trainer: DartTrainer) -> dict[str, Any]:
    """What `trainer` has done so far; what it does not know is left out.

    Returns:
        loss: the preset's name; objective: every field of it; what the trainer adds (`own_record`); steps: optimizer
        steps behind the weights; tokens: of all rows read, padding left out; rows_per_step, anchors_per_row;
        evaluation: the weights' last metrics; optimizer, learning_rate, schedule, seed; precision: of autocast;
        weights_dtype, target_dtype; processes, hardware, versions; recipe: the options that `hf-dart train` was
        given, tokens of the Hub and local folders left out.
    """
    args, state = trainer.args, trainer.state
    step, evaluation = _held(trainer)
    rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    record: dict[str, Any] = {
        "loss": args.loss,
        "objective": asdict(trainer.objective),
        "selector_only": args.selector_only,
        **trainer.own_record(),
        "steps": step,
        "tokens": state.num_input_tokens_seen or None,
        "rows_per_step": rows,
        "anchors_per_row": args.anchors_per_row,
        "evaluation": evaluation,
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "learning_rate": args.learning_rate,
        "schedule": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "seed": args.seed,
        "precision": "bfloat16" if args.bf16 else "float16" if args.fp16 else None,
        "weights_dtype": str(trainer.head.dtype).removeprefix("torch."),
        "target_dtype": str(trainer.target.dtype).removeprefix("torch."),
        "processes": args.world_size,
        "hardware": hardware(args.device),
        "versions": versions(_PACKAGES),
        "recipe": None if trainer.recipe is None else publishable(trainer.recipe),
    }
    return {name: value for name, value in record.items() if value is not None}


def write_training_record(trainer: DartTrainer, folder: str | Path) -> None:
    """Write `training_record(trainer)` to `folder`."""
    text = json.dumps(training_record(trainer), indent=2)
    Path(folder, TRAINING_RECORD).write_text(text + "\n", encoding="utf8")
