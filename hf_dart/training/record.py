"""Record of a training, as JSON in the folder of the weights, from which the model card is written."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from hf_dart.hub.facts import publishable
from hf_dart.hub.machine import hardware, versions
from hf_dart.training.trainers.arguments import DrafterTrainingArguments

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft")


def last_evaluation(logs: list[dict[str, float]]) -> dict[str, float] | None:
    """Collect all that the last evaluation in a `log_history` logged, callbacks included; None if there was none."""
    evaluations = [logged for logged in logs if any(name.startswith("eval_") for name in logged)]
    of_last_step = [logged for logged in evaluations if logged["step"] == evaluations[-1]["step"]]
    return {name: value for logged in of_last_step for name, value in logged.items()} or None


def training_record(trainer: Any) -> dict[str, Any]:
    """Describe what the run of a `DrafterTrainer` has done so far; what is not known is left out.

    Returns:
        loss: the preset's name; objective: every field of it; steps: optimizer steps that the weights have seen;
        tokens: of all rows read; evaluation: the weights' last metrics; precision: of autocast; recipe: the options
        that `hf-dart train` was given, tokens of the Hub and local folders left out; and fields named as options.
    """
    args, state, recipe = trainer.args, trainer.state, trainer.recipe
    step, logs = state.global_step, state.log_history
    own = {one.name for one in fields(args)} - {one.name for one in fields(DrafterTrainingArguments)}
    evaluation = last_evaluation(logs)
    if trainer.best_from is not None:
        step = int(state.best_model_checkpoint.rpartition("-")[2])  # the best of all may not have been saved
        at = [logged for logged in logs if logged["step"] == step]
        evaluation = last_evaluation(logs[trainer.best_from :]) or last_evaluation(at)
    record: dict[str, Any] = {
        "loss": args.loss,
        "objective": asdict(args.objective),
        "steps": step,
        "tokens": state.num_input_tokens_seen or None,
        "rows_per_step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "anchors_per_row": args.anchors_per_row,
        "evaluation": evaluation,
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "learning_rate": args.learning_rate,
        "muon_learning_rate": args.muon_learning_rate,
        "schedule": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "seed": args.seed,
        "precision": "bfloat16" if args.bf16 else "float16" if args.fp16 else None,
        "processes": args.world_size,
        "hardware": hardware(args.device),
        "versions": versions(_PACKAGES),
        **{name: getattr(args, name) for name in sorted(own)},
        "weights_dtype": str(trainer.drafter.dtype).removeprefix("torch."),
        "target_dtype": str(trainer.target.dtype).removeprefix("torch."),
        "recipe": None if recipe is None else publishable(recipe),
    }
    return {name: value for name, value in record.items() if value is not None}
