"""`DrafterTrainer`: training any drafter beside its frozen target, on `transformers.Trainer`; whole checkpoints."""

from __future__ import annotations

import json
import math
import shutil
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, PreTrainedModel, Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, rotate_checkpoints

from hf_dart.training.checkpoints.folders import STAGING, publish
from hf_dart.training.checkpoints.resuming import TARGET, check_checkpoint, fingerprints, readable
from hf_dart.training.trainers.arguments import DartTrainingArguments
from hf_dart.training.trainers.evaluate import DecodingCallback, first_prompts

_PATIENCE = 10  # steps without anything to train on, after which training stops
_DECODED_NODES = 32  # of the trees of decoding evaluations, where the drafter's own have no given size


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


class DrafterTrainer(Trainer):
    """A `Trainer` of a drafter whose target runs online, frozen.

    The loss of a step is a mean over all its items (blocks of drafts, masked tokens), however they are spread over
    micro-batches and processes. A checkpoint has its name when all of it is on the disk, so that whatever is called
    checkpoint-N can be resumed from. Training stops at a loss that is not finite.

    A subclass says what is random in a batch (`draw`) and what its loss is (`summed_loss`).

    Args:
        drafter: the model that is trained.
        target: the causal LM; it is put into evaluation mode and run without gradients, its weights stay.
        args: [`DartTrainingArguments`].
        kwargs: as for `Trainer`.

    Raises:
        ValueError: one process sees several GPUs.
    """

    def __init__(self, drafter: Any, target: PreTrainedModel, args: DartTrainingArguments, **kwargs: Any) -> None:
        places = getattr(target, "hf_device_map", None)
        if args.n_gpu > 1 and places is not None and len(set(places.values())) > 1:
            args._n_gpu = 1  # the drafter trains on the first one; the target takes the others
        if args.n_gpu > 1:
            raise ValueError(
                f"One process sees {args.n_gpu} GPUs; start one per GPU with 'accelerate launch', name one in "
                "CUDA_VISIBLE_DEVICES, or spread the target over them with device_map='auto'."
            )
        super().__init__(model=drafter, args=args, **kwargs)
        self.args: DartTrainingArguments = args
        self.drafter = drafter
        self.target = target.eval()
        if places is None:
            self.target.to(args.device)
        # The loss is divided by the items of the whole step (`compute_loss`), not by micro-batch.
        self.model_accepts_loss_kwargs = True
        self._staging = False  # while a checkpoint is written
        self._empty_steps = 0
        self._evaluated = np.zeros(2)  # the sum of the losses of an evaluation, and its items
        if args.decode_prompts:
            if self.eval_dataset is None:
                raise ValueError("decode_prompts takes its prompts from the evaluation rows; give an eval_dataset.")
            prompts = first_prompts(self.eval_dataset, args.decode_prompts, args.decode_prompt_tokens)
            # Copied text would hide what the drafter knows. Trees of a given size are drafted in every round, on every
            # machine.
            nodes = drafter.tree_config.nodes or _DECODED_NODES
            tree = replace(drafter.tree_config, lookup=0, nodes=nodes)
            self.add_callback(DecodingCallback(self, prompts, args.decode_new_tokens, tree))
        if args.early_stopping_patience is not None:
            self.add_callback(Patience(args.early_stopping_patience))

    @abstractmethod
    def draw(self, inputs: dict[str, Any], generator: torch.Generator) -> int:
        """Add to a batch, in place, what is random about it.

        Args:
            inputs: the stacked rows.
            generator: of all random numbers; a resumed run gets the same.

        Returns:
            How many items its loss will be a sum over.
        """

    @abstractmethod
    def summed_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The sum of the losses of a batch's items, and their hidden states [n, ...].

        Args:
            model: the drafter, as `accelerate` has wrapped it.
            inputs: with what `draw` has added.
        """

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

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The micro-batches of a step with what is random about them, and the items of the step on all processes.

        The loader runs ahead of the step: numbers drawn there would be others in a resumed run.

        Raises:
            ValueError: step after step has nothing to train on.
        """
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        generator = seeded(self.args.seed, self.state.global_step, self.args.process_index)
        items = sum(self.draw(sample, generator) for sample in samples)
        tokens = sum(int((sample["documents"] >= 0).sum()) for sample in samples)
        total, tokens = self.accelerator.reduce(torch.tensor([items, tokens], device=device), "sum")
        self.state.num_input_tokens_seen += int(tokens)
        self._empty_steps = 0 if total else self._empty_steps + 1
        if self._empty_steps == _PATIENCE:
            raise ValueError(
                f"{_PATIENCE} steps had nothing to train on: no row is longer than a draft, or none has a token that "
                "counts; give longer documents or a smaller draft_length."
            )
        return samples, total.clamp(min=1)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The mean loss of the batch's items.

        Args:
            model: the drafter, as `accelerate` has wrapped it.
            inputs: of `draw`.
            return_outputs: also return a dict with the items' `hidden` states.
            num_items_in_batch: items of the whole step; None divides by those of this batch.
        """
        # accelerate casts inside the drafter's forward only; the target and its LM head are to be cast as well.
        with self.accelerator.autocast():
            loss, hidden = self.summed_loss(model, inputs)
        if num_items_in_batch is None:
            loss = loss / max(len(hidden), 1)
        else:
            # Gradients are averaged over processes, the denominator is that of all of them.
            loss = loss * self.accelerator.num_processes / num_items_in_batch
        return (loss, {"hidden": hidden}) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a micro-batch, after its backward pass.

        Raises:
            FloatingPointError: the loss is not finite; the weights are those before the step.
        """
        loss = super().training_step(*args, **kwargs)
        if not math.isfinite(value := float(loss)):
            raise FloatingPointError(
                f"The loss of step {self.state.global_step + 1} is {value}; resume from a checkpoint before the "
                "loss rose, with a lower learning_rate, a max_grad_norm, or bf16 in place of fp16."
            )
        return loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs = self._prepare_inputs(inputs)
        self.draw(inputs, seeded(self.args.seed))  # the same at every evaluation
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        items, rows = len(outputs["hidden"]), len(inputs["input_ids"])
        # By row, so that rows which only fill up the last batch of several processes can be left out.
        shares = torch.stack([loss.float() * items, torch.full_like(loss, items, dtype=torch.float32)]) / rows
        self._evaluated += self.accelerator.gather_for_metrics(shares.expand(rows, 2)).sum(0).double().cpu().numpy()
        return loss.detach(), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Evaluate; the loss is the mean over all items, as that of a training step."""
        self._evaluated = np.zeros(2)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        total, items = self._evaluated.tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = total / max(items, 1)
        return output

    @cached_property
    def _fingerprints(self) -> dict[str, float]:
        return fingerprints(self.target)

    # ---- whole checkpoints --------------------------------------------------------------------------

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


def seeded(*numbers: int) -> torch.Generator:
    """A generator of random numbers on the CPU, seeded with all of `numbers`."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


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
