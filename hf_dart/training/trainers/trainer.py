"""`DrafterTrainer`: training any drafter for its frozen target, on `transformers.Trainer`.

Blocks of drafts of one text are trained in one pass, on the hidden states and logits of the target, which runs online.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
import yaml
from huggingface_hub import CommitInfo
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel

from hf_dart.drafters.trained import TrainedDrafter
from hf_dart.hub.facts import TRAINING_RECORD
from hf_dart.hub.publish import push_folder
from hf_dart.training.checkpoints import Patience, WholeCheckpoints
from hf_dart.training.data.images import collate
from hf_dart.training.data.sources import pack_dataset
from hf_dart.training.muon import MuonAndOther, matrix_names
from hf_dart.training.objective.blocks import draw_anchors
from hf_dart.training.objective.chunks import chunked
from hf_dart.training.objective.losses import log_acceptance
from hf_dart.training.record import training_record
from hf_dart.training.trainers import evaluation
from hf_dart.training.trainers.arguments import DrafterArguments, DrafterTrainingArguments
from hf_dart.training.trainers.drafts import Drafts, Goals, as_columns, places_and_labels
from hf_dart.training.trainers.teacher import Teacher

_DECODED_NODES = 32  # of the trees of decoding evaluations, where the drafter's own have no given size
_PATIENCE = 10  # steps without anything to train on, after which training stops
_OWN = ("compute_loss_func", "compute_metrics", "model_init", "preprocess_logits_for_metrics")  # of `Trainer`
_NO_BLOCKS = "no row is longer than a draft, or no token counts; give longer documents or a smaller draft_length."

AnyDrafter = TypeVar("AnyDrafter", bound=TrainedDrafter)


class DrafterTrainer(WholeCheckpoints, Generic[AnyDrafter], ABC):
    """A `Trainer` of a drafter, on blocks that begin after random anchors of the rows.

    The loss of a step is a mean over all its blocks, however they are spread over micro-batches and processes.
    Training stops at a loss that is not finite. A subclass says how its drafter drafts all blocks of a batch
    (`block_states`), and where need be what else is random about a batch (`draw`) and its loss (`draft_loss`).

    Args:
        drafter: the model that is trained, as its `from_target(target)` or `from_pretrained(..., target=target)` gives
            it.
        target: the causal LM; it is put into evaluation mode and run without gradients, its weights stay.
        args: of the type of `training_arguments`.
        processing_class: the target's tokenizer, for datasets of text.
        max_length: tokens of the rows that these are packed into.
        kwargs: as for `Trainer`. `train_dataset` and `eval_dataset` are `datasets.Dataset`s with a field `text`,
            `messages`, `prompt` and `completion`, or `input_ids`, which are tokenized and packed here; or rows of
            [`PackedTokens`] (`input_ids` [T], `documents` [T]) or of `load_rows`, which also have `loss_mask` [T]; or
            rows with images or sounds (`image_row`), which also have `beside`, a dict of what else the target is given.

    Raises:
        ValueError: the drafter does not fit the target, what `args` ask for could not be trained or saved, or one
            process has several GPUs.
    """

    drafter_class: ClassVar[type] = TrainedDrafter
    """The kind of drafter that it trains."""
    drafter_arguments: ClassVar[tuple[type, ...]] = (DrafterArguments,)
    """The options of `hf-dart train` that shape it: a `DrafterArguments`, and `LoraArguments` if it takes adapters."""
    training_arguments: ClassVar[type[DrafterTrainingArguments]] = DrafterTrainingArguments
    takes_images: ClassVar[bool] = False
    """True if blocks read `next_embeddings`, the text with the embeddings of images in their places."""
    passes: ClassVar[tuple[str, ...]] = ("",)
    """The passes whose drafts an evaluation counts, the first one without a name."""
    evaluates = False  # True while a batch is evaluated
    optimizer: Any
    recipe: dict[str, Any] | None = None  # the options of `hf-dart train`, for the record of the training

    def __init__(
        self,
        drafter: AnyDrafter,
        target: PreTrainedModel,
        args: DrafterTrainingArguments,
        *,
        processing_class: Any = None,
        max_length: int = 2048,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, self.training_arguments):
            wanted, given = self.training_arguments.__name__, type(args).__name__
            raise TypeError(f"{type(self).__name__} takes {wanted}, not {given}; give {wanted}(output_dir, ...).")
        for name in _OWN:
            if kwargs.get(name) is not None:
                raise TypeError(f"{type(self).__name__} has a drafter, loss and metrics already; leave {name} out.")
        self.check_drafter(drafter)
        drafter.bind(target)
        if drafter.lm_head is not None and any(weight.requires_grad for weight in drafter.lm_head.parameters()):
            if args.loss_chunk:
                raise ValueError("Losses in chunks train no LM head; give loss_chunk=0, or freeze that of the drafter.")
            if args.ddp_find_unused_parameters is None:
                # It is called outside the forward of DDP, which would consider it unused.
                args.ddp_find_unused_parameters = False
        places = getattr(target, "hf_device_map", None)
        if args.n_gpu > 1 and places is not None and len(set(places.values())) > 1:
            args._n_gpu = 1  # the drafter trains on the first one; the target takes the others
        if args.n_gpu > 1:
            remedy = "start one per GPU by accelerate, or load the target with device_map='auto'"
            raise ValueError(f"One process sees {args.n_gpu} GPUs; {remedy}.")
        kwargs.setdefault("data_collator", collate)
        self._pack = partial(
            pack_dataset,
            tokenizer=processing_class,
            draft_length=drafter.draft_length,
            max_length=max_length,
            config=drafter.config,
        )
        if isinstance(splits := kwargs.get("train_dataset"), dict):
            first = next(iter(splits), "train")
            raise TypeError(f"train_dataset has the splits {', '.join(splits)}; give one, such as data[{first!r}].")
        for name in ("train_dataset", "eval_dataset"):
            kwargs[name] = self._packed(kwargs.get(name))
        super().__init__(model=drafter, args=args, compute_metrics=self._figures, **kwargs)
        if args.muon_learning_rate is not None and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError("Muon needs whole matrices, which FSDP and DeepSpeed split; leave muon_learning_rate out.")
        if self.is_fsdp_enabled and drafter.embed_tokens is not None:  # they are read before FSDP gathers them
            raise ValueError("FSDP splits the drafter's own embeddings, which are read whole; train it without fsdp.")
        self.args: Any = args
        self.drafter: AnyDrafter = drafter
        self.target, self.teacher = target, Teacher(target, drafter)
        if places is None:
            target.to(args.device)
        # The loss is divided by the items of the whole step (`compute_loss`), not by micro-batch.
        self.model_accepts_loss_kwargs = True
        self._empty_steps = 0
        self._agreement: Tensor | None = None  # of the step that is logged next
        self.add_callback(evaluation.CountedWrites())
        if args.decode_prompts:
            if self.eval_dataset is None:
                raise ValueError("decode_prompts takes its prompts from the evaluation rows; give an eval_dataset.")
            held_out = self.eval_dataset
            rows = chain.from_iterable(held_out.values()) if isinstance(held_out, dict) else held_out
            prompts = evaluation.first_prompts(rows, args.decode_prompts, args.decode_prompt_tokens)
            # Copied text would hide what the drafter knows; trees of a given size are drafted in every round.
            tree = replace(drafter.tree_config, lookup=0, nodes=drafter.tree_config.nodes or _DECODED_NODES)
            self.add_callback(evaluation.DecodingCallback(self, prompts, tree_config=tree))
        if args.early_stopping_patience is not None:
            self.add_callback(Patience(args.early_stopping_patience))

    @classmethod
    def check_drafter(cls, drafter: Any) -> None:
        """Raise a `TypeError` for anything but a drafter of the kind that is trained here."""
        if not isinstance(drafter, cls.drafter_class):
            wanted, given = cls.drafter_class.__name__, type(drafter).__name__
            trainer = f"{cls.__name__} trains a {wanted}, not a {given}"
            raise TypeError(f"{trainer}; give that, with LoRA by its own add_adapter, then its target.")

    def _packed(self, data: Any) -> Any:
        """Pack the documents of data sets; packed rows, and the names of sets to evaluate, stay as they are."""
        if isinstance(data, dict):
            return {name: self._packed(one) for name, one in data.items()}
        if getattr(data, "column_names", ()) is None:  # a stream of `datasets` that was mapped
            data = data._resolve_features()
        columns = getattr(data, "column_names", None)  # of `datasets`
        if columns is None and hasattr(data, "__len__") and len(data) and not isinstance(data, str):
            first = next(iter(data))
            if not isinstance(first, Mapping) or "documents" not in first:
                raise TypeError(f"The first row is {first!r:.40}; give datasets.Dataset.from_dict({{'text': texts}}).")
        return data if columns is None or "documents" in columns else self._pack(data)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        return super().evaluate(self._packed(eval_dataset), *args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return super().predict(self._packed(test_dataset), *args, **kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return the optimizer of `optim`, for the matrices Muon if `muon_learning_rate` is given."""
        args = self.args
        if args.muon_learning_rate is None:
            return super().create_optimizer(model)
        if self.optimizer is None:
            matrices = {name: self.drafter.get_parameter(name) for name in matrix_names(self.drafter)}
            named = self.drafter.named_parameters()
            others = [weight for name, weight in named if weight.requires_grad and name not in matrices]
            kind, options = self.get_optimizer_cls_and_kwargs(args, self.drafter)
            other = kind([{"params": others, "weight_decay": 0.0}], **options)
            self.optimizer = MuonAndOther([*matrices.values()], args.muon_learning_rate, args.weight_decay, other)
        return self.optimizer

    def draw(self, inputs: dict[str, Any], generator: torch.Generator) -> int:
        """Add to a batch what is random about it: `anchors` [B, K], the places of its blocks, and a `seed` of noise.

        `inputs` are the stacked rows: `input_ids`, `documents` [B, T], perhaps `loss_mask` [B, T] and `beside`. A
        resumed run gets the same generator. Returned is the number of blocks that the loss will be a sum over.
        """
        count, length = self.args.anchors_per_row, self.drafter.draft_length
        inputs["anchors"] = draw_anchors(inputs["documents"], count, length, generator, inputs.get("loss_mask"))
        inputs["seed"] = int(torch.randint(2**31, (), generator=generator))
        return int((inputs["anchors"] >= 0).sum())

    def teach(self, inputs: dict[str, Any], places: Tensor) -> tuple[Tensor, Goals]:
        """Return the target's features [B, T, F], and what it says after the tokens at `places` [U] (`Goals`).

        Of rows with images or sounds, if the trainer takes them, `read` is added to the batch (`next_embeddings`).
        """
        ids = inputs["input_ids"]
        if "beside" not in inputs:
            return self.teacher.text(ids, inputs["documents"], places, self.evaluates)
        if not self.takes_images:
            raise ValueError(f"{type(self).__name__} takes no images or sounds; give rows of text.")
        features, goals, inputs["read"] = self.teacher.images(ids, inputs["beside"], places, self.evaluates)
        return features, goals

    def next_embeddings(self, inputs: dict[str, Any]) -> Tensor:
        """Embeddings [B, T - 1, E] of the tokens after each position, with those of images in their places."""
        return self.drafter.embed(inputs.get("read", inputs["input_ids"])[:, 1:])

    @abstractmethod
    def block_states(self, model: nn.Module, inputs: dict[str, Any], features: Tensor, goals: Goals) -> Tensor:
        """Return the states [B, K, d, H] of all blocks, as drafting there would give them; of absent ones, anything.

        `model` is the drafter as `accelerate` has wrapped it, `inputs` the batch with what `draw` and `teach` added.
        """

    def draft_loss(self, drafts: Drafts) -> Tensor:
        """Return the sum of the objective over the blocks."""
        labels = as_columns(drafts.labels, self.drafter.draft_vocabulary)
        objective = self.args.objective
        acceptance = self._acceptance(drafts) if objective.needs_acceptance else None

        def block_losses(hidden: Tensor, places: Tensor, labels: Tensor) -> Tensor:
            return objective(self.drafter.logits(hidden), drafts.goals.at(places), labels, acceptance)

        return chunked(block_losses, drafts.hidden, drafts.places, labels, chunk_size=self.args.loss_chunk)

    def summed_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Drafts]:
        """Return the sum of the losses of a batch's blocks, and their drafts; arguments are those of `block_states`."""
        places, labels = places_and_labels(inputs, self.drafter.draft_length)
        features, goals = self.teach(inputs, places.unique())
        hidden = self.block_states(model, inputs, features, goals)[inputs["anchors"] >= 0]
        drafts = Drafts(inputs, hidden, goals, places, labels)
        logs = (self.state.global_step + 1) % max(int(self.state.logging_steps), 1) == 0
        if logs and not self.evaluates and goals.logits.shape[-1]:
            self._agreement = evaluation.agreement(self.drafter, drafts, self.args.loss_chunk or 256)
        return self.draft_loss(drafts), drafts

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log; training logs also say how often draft token k is the target's best one, as `agreement_k`."""
        if self._agreement is not None and "loss" in logs:
            shares = enumerate(self._agreement.tolist(), start=1)
            logs.update({f"agreement_{place}": round(share, 4) for place, share in shares})
            self._agreement = None
        super().log(logs, *args, **kwargs)

    @torch.no_grad()
    def _acceptance(self, drafts: Drafts) -> Tensor:
        """[d] mean acceptance per depth, over the blocks of this micro-batch on all processes."""

        def accepted(part: Drafts) -> Tensor:
            return log_acceptance(self.drafter.logits(part.hidden), part.goals.at(part.places)).exp().sum(0)

        sums = torch.stack([accepted(part) for part in drafts.split(self.args.loss_chunk)]).sum(0)
        counts = torch.full_like(sums, len(drafts.hidden))
        total, counts = self.accelerator.reduce(torch.stack([sums, counts]), "sum")
        return total / counts.clamp(min=1)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return a step's micro-batches with all that is random in them, and its items on all processes.

        The loader runs ahead of the step: numbers drawn there would be others in a resumed run.
        """
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        generator = seeded(self.args.seed, self.state.global_step, self.args.process_index)
        items = sum(self.draw(sample, generator) for sample in samples)
        padding = self.args.include_num_input_tokens_seen == "all"
        tokens = sum(int((sample["documents"] >= (-1 if padding else 0)).sum()) for sample in samples)
        total, tokens = self.accelerator.reduce(torch.tensor([items, tokens], device=device), "sum")
        self.state.num_input_tokens_seen += int(tokens)
        self._empty_steps = 0 if total else self._empty_steps + bool(samples)
        if self._empty_steps == _PATIENCE:
            raise ValueError(f"{_PATIENCE} steps had nothing to train on: {_NO_BLOCKS}")
        return samples, total.clamp(min=1)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Leave the counting of tokens to `get_batch_samples`, which knows what is padding."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean loss over so many items, or over the batch's own blocks, and a dict with their `drafts`."""
        # accelerate casts inside the drafter's forward only; the target and its LM head are to be cast as well.
        with self.accelerator.autocast():
            loss, drafts = self.summed_loss(model, inputs)
        if num_items_in_batch is None:
            loss = loss / max(len(drafts.hidden), 1)
        else:
            # Gradients are averaged over processes, the denominator is that of all of them.
            loss = loss * self.accelerator.num_processes / num_items_in_batch
        return (loss, {"drafts": drafts}) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a micro-batch, after its backward pass; one that is not finite stops before the step."""
        loss = super().training_step(*args, **kwargs)
        if not math.isfinite(value := float(loss)):
            step = self.state.global_step + 1
            raise FloatingPointError(
                f"The loss of step {step} is {value}; resume before it rose, with a lower learning_rate or in bf16."
            )
        return loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs = self._prepare_inputs(inputs)
        self.evaluates = True
        try:
            self.draw(inputs, seeded(self.args.seed))  # the same at every evaluation
            with torch.no_grad(), self.compute_loss_context_manager(), self.accelerator.autocast():
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
                drafts = self.evaluated(outputs["drafts"])
                counts = [evaluation.counts_by_row(self.drafter, one, self.args.loss_chunk) for one in drafts]
        finally:
            self.evaluates = False
        items, rows = len(drafts[0].hidden), len(inputs["input_ids"])
        # By row, so that `Trainer` can leave out rows that only fill up the last batch of several processes.
        shares = torch.stack([loss.float() * items, torch.full_like(loss, items, dtype=torch.float32)]) / rows
        return None, torch.cat(counts, dim=1), shares.repeat(rows, 1)

    def evaluated(self, drafts: Drafts) -> list[Drafts]:
        """Return the drafts that an evaluation counts, in the order of `passes`."""
        return [drafts]

    def _figures(self, found: EvalPrediction) -> dict[str, float]:
        """Return the mean loss of all blocks of an evaluation, and how good their drafts are (`draft_figures`)."""
        loss, items = np.asarray(found.label_ids).sum(0, dtype=np.float64).tolist()
        if not items:
            raise ValueError(f"There is nothing to evaluate: {_NO_BLOCKS}")
        counts = np.asarray(found.predictions).sum(0, dtype=np.float64)
        first, *others = map(evaluation.draft_figures, np.split(counts, len(self.passes)))
        taus = {f"tau_{name}": one["tau"] for name, one in zip(self.passes[1:], others, strict=True) if "tau" in one}
        return {"loss": loss / items, **first, **taus}

    def figure_names(self) -> set[str]:
        """Names of what evaluations may give, without their prefix "eval_"."""
        counts = np.ones((1, len(self.passes) * (4 + 2 * self.drafter.draft_length)))
        decoded = {"tau_decoded"} if self.args.decode_prompts else set()
        return {*decoded, *self._figures(EvalPrediction(counts, np.ones((1, 2))))}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the drafter, the record of its training beside it (training.json), and the recipe of the run once."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            kept = Path(self.args.output_dir, "recipe.yaml")
            if self.recipe is not None and not kept.exists():
                kept.write_text(yaml.safe_dump(self.recipe, sort_keys=False), encoding="utf8")
            file = Path(output_dir or self.args.output_dir, TRAINING_RECORD)
            file.write_text(json.dumps(training_record(self), indent=2) + "\n", encoding="utf8")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **known: Any,
    ) -> CommitInfo | None:
        """Push the drafter with its card (`hf_dart.hub.publish.push_folder`), and wait; only the main process does."""
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        return push_folder(
            self.args.output_dir,
            self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).absolute().name,
            commit_message=commit_message,
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
            **{"private": self.args.hub_private_repo, **known},
        )

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Operations of the drafter alone, forward and backward: 6 per parameter and position."""
        positions = inputs["input_ids"].numel() + inputs["anchors"].numel() * (self.drafter.draft_length - 1)
        return 6 * self.drafter.num_parameters() * positions


def seeded(*numbers: int) -> torch.Generator:
    """Return a generator of random numbers on the CPU, seeded with all of `numbers`."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))
