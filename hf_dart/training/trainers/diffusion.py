"""`DiffusionTrainer`: blocks of which a part is masked, by the chance that a reverse step would find them so.

A block's time t is the chance with which each of its tokens is masked. At t = 1 all of them are, as where a draft
begins: such blocks are trained by the objective of any drafter, left to right if so wished. Blocks at t < 1 are
trained by the bound of a masked diffusion model (MDLM, arXiv 2406.07524), which is also their denoising score entropy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dart.drafters.diffusion.drafter import MASK, DiffusionDrafter
from hf_dart.errors import check_fields
from hf_dart.training.objective.blocks import build_blocks, labels_after
from hf_dart.training.objective.chunks import chunked
from hf_dart.training.objective.losses import NO_LABEL, cross_entropy
from hf_dart.training.options import option
from hf_dart.training.trainers.arguments import DrafterArguments, DrafterTrainingArguments
from hf_dart.training.trainers.drafts import Drafts, Goals, places_and_labels
from hf_dart.training.trainers.trainer import DrafterTrainer

_LEAST_TIME = 1e-3  # the weight of a token is 1 / t


@dataclass
class DiffusionArguments(DrafterArguments):
    """Options of a new [`DiffusionDrafter`], in addition to those of every drafter."""

    denoise_steps: int | None = option(None, "T, reverse steps per draft")
    unmasking: Literal["confidence", "left_to_right"] | None = option(None, "which slots a reverse step reveals")
    context_window: int | None = option(None, "W, how many tokens back a position attends to")
    hidden_size: int | None = option(None, "default: as the target")


@dataclass
class DiffusionTrainingArguments(DrafterTrainingArguments):
    """`DrafterTrainingArguments` and those of the diffusion drafter alone."""

    loss: str = option("left_to_right", "loss of blocks that are all masked, as for a head")
    revealed_share: float = option(
        0.5, "share of the blocks with tokens revealed, at a time from (0, 1); the loss applies to the others, at 1"
    )
    text_weight: float = option(
        0.0, "weight of the next token's loss at every entry of the text, which predicts a draft's first token"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, shares=("revealed_share",))
        if not 0 <= self.text_weight < math.inf:
            raise ValueError(f"text_weight is {self.text_weight}; give a number of 0 or more.")


class DiffusionTrainer(DrafterTrainer[DiffusionDrafter]):
    """Trainer of a [`DiffusionDrafter`], which learns to draft for its target.

    Evaluations draft in one step: their blocks are all masked. Arguments and errors are those of [`DrafterTrainer`].
    """

    drafter_class = DiffusionDrafter
    drafter_arguments = (DiffusionArguments,)
    training_arguments = DiffusionTrainingArguments

    def draw(self, inputs: dict[str, Any], generator: torch.Generator) -> int:
        """Add `anchors`, `times` [B, K], a `seed`, and `slots` [B, K, d]: revealed tokens, `MASK` for the others."""
        blocks = super().draw(inputs, generator)
        ids, anchors = inputs["input_ids"], inputs["anchors"]
        present, draft_length = anchors >= 0, self.drafter.draft_length
        times = draw_times(blocks, 0.0 if self.evaluates else self.args.revealed_share, generator)
        masked = torch.rand(blocks, draft_length, generator=generator) < times[:, None]
        _, labels = places_and_labels(inputs, draft_length)
        hidden = masked.to(ids.device) | (labels == NO_LABEL)
        inputs["slots"] = ids.new_full((*anchors.shape, draft_length), MASK)
        inputs["slots"][present] = torch.where(hidden, MASK, labels)
        inputs["times"] = torch.ones(anchors.shape, device=ids.device)
        inputs["times"][present] = times.to(ids.device)
        return blocks

    def teach(self, inputs: dict[str, Any], places: Tensor) -> tuple[Tensor, Goals]:
        """Features and goals of the target, empty where only the text itself is learned from."""
        objective = self.args.objective
        if self.drafter.feature_layers or objective.needs_target or self.evaluates or "beside" in inputs:
            return super().teach(inputs, places)
        nothing = torch.zeros((*inputs["input_ids"].shape, 0), device=places.device)
        return nothing, Goals(places, nothing.new_zeros(len(places), 0))

    def block_states(self, model: nn.Module, inputs: dict[str, Any], features: Tensor, goals: Goals) -> Tensor:
        ids, anchors, slots = inputs["input_ids"], inputs["anchors"], inputs["slots"]
        length, window = self.drafter.draft_length, self.drafter.config.context_window
        blocks = build_blocks(inputs["documents"], anchors, length, bidirectional=True, window=window)
        tokens = torch.cat([ids[:, 1:], slots[..., :-1].flatten(1)], dim=1)
        entries = {"tokens": tokens, "features": features[:, :-1]}
        if self.reads_text:
            states = model(**entries, positions=blocks.positions, attention_mask=blocks.mask)
            inputs["text_states"] = states[:, : ids.shape[1] - 1]
            return blocks.drafts(states)
        states = model(**entries, **blocks.inputs(self.drafter.config.num_layers))
        return states.unflatten(1, (-1, length))

    @property
    def reads_text(self) -> bool:
        """True if the text's own entries are trained as well."""
        return self.args.text_weight > 0 and not self.evaluates

    def draft_loss(self, drafts: Drafts) -> Tensor:
        """Return the sum over the blocks of the masked tokens' cross-entropies, divided by time and d.

        That is the bound of a masked diffusion model with a linear schedule (MDLM, arXiv 2406.07524), and denoising
        score entropy (SEDD, arXiv 2310.16834). Blocks of which nothing is shown learn by the options' objective.
        """
        inputs, labels = drafts.inputs, drafts.labels
        present = inputs["anchors"] >= 0
        times, masked = inputs["times"][present], inputs["slots"][present] == MASK
        # Token by token: no logits of those that were shown, or that are not known.
        learned = masked & (labels != NO_LABEL) & (times < 1)[:, None]
        divisors = (times * self.drafter.draft_length)[:, None].expand_as(labels)
        loss = self._cross_entropies(drafts.hidden, labels, divisors, learned)
        if self.reads_text:
            loss = loss + len(labels) * self.args.text_weight * self._text_loss(inputs)
        return loss + super().draft_loss(drafts.of(times == 1))

    def _text_loss(self, inputs: dict[str, Any]) -> Tensor:
        """Return the mean cross-entropy of the predictions of the text's own entries: the first token of a draft."""
        ids, documents = inputs["input_ids"], inputs["documents"]
        rows = torch.arange(len(ids), device=ids.device)[:, None]
        places = torch.arange(1, ids.shape[1], device=ids.device).expand(len(ids), -1)
        labels = labels_after(ids, documents, rows, places)
        inside = documents[:, :-1] == documents[:, 1:]
        if "loss_mask" in inputs:
            inside = inside & F.pad(inputs["loss_mask"][:, 2:], (0, 1), value=False)
        learned = inside & (labels != NO_LABEL) & (documents[:, :-1] >= 0)
        return self._cross_entropies(inputs["text_states"], labels, learned.sum().expand_as(labels), learned)

    def _cross_entropies(self, hidden: Tensor, labels: Tensor, divisors: Tensor, learned: Tensor) -> Tensor:
        """Sum over the `learned` ones of tokens [n, m]; no more logits are held than those of `loss_chunk` blocks."""

        def losses(hidden: Tensor, labels: Tensor, divisors: Tensor) -> Tensor:
            return cross_entropy(self.drafter.logits(hidden), labels)[:, 0] / divisors

        tokens = hidden[learned][:, None], labels[learned][:, None], divisors[learned]
        return chunked(losses, *tokens, chunk_size=self.args.loss_chunk * self.drafter.draft_length)


def draw_times(blocks: int, revealed_share: float, generator: torch.Generator) -> Tensor:
    """[N] times: spread evenly over (0, 1) for a share of the blocks, whichever they are; 1 for the others.

    Spread, they give the bound a smaller variance than drawn one by one.
    """
    times = torch.ones(blocks)
    count = round(revealed_share * blocks)
    spread = (torch.arange(count) + torch.rand(1, generator=generator)) / max(count, 1)
    chosen = torch.randperm(blocks, generator=generator)[:count]
    times[chosen] = spread.clamp(_LEAST_TIME, 1 - _LEAST_TIME)
    return times
