"""`DartTrainer`: the target runs online and teaches the head; everything else is `transformers.Trainer`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from hf_dart.features import features_request, gather_features
from hf_dart.head import DartHead
from hf_dart.training.blocks import (
    build_blocks,
    document_positions,
    gather_blocks,
    labels_behind,
    target_positions,
)
from hf_dart.training.chunks import chunked
from hf_dart.training.data import BlockCollator
from hf_dart.training.evaluate import DraftQuality
from hf_dart.training.losses import annealed_kl, log_acceptance
from hf_dart.training.objective import PRESETS, Objective
from hf_dart.training.record import write_training_record


@dataclass
class DartTrainingArguments(TrainingArguments):
    """`TrainingArguments` and what is DART's own.

    Args:
        anchors_per_row: K, blocks trained per row.
        loss: "dart" (annealed KL), "left_to_right", "dpace" or "lk" (`objective.PRESETS`).
        divergence, position_weights, gamma, dpace_alpha, lk_eta, token_weight, focal_weight, chain_weight,
        chain_rule, chain_form, chain_beta: change that field of the preset (`objective.Objective`).
        selector_only: train the head's bigram selector on the frozen head, by annealed KL.
        selector_candidates: K, tokens per depth that the selector learns to rank.
        loss_chunk: blocks whose logits are held at a time (`chunks.chunked`); 0 holds all.
        attention: of the blocks' pass: "sdpa" with a mask of every pair of positions, "flex" (FlexAttention,
            CUDA only) which skips what no block looks at, or "auto", flex wherever it can be had.
    """

    anchors_per_row: int = field(default=32, metadata={"help": "blocks trained per row"})
    loss: str = field(default="dart", metadata={"help": f"one of {', '.join(PRESETS)}"})
    divergence: str | None = field(default=None, metadata={"help": "ce, kl, reverse_kl, js, tv, log_acceptance or lk"})
    position_weights: str | None = field(default=None, metadata={"help": "uniform, exponential, linear or dpace"})
    gamma: float | None = field(
        default=None, metadata={"help": "exponential weights: that of a draft token relative to the one before"}
    )
    dpace_alpha: float | None = field(default=None, metadata={"help": "smoothing of the dpace weights"})
    lk_eta: float | None = field(default=None, metadata={"help": "how fast lk leaves KL behind"})
    token_weight: float | None = field(default=None, metadata={"help": "of the weighted divergence"})
    focal_weight: float | None = field(default=None, metadata={"help": "of the cross-entropy at the first error"})
    chain_weight: float | None = field(default=None, metadata={"help": "of the chain loss"})
    chain_rule: str | None = field(default=None, metadata={"help": "hard, token, block or coupled"})
    chain_form: str | None = field(default=None, metadata={"help": "linear or log"})
    chain_beta: float | None = field(default=None, metadata={"help": "exponent of the log form"})
    selector_only: bool = field(default=False, metadata={"help": "train the bigram selector of a frozen head"})
    selector_candidates: int = field(default=32, metadata={"help": "tokens per depth that it learns to rank"})
    loss_chunk: int = field(default=64, metadata={"help": "blocks whose logits are held at a time; 0: all"})
    attention: str = field(default="auto", metadata={"help": "auto, sdpa, or flex (CUDA only)"})
    # The rows hold what the target needs, not what the head's forward is called with.
    remove_unused_columns: bool = field(default=False, metadata={"help": "leave at False"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchors_per_row < 1:
            raise ValueError(f"anchors_per_row is {self.anchors_per_row}; give 1 or more.")
        if self.loss not in PRESETS:
            raise ValueError(f"loss is {self.loss!r}; give one of {', '.join(PRESETS)}.")
        objective = self.objective  # says what is out of range
        if self.selector_only and objective != replace(PRESETS["dart"], gamma=objective.gamma):
            raise ValueError("selector_only trains by annealed KL; leave loss at 'dart' and change gamma only.")
        if self.attention not in ("auto", "sdpa", "flex"):
            raise ValueError(f"attention is {self.attention!r}; give 'auto', 'sdpa' or 'flex'.")
        if self.attention == "flex" and self.device.type != "cuda":
            raise ValueError(f"attention='flex' has no backward pass on {self.device.type}; give 'sdpa' or 'auto'.")
        if self.remove_unused_columns:
            raise ValueError("remove_unused_columns drops the tokens that the target reads; leave it False.")

    @property
    def objective(self) -> Objective:
        """The preset with the fields that were given."""
        given = {one.name: getattr(self, one.name) for one in fields(Objective)}
        return replace(PRESETS[self.loss], **{name: value for name, value in given.items() if value is not None})


class DartTrainer(Trainer):
    """Trains a [`DartHead`] to draft for its target.

    Args:
        head: as `DartHead.from_target(target)` or `from_pretrained(..., target=target)` gives it.
        target: the causal LM; it is put into evaluation mode and run without gradients, its weights stay.
        args: [`DartTrainingArguments`].
        train_dataset, eval_dataset: rows as those of `data.PackedTokens`: `input_ids` [T], `documents` [T].
        kwargs: as for `Trainer`.

    Raises:
        ValueError: the head does not fit the target.
    """

    data_collator: Any

    def __init__(self, head: DartHead, target: Any, args: DartTrainingArguments, **kwargs: Any) -> None:
        head.bind(target)
        if args.selector_only:
            if head.selector is None:
                raise ValueError("selector_only needs a head with a selector; call head.add_selector(rank) first.")
            head.requires_grad_(False)
            head.selector.requires_grad_(True)
        kwargs.setdefault("data_collator", BlockCollator(head.draft_length, args.anchors_per_row))
        super().__init__(model=head, args=args, **kwargs)
        self.args: DartTrainingArguments = args
        self.head = head
        self.objective = args.objective
        self.target = target.eval()
        if getattr(target, "hf_device_map", None) is None:
            self.target.to(args.device)
        # The loss is divided by the blocks of the whole step (`compute_loss`), not by micro-batch.
        self.model_accepts_loss_kwargs = True
        # The compiled kernels take no smaller heads, and no float64.
        fits = args.device.type == "cuda" and head.config.head_dim >= 16 and head.dtype != torch.float64
        self.flex = args.attention == "flex" or (args.attention == "auto" and fits)
        self._agreement: Tensor | None = None
        self._quality: DraftQuality | None = None  # while an evaluation runs
        self._packing_checked = False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with _frozen(self.target):
            return super().train(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """As `Trainer`, but what is counted for the loss is blocks: all of the step, on all processes."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        blocks = sum(int((sample["anchors"] >= 0).sum()) for sample in samples)
        tokens = sum(int((sample["documents"] >= 0).sum()) for sample in samples)
        total = self.accelerator.reduce(torch.tensor([blocks, tokens], device=device), "sum")
        self.state.num_input_tokens_seen += int(total[1])
        return samples, total[0]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The mean loss of the batch's blocks.

        Args:
            model: the head, as `accelerate` has wrapped it.
            inputs: `input_ids` [B, T], `documents` [B, T], `anchors` [B, K].
            return_outputs: also return a dict with the blocks' `hidden` [N, d, H].
            num_items_in_batch: blocks of the whole step; None divides by those of this batch.
        """
        # accelerate casts inside the head's forward only; the target and its LM head are to be cast as well.
        with self.accelerator.autocast():
            loss, hidden = self._block_loss(model, inputs)
        if num_items_in_batch is None:
            loss = loss / max(len(hidden), 1)
        else:
            # Gradients are averaged over processes, the denominator is that of all of them.
            loss = loss * self.accelerator.num_processes / num_items_in_batch
        return (loss, {"hidden": hidden}) if return_outputs else loss

    def _block_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The sum of the block losses, and the blocks' hidden states [N, d, H]."""
        ids, documents, anchors = inputs["input_ids"], inputs["documents"], inputs["anchors"]
        draft_length = self.head.draft_length
        features, target_logits = self.teach(ids, documents)
        bidirectional = self.head.config.block_attention == "bidirectional"
        blocks = build_blocks(documents, anchors, draft_length, bidirectional, self.flex)
        everything = model(
            features=features[:, :-1],
            next_embeddings=self.head.embed(ids[:, 1:]),
            positions=blocks.positions,
            attention_mask=blocks.mask,
        )
        present = anchors >= 0  # [B, K]
        hidden = gather_blocks(everything, anchors, draft_length)[present]  # [N, d, H]
        rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(anchors)[present]
        places = target_positions(anchors[present], draft_length)  # [N, d]
        goals = rows[:, None] * ids.shape[1] + places
        target_logits = target_logits.flatten(0, 1)  # [B T, V]
        labels = labels_behind(ids, documents, rows[:, None], places)
        if self.args.selector_only:
            loss = self._selector_loss(hidden, target_logits, goals, ids.flatten()[goals])
        else:
            loss = self._draft_loss(hidden, target_logits, goals, labels)
        if self._quality is not None:
            chunk = self.args.loss_chunk or max(len(hidden), 1)
            parts = zip(hidden.split(chunk), goals.split(chunk), labels.split(chunk), strict=True)
            counts = [self._quality.count(self.head.logits(h), target_logits[g], y) for h, g, y in parts]
            per_block = torch.cat(counts).float()
            per_row = per_block.new_zeros(len(ids), per_block.shape[1]).index_add_(0, rows, per_block)
            # By row, so that rows which only fill up the last batch of several processes can be left out.
            self._quality.add(self.accelerator.gather_for_metrics(per_row))
        if model.training and (self.state.global_step + 1) % max(int(self.state.logging_steps), 1) == 0:
            with torch.no_grad():
                seen = slice(0, 256)
                parts = hidden[seen].split(self.args.loss_chunk or 256)
                drafted = torch.cat([self.head.logits(part).argmax(-1) for part in parts])
                self._agreement = (drafted == target_logits.argmax(-1)[goals[seen]]).float().mean(0)
        return loss, hidden

    def _draft_loss(self, hidden: Tensor, target_logits: Tensor, goals: Tensor, labels: Tensor) -> Tensor:
        """The sum of the objective over the blocks.

        Args:
            hidden: [N, d, H].
            target_logits: [B T, V].
            goals: [N, d] rows of `target_logits`.
            labels: [N, d].
        """
        acceptance = self._acceptance(hidden, target_logits, goals) if self.objective.needs_acceptance else None

        def block_losses(hidden: Tensor, goals: Tensor, labels: Tensor) -> Tensor:
            return self.objective(self.head.logits(hidden), target_logits[goals], labels, acceptance)

        return chunked(block_losses, hidden, goals, labels, chunk_size=self.args.loss_chunk)

    @torch.no_grad()
    def _acceptance(self, hidden: Tensor, target_logits: Tensor, goals: Tensor) -> Tensor:
        """[d] mean acceptance per depth, over the blocks of this micro-batch on all processes."""

        def acceptances(hidden: Tensor, goals: Tensor) -> Tensor:
            return log_acceptance(self.head.logits(hidden), target_logits[goals]).exp()

        chunk = self.args.loss_chunk or max(len(hidden), 1)
        parts = [acceptances(*part).sum(0) for part in zip(hidden.split(chunk), goals.split(chunk), strict=True)]
        counts = torch.full_like(parts[0], len(hidden))
        total, counts = self.accelerator.reduce(torch.stack([torch.stack(parts).sum(0), counts]), "sum")
        return total / counts.clamp(min=1)

    def _selector_loss(self, hidden: Tensor, target_logits: Tensor, goals: Tensor, in_front: Tensor) -> Tensor:
        """Annealed KL among the head's best candidates, each behind the token that really came before it.

        Args:
            hidden: [N, d, H].
            target_logits: [B T, V].
            goals: [N, d] rows of `target_logits`.
            in_front: [N, d] the token before each drafted one.
        """
        assert self.head.selector is not None
        drafted, wanted, candidates = [], [], []
        chunk = self.args.loss_chunk or len(hidden)
        with torch.no_grad():
            for part in range(0, len(hidden), chunk):
                best = self.head.logits(hidden[part : part + chunk]).topk(self.args.selector_candidates)
                drafted.append(best.values)
                candidates.append(best.indices)
                wanted.append(target_logits[goals[part : part + chunk]].gather(-1, best.indices))
        # A token is projected once, however often it occurs.
        tokens, places = torch.cat([in_front[..., None], torch.cat(candidates)], dim=-1).unique(return_inverse=True)
        pairs = self.head.selector(hidden, self.head.embed(tokens), places[..., :1], places[..., 1:])
        return annealed_kl(torch.cat(drafted) + pairs[..., 0, :], torch.cat(wanted), self.objective.gamma).sum()

    @torch.no_grad()
    def teach(self, ids: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """One forward of the target: features [B, T, F] and logits [B, T, V] of `ids` [B, T].

        Padding lies behind the documents, where causal attention does not look: it needs no mask. Several
        documents in a row are told apart by positions that begin anew, which transformers turns into the mask
        of every layer kind of the model.

        Raises:
            ValueError: rows hold several documents and this target does not keep them apart.
        """
        packed = bool((documents > 0).any())
        if packed and not self._packing_checked:
            self._check_packing(ids.device)
        output = self.target(
            input_ids=ids,
            position_ids=document_positions(documents) if packed else None,
            use_cache=False,
            **features_request(self.head.feature_layers),
        )
        features = gather_features(output, self.head.feature_layers, ids)
        return features.to(self.head.device), output.logits.to(self.head.device)

    def _check_packing(self, device: torch.device) -> None:
        """Change a token of a first document: the logits of a second one in the row must not notice."""
        positions = torch.arange(8, device=device).repeat(2)[None]
        ids = torch.arange(16, device=device)[None].repeat(2, 1)
        ids[1, 0] += 1
        try:
            output = self.target(input_ids=ids, position_ids=positions.expand(2, -1), use_cache=False)
            change = (output.logits[0] - output.logits[1]).abs().float()
            apart = bool(change[8:].max() <= 1e-2 * change[:8].max())
        except TypeError:  # no position_ids
            apart = False
        if not apart:
            raise ValueError(
                f"{type(self.target).__name__} does not keep packed documents apart by their positions; give "
                "rows of one document each, as PackedTokens(..., share_rows=False) does."
            )
        self._packing_checked = True

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """As `Trainer`, with the same anchors at every evaluation."""
        collator = self.data_collator
        if isinstance(collator, BlockCollator):
            self.data_collator = replace(collator, seed=self.args.seed)
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = collator

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """As `Trainer`; the metrics also say how good the drafts are (`DraftQuality.metrics`).

        `metric_for_best_model="tau"` then keeps the checkpoint that drafts best.
        """
        quality = self._quality = DraftQuality(self.head.draft_length)
        try:
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        finally:
            self._quality = None
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in quality.metrics().items()})
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs).detach(), None, None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `Trainer`, with a record of the training beside the weights (`training.record`)."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            write_training_record(self, output_dir or self.args.output_dir)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As `Trainer`; training logs also carry the top-1 agreement with the target per draft token."""
        if self._agreement is not None and "loss" in logs:
            for place, share in enumerate(self._agreement.tolist(), start=1):
                logs[f"agreement_{place}"] = round(share, 4)
            self._agreement = None
        super().log(logs, *args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Of the head alone, forward and backward: 6 per parameter and position."""
        slots = inputs["anchors"].numel() * (self.head.draft_length - 1)
        return 6 * sum(p.numel() for p in self.head.parameters()) * (inputs["input_ids"].numel() + slots)


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
