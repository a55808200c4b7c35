"""Checkpoints that are whole and those of the run alone: what `Trainer` lacks to resume exactly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from transformers import EarlyStoppingCallback, PreTrainedConfig, PreTrainedModel, Trainer, TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME

from hf_dart.drafters.adapters import reread
from hf_dart.hub.checkpoint import refused
from hf_dart.hub.download import ADAPTER_CONFIG

_ADAPTER = ("r", "lora_alpha", "lora_dropout", "use_rslora")  # what the names and shapes of weights do not tell
_BEGUN_WITH = "resume with the options that the run was begun with (its recipe.yaml)"
_REMEDY = f"{_BEGUN_WITH}, or from another"


class Patience(EarlyStoppingCallback):
    """Early stopping that goes on counting in a resumed run, and stops it where the run would have stopped."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        # A run may be resumed with more callbacks than it had, and saving needs a state of each.
        stored = (state.stateful_callbacks or {}).setdefault(type(self).__name__, self.state())
        if isinstance(stored, dict):
            counter = stored["attributes"]["early_stopping_patience_counter"]
            self.early_stopping_patience_counter = counter if state.global_step else 0  # of a trainer's earlier run
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True  # the run had stopped


class WholeCheckpoints(Trainer):
    """A `Trainer` that goes on from its newest checkpoint that is whole, and from those of its own drafter alone."""

    drafter: Any
    target: PreTrainedModel
    best_from: int | None = None
    """Number of logged entries when the best weights were loaded; None: the weights are those of the last step."""

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **kwargs: Any) -> Any:
        """Train, or resume from a whole checkpoint of this run: a folder, or True for the newest."""
        checkpoint, self.best_from = resume_from_checkpoint, None
        if checkpoint is True:
            checkpoint = newest_checkpoint(self.args.output_dir) or True  # `Trainer` says that there is none
        if isinstance(checkpoint, (str, Path)):
            check_checkpoint(checkpoint, self.drafter, self.is_fsdp_enabled or self.is_deepspeed_enabled)
        # The draft's gradients pass through the target's LM head.
        trainable = [weight for weight in self.target.parameters() if weight.requires_grad]
        try:
            self.target.requires_grad_(False)
            return super().train(checkpoint, **kwargs)
        finally:
            for weight in trainable:
                weight.requires_grad_(True)

    def _run_epoch(self, **kwargs: Any) -> None:
        # `Trainer` takes a step before it checks whether any is left.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        if not self.control.should_training_stop:
            super()._run_epoch(**kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with refused(f"The checkpoint {checkpoint}", _REMEDY):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        # `Trainer` loads adapters of a `PeftModel` only.
        if self.drafter.adapted:
            reread(self.drafter, resume_from_checkpoint)
        else:
            with refused(f"The checkpoint {resume_from_checkpoint}", _REMEDY):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if self.drafter.adapted:
            reread(self.drafter, self.state.best_model_checkpoint)
        else:
            super()._load_best_model()
        self.best_from = len(self.state.log_history)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # the file that comes next says that all of it is there

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint whole or not at all."""
        folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.should_save:
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)  # of a run that came by here before
        with whole(folder):
            super()._save_checkpoint(model, trial)


@contextmanager
def whole(folder: Path) -> Iterator[None]:
    """Remove a folder that could not be written to its end, and raise an `OSError` that says so."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(
            f"{folder.name} could not be written to {folder.parent} ({' '.join(str(error).split())}); what was saved "
            "before is whole: make room there and resume."
        ) from error


def newest_checkpoint(run: str | Path) -> str | None:
    """Return the newest checkpoint of a run that was written to its end: `Trainer` writes its state last."""
    steps = (folder.name.rpartition("-")[2] for folder in Path(run).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    for step in sorted((int(step) for step in steps if step.isdecimal()), reverse=True):
        folder = Path(run, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        with suppress(OSError, ValueError, TypeError):
            TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
            return str(folder)
    return None


def check_checkpoint(checkpoint: str | Path, drafter: Any, sharded: bool = False) -> None:
    """Refuse a checkpoint of which a part is missing, damaged or of another run, before any of it is loaded.

    Optimizer and weights are not looked at where they are `sharded` files of FSDP's or DeepSpeed's.
    """
    folder = Path(checkpoint)
    for name in (TRAINER_STATE_NAME, *(() if sharded else (OPTIMIZER_NAME, SCHEDULER_NAME))):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no checkpoint: it holds no {name}; begin a run with `head: {folder}`.")
    if drafter.adapted != (folder / ADAPTER_CONFIG).is_file():
        kinds = ("an adapter", "a whole drafter")
        trained, held = kinds if drafter.adapted else kinds[::-1]
        raise ValueError(f"{folder} holds {held} and this run trains {trained}; {_BEGUN_WITH}.")
    made = drafter.config
    names = {one.name for one in fields(made)} - {one.name for one in fields(PreTrainedConfig)} - {"fingerprint"}
    with refused(f"The checkpoint {folder}", _REMEDY):
        TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
        known = {"model_type": None, **json.loads((folder / CONFIG_NAME).read_text(encoding="utf8"))}
        if known["model_type"] == made.model_type:
            known = type(made).from_dict(known).to_dict()
    own = made.to_dict()
    _compare(str(folder), known, own, ["model_type", *sorted(names & own.keys())])
    if drafter.adapted:
        with refused(f"The checkpoint {folder}", _REMEDY):
            known = {**json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf8"))}
        own = drafter.peft_config[drafter.active_adapters()[0]].to_dict()
        _compare(f"The adapter in {folder}", known, own, _ADAPTER)


def _compare(what: str, known: dict[str, Any], own: dict[str, Any], names: Iterable[str]) -> None:
    """Raise a `ValueError` that names the first of the fields that is another one in this run."""
    for name in names:
        theirs, ours = known.get(name), own.get(name)
        if json.dumps(theirs, sort_keys=True) != json.dumps(ours, sort_keys=True):  # tuples come back as lists
            raise ValueError(f"{what} has {name}={theirs!r} and this run {ours!r}; {_BEGUN_WITH}.")
