"""`DartTrainer`: blocks of drafts trained on the hidden states and logits of the target, and how good they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import CommitInfo
from torch import Tensor, nn
from transformers import PreTrainedModel, default_data_collator

from hf_dart.decoding.chain import best_chain
from hf_dart.decoding.proposal import Proposal
from hf_dart.drafters.adapters import LoraArguments
from hf_dart.drafters.dart.drafter import DartHead
from hf_dart.drafters.vocabulary import restricted
from hf_dart.hub.facts import publishable
from hf_dart.hub.push import push_folder
from hf_dart.target.features import features_request, gather_features
from hf_dart.training.checkpoints.record import training_record, write_training_record
from hf_dart.training.objective.blocks import (
    build_blocks,
    document_positions,
    draw_anchors,
    labels_after,
    target_positions,
)
from hf_dart.training.objective.chunks import chunked
from hf_dart.training.objective.losses import NO_LABEL, annealed_kl, log_acceptance
from hf_dart.training.trainers.arguments import DartTrainingArguments, HeadArguments
from hf_dart.training.trainers.base import DrafterTrainer
from hf_dart.training.trainers.evaluate import DraftQuality
from hf_dart.trees.vocabulary import spread, token_ids


class DartTrainer(DrafterTrainer):
    """Trains a [`DartHead`] to draft for its target.

    Args:
        head: as `DartHead.from_target(target)` or `from_pretrained(..., target=target)` gives it.
        target: the causal LM; it is put into evaluation mode and run without gradients, its weights stay.
        args: [`DartTrainingArguments`].
        kwargs: as for `Trainer`; rows of `train_dataset` and `eval_dataset` are those of [`PackedTokens`] (`input_ids`
            [T], `documents` [T]) or of `load_rows`, which also have `loss_mask` [T].

    Raises:
        ValueError: the head does not fit the target, or what `args` ask for could not be trained or saved.
    """

    drafter_arguments: ClassVar[tuple[type, ...]] = (HeadArguments, LoraArguments)
    """The options of `hf-dart train` that shape it: a `DrafterArguments`, and `LoraArguments` if it takes adapters."""
    training_arguments: ClassVar[type[DartTrainingArguments]] = DartTrainingArguments
    """The options of this trainer."""
    recipe: dict[str, Any] | None = None
    """The options of `hf-dart train`, for the record of the training."""

    def __init__(self, head: DartHead, target: PreTrainedModel, args: DartTrainingArguments, **kwargs: Any) -> None:
        head.bind(target)
        if isinstance(head, DartHead):
            _choose_trained(head, args)
        kwargs.setdefault("data_collator", default_data_collator)
        super().__init__(head, target, args, **kwargs)
        if self.is_fsdp_enabled and args.selector_only:
            # Its gradients arise outside the forward that FSDP gathers the weights for.
            raise ValueError("FSDP is for heads that learn as a whole; selectors are small, train them without fsdp.")
        self.head = head
        self.objective = args.objective
        # The compiled kernels take no smaller heads, and no float64.
        fits = args.device.type == "cuda" and head.config.head_dim >= 16 and head.dtype != torch.float64
        self.flex = args.attention == "flex" or (args.attention == "auto" and fits)
        self.best_from: int | None = None
        """How much had been logged when the best weights were loaded; None: they are those of the last step."""
        self._agreement: Tensor | None = None
        self._quality: DraftQuality | None = None  # while an evaluation runs
        self._packing_checked = False

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        # `Trainer` takes no adapters of a model that is no `PeftModel`.
        if not self.head.adapted:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self.head.reload_adapter(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if not self.head.adapted:
            super()._load_best_model()
        else:
            self.head.reload_adapter(self.state.best_model_checkpoint)
        self.best_from = len(self.state.log_history)

    def draw(self, inputs: dict[str, Any], generator: torch.Generator) -> int:
        """Adds `anchors` [B, K]; the items of the loss are their blocks."""
        count, mask = self.args.anchors_per_row, inputs.get("loss_mask")
        drawn = draw_anchors(inputs["documents"], count, self.head.draft_length, generator, mask)
        inputs["anchors"] = drawn
        return int((drawn >= 0).sum())

    def summed_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The sum of the block losses, and the blocks' hidden states [N, d, H].

        Args:
            model: the head, as `accelerate` has wrapped it.
            inputs: `input_ids`, `documents` [B, T], `anchors` [B, K], perhaps `loss_mask` [B, T].
        """
        ids, documents, anchors = inputs["input_ids"], inputs["documents"], inputs["anchors"]
        features, target_logits = self.teach(ids, documents)
        present = anchors >= 0  # [B, K]
        hidden = self.block_states(model, inputs, features, target_logits)[present]  # [N, d, H]
        rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(anchors)[present]
        places = target_positions(anchors[present], self.head.draft_length)  # [N, d]
        goals = rows[:, None] * ids.shape[1] + places
        target_logits = target_logits.flatten(0, 1)  # [B T, V]
        labels = labels_after(ids, documents, rows[:, None], places, inputs.get("loss_mask"))
        if self.args.selector_only:
            loss = self._selector_loss(hidden, target_logits, goals, ids.flatten()[goals])
        else:
            loss = self.draft_loss(inputs, hidden, target_logits, goals, labels)
        if self._quality is not None:
            self.measure(self._quality, inputs, hidden, target_logits, goals, labels)
        seen = self.first_drafts(inputs)[:256] if model.training and self.logs_agreement else anchors[0, :0]
        if len(seen):
            with torch.no_grad():
                parts = hidden[seen].split(self.args.loss_chunk or 256)
                drafted = torch.cat([self._full_logits(part, target_logits).argmax(-1) for part in parts])
                self._agreement = (drafted == target_logits.argmax(-1)[goals[seen]]).float().mean(0)
        return loss, hidden

    def block_states(self, model: nn.Module, inputs: dict[str, Any], features: Tensor, target_logits: Tensor) -> Tensor:
        """The hidden states [B, K, d, H] of all blocks; those of absent ones mean nothing.

        Args:
            model, inputs: of `summed_loss`.
            features, target_logits: of `teach`.
        """
        ids, documents, anchors = inputs["input_ids"], inputs["documents"], inputs["anchors"]
        config = self.head.config
        blocks = build_blocks(
            documents,
            anchors,
            config.draft_length,
            config.block_attention == "bidirectional",
            self.flex,
            injected=config.inject_features,
            shifted=config.shift_logits,
        )
        states = model(
            features=features[:, :-1],
            next_embeddings=self.head.embed(ids[:, 1:]),
            positions=blocks.positions,
            attention_mask=blocks.mask if config.num_layers > 1 else None,
            wanted=blocks.entries,
            wanted_mask=blocks.entries_mask,
        )
        return states.unflatten(1, (-1, self.head.draft_length))

    @property
    def logs_agreement(self) -> bool:
        """Whether this is a step at whose end the agreement with the target is logged."""
        return (self.state.global_step + 1) % max(int(self.state.logging_steps), 1) == 0

    def first_drafts(self, inputs: dict[str, Any]) -> Tensor:
        """Which of the N blocks are drafted as a round begins: all of them."""
        return torch.arange(int((inputs["anchors"] >= 0).sum()), device=inputs["anchors"].device)

    def draft_loss(
        self, inputs: dict[str, Any], hidden: Tensor, target_logits: Tensor, goals: Tensor, labels: Tensor
    ) -> Tensor:
        """The sum of the objective over the blocks.

        Args:
            inputs: of `summed_loss`.
            hidden: [N, d, H].
            target_logits: [B T, V].
            goals: [N, d] rows of `target_logits`.
            labels: [N, d].
        """
        target_logits, labels = restricted(target_logits, labels, self.head.draft_vocabulary, NO_LABEL)
        acceptance = self._acceptance(hidden, target_logits, goals) if self.objective.needs_acceptance else None

        def block_losses(hidden: Tensor, goals: Tensor, labels: Tensor) -> Tensor:
            return self.objective(self.head.logits(hidden), target_logits[goals], labels, acceptance)

        return chunked(block_losses, hidden, goals, labels, chunk_size=self.args.loss_chunk)

    @torch.no_grad()
    def measure(
        self,
        quality: DraftQuality,
        inputs: dict[str, Any],
        hidden: Tensor,
        target_logits: Tensor,
        goals: Tensor,
        labels: Tensor,
    ) -> None:
        """Add the blocks of an evaluation to `quality`; the tensors are those of `draft_loss`."""
        ids = inputs["input_ids"]
        rows = (inputs["anchors"] >= 0).nonzero()[:, 0]
        chunk = self.args.loss_chunk or max(len(hidden), 1)
        roots = ids.flatten()[goals[:, 0]]
        counts = []
        for part, at, known, root in zip(*(one.split(chunk) for one in (hidden, goals, labels, roots)), strict=True):
            logits = self._full_logits(part, target_logits)
            counts.append(quality.count(logits, target_logits[at], known, self._chains(part, logits, root)))
        per_block = torch.cat(counts).float()
        per_row = per_block.new_zeros(len(ids), per_block.shape[1]).index_add_(0, rows, per_block)
        # By row, so that rows which only fill up the last batch of several processes can be left out.
        quality.add(self.accelerator.gather_for_metrics(per_row))

    def _full_logits(self, hidden: Tensor, target_logits: Tensor) -> Tensor:
        """Draft logits [n, d, V] over all tokens of the target's [..., V]: what is never drafted is never right."""
        return spread(self.head.logits(hidden), self.head.draft_vocabulary, target_logits.shape[-1])

    def _chains(self, hidden: Tensor, logits: Tensor, roots: Tensor) -> Tensor:
        """The tokens [n, d] of greedy drafts after the roots [n], of hidden [n, d, H] and logits [n, d, V]."""
        width = min(self.head.tree_config.top_k, logits.shape[-1])
        scores, candidates = logits.log_softmax(-1).topk(width)
        table = self.head.transitions(Proposal(logits, hidden), roots, candidates, scores)
        return best_chain(candidates, scores[:, :, None] if table is None else table)

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

    def _selector_loss(self, hidden: Tensor, target_logits: Tensor, goals: Tensor, before: Tensor) -> Tensor:
        """Annealed KL among the head's best candidates, each after the token that really came before it.

        Args:
            hidden: [N, d, H].
            target_logits: [B T, V].
            goals: [N, d] rows of `target_logits`.
            before: [N, d] the token before each drafted one.
        """
        assert self.head.selector is not None
        if not len(hidden):  # with gradients of zero, which processes wait for
            return sum((weight.sum() * 0.0 for weight in self.head.selector.parameters()), hidden.new_zeros(()))
        drafted, wanted, candidates = [], [], []
        chunk = self.args.loss_chunk or len(hidden)
        with torch.no_grad():
            for part in range(0, len(hidden), chunk):
                best = self.head.logits(hidden[part : part + chunk]).topk(self.args.selector_candidates)
                drafted.append(best.values)
                candidates.append(token_ids(best.indices, self.head.draft_vocabulary))
                wanted.append(target_logits[goals[part : part + chunk]].gather(-1, candidates[-1]))
        # A token is projected once, however often it occurs.
        tokens, places = torch.cat([before[..., None], torch.cat(candidates)], dim=-1).unique(return_inverse=True)
        own = torch.cat(drafted)
        delta = self.head.selector(hidden, own, self.head.embed(tokens), places[..., :1], places[..., 1:])
        return annealed_kl(own + delta[..., 0, :], torch.cat(wanted), self.objective.gamma).sum()

    @torch.no_grad()
    def teach(self, ids: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """One forward of the target: features [B, T, F] and logits [B, T, V] of `ids` [B, T].

        Padding comes after the documents, where causal attention does not look: it needs no mask. Documents of one row
        are kept apart by positions that begin again at 0, which transformers turns into the mask of every kind of
        layer.

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
        features = gather_features(output, self.head.feature_layers, ids).to(self.head.device)
        if not torch.is_autocast_enabled(self.head.device.type):
            features = features.to(self.head.dtype)  # a target in 16 bits and a head in float32
        return features, output.logits.to(self.head.device)

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

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Evaluate; the metrics also say how good the drafts are (`DraftQuality.metrics`).

        `metric_for_best_model="tau"` then keeps the checkpoint that drafts best.

        Raises:
            ValueError: no row holds a block.
        """
        quality = self._quality = DraftQuality(self.head.draft_length)
        try:
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        finally:
            self._quality = None
        figures = quality.metrics()
        if not figures:
            raise ValueError(
                "There is nothing to evaluate: no row is longer than a draft, or none has a token that counts; give "
                "longer documents or a smaller draft_length."
            )
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in figures.items()})
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the drafter, and beside it the record of its training (training.json)."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            write_training_record(self.record(), output_dir or self.args.output_dir)

    def record(self) -> dict[str, Any]:
        """How the drafter was trained so far, as `training_record` says, with dtypes and what `own_record` adds.

        `recipe` holds the options that `hf-dart train` was given, tokens of the Hub and local folders left out.
        """
        return training_record(
            self.args,
            self.state,
            self.best_from,
            **self.own_record(),
            weights_dtype=str(self.head.dtype).removeprefix("torch."),
            target_dtype=str(self.target.dtype).removeprefix("torch."),
            recipe=None if self.recipe is None else publishable(self.recipe),
        )

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **known: Any,
    ) -> CommitInfo | None:
        """Push the drafter with its card in one commit, as `hf_dart.hub.push.push_folder` does.

        Args:
            blocking: has to be true.
            known: more about the head, as for `push_folder`.

        Returns:
            The commit; None on all processes but the main one.
        """
        if not blocking:
            raise ValueError("A head and its card are pushed in one commit that is waited for; leave blocking True.")
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
            private=self.args.hub_private_repo if private is None else private,
            **known,
        )

    def own_record(self) -> dict[str, Any]:
        """More for the record of the training, where a kind of drafter has it."""
        return {}

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log; training logs also have the top-1 agreement with the target per draft token, `agreement_1` and so on."""
        if self._agreement is not None and "loss" in logs:
            for place, share in enumerate(self._agreement.tolist(), start=1):
                logs[f"agreement_{place}"] = round(share, 4)
            self._agreement = None
        super().log(logs, *args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Operations of the drafter alone, forward and backward: 6 per parameter and position."""
        slots = inputs["anchors"].numel() * (self.head.draft_length - 1)
        return 6 * sum(p.numel() for p in self.head.parameters()) * (inputs["input_ids"].numel() + slots)


def _choose_trained(head: DartHead, args: DartTrainingArguments) -> None:
    """Freezes the parts that the losses do not reach.

    Raises:
        ValueError: the part that is to be trained is missing, or could not be trained or saved.
    """
    if head.config.own_lm_head and args.loss_chunk:
        raise ValueError(
            "Losses in chunks train no LM head, and this head has one of its own; give loss_chunk=0, or a head without "
            "own_lm_head."
        )
    if args.selector_only:
        if head.selector is None:
            raise ValueError("selector_only needs a head with a selector; call head.add_selector(rank) first.")
        if head.adapted:
            raise ValueError("An adapter would be saved without the selector; merge it into its head first.")
        if args.selector_candidates > (drafted := head.config.draft_vocab_size or head.config.vocab_size):
            raise ValueError(f"selector_candidates is {args.selector_candidates}; give 2 to {drafted}.")
        head.requires_grad_(False)
        head.selector.requires_grad_(True)
    else:
        for part in (head.selector, head.editor):
            if part is not None:
                part.requires_grad_(False)
    if (args.selector_only or head.config.own_lm_head) and args.ddp_find_unused_parameters is None:
        # They are called outside the forward of DDP, which would take them for unused.
        args.ddp_find_unused_parameters = False
