"""A `Trainer` whose checkpoints are there whole or not at all, and which resumes from its own alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from transformers import EarlyStoppingCallback, PreTrainedModel, Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, rotate_checkpoints

from hf_dart.training.checkpoints.folders import STAGING, publish
from hf_dart.training.checkpoints.resuming import TARGET, check_checkpoint, fingerprints, readable


class Patience(EarlyStoppingCallback):
    """Early stopping that goes on counting in a resumed run, and stops it where the run would have stopped."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        # A run may be resumed with more callbacks than it had, and saving looks each of them up.
        stored = (state.stateful_callbacks or {}).setdefault(type(self).__name__, self.state())
        if isinstance(stored, dict):
            self.early_stopping_patience_counter = stored["attributes"]["early_stopping_patience_counter"]
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True  # the run had stopped


class WholeCheckpoints(Trainer):
    """A `Trainer` of a drafter beside a frozen target.

    A checkpoint has its name when all of it is on the disk, so that whatever is called checkpoint-N can be resumed
    from; and a run resumes from checkpoints of its own drafter and target alone.
    """

    drafter: Any
    target: PreTrainedModel
    best_from: int | None = None
    """How much had been logged when the best weights were loaded; None: they are those of the last step."""
    _staging = False  # while a checkpoint is written

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **kwargs: Any) -> Any:
        """Train, or resume from a checkpoint: a folder, or True for the newest of the run.

        Raises:
            ValueError: the checkpoint is damaged, or that of another run.
        """
        checkpoint = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self.args.output_dir) or True  # `Trainer` says that there is none
        if isinstance(checkpoint, (str, Path)):
            check_checkpoint(checkpoint, self.drafter, self.target, self.is_fsdp_enabled or self.is_deepspeed_enabled)
        with _frozen(self.target):
            return super().train(checkpoint, **kwargs)

    def _run_epoch(self, **kwargs: Any) -> None:
        # `Trainer` takes a step before it looks whether any is left.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        if not self.control.should_training_stop:
            super()._run_epoch(**kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with readable(checkpoint or "", "the state of the optimizer"):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        # `Trainer` takes no adapters of a model that is no `PeftModel`.
        if not self.drafter.adapted:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self.drafter.reload_adapter(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if not self.drafter.adapted:
            super()._load_best_model()
        else:
            self.drafter.reload_adapter(self.state.best_model_checkpoint)
        self.best_from = len(self.state.log_history)

    @cached_property
    def _fingerprints(self) -> dict[str, float]:
        return fingerprints(self.target)

    def _get_output_dir(self, trial: Any) -> str:
        """The folder of the run; while a checkpoint is written, its staging folder."""
        folder = super()._get_output_dir(trial)
        return str(Path(folder, STAGING)) if self._staging else folder

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._staging:  # it is uploaded in the background, and must have its name by then
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint whole or not at all.

        Raises:
            FloatingPointError: weights are not finite.
            OSError: it could not be written; nothing of it is left.
        """
        if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
            raise FloatingPointError(
                f"Weights are not finite after step {self.state.global_step}, and are not saved; resume from a "
                "checkpoint before the loss rose, with a lower learning_rate or a max_grad_norm."
            )
        run = Path(self._get_output_dir(trial))
        final = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self._whole(final) as written:
            self._staging = True
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._staging = False
            if self.state.best_model_checkpoint == str(written):
                self.state.best_model_checkpoint = str(final)
                if self.args.should_save:
                    self.state.save_to_json(str(written / TRAINER_STATE_NAME))
            if self.args.should_save:
                (written / TARGET).write_text(json.dumps(self._fingerprints), encoding="utf8")
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def save_whole(self, folder: Path) -> None:
        """Save the drafter whole or not at all, and push it if so asked; `folder` lies in that of the run.

        Raises:
            OSError: it could not be written, and nothing of it is left; or the Hub refused it.
        """
        with self._whole(folder) as written:
            self.save_model(str(written), _internal_call=True)
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    @contextmanager
    def _whole(self, final: Path) -> Iterator[Path]:
        """Where all processes write what is called `final` when all of them are done."""
        staging = final.parent / STAGING
        written = staging / final.name
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        try:
            with self.drafter.keeping_location():
                yield written
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                publish(written, final)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own
            raise OSError(
                f"{final.name} could not be written to {final.parent} ({' '.join(str(error).split())}); what was saved "
                "before is whole: make room there and resume."
            ) from error
        finally:
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.drafter.record_location(str(final.absolute()))


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """No gradients for the target's weights, though the draft's gradients pass through its LM head."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
