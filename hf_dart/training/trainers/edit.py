"""`EditTrainer`: a head learns to look at its own drafts again, wrong tokens and all.

After the first drafts of all blocks comes an edit pass over the same blocks, whose slots now hold tokens: true ones, or
the head's own draft, as an editor that has only seen right tokens before a slot would follow wrong ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.drafters.dart.drafter import DartHead
from hf_dart.drafters.dart.modeling import Edits
from hf_dart.training.objective.drafting import head_blocks
from hf_dart.training.objective.losses import NO_LABEL, log_probabilities
from hf_dart.training.options import option
from hf_dart.training.trainers.arguments import DartTrainingArguments, HeadArguments
from hf_dart.training.trainers.dart import DartTrainer
from hf_dart.training.trainers.drafts import Drafts, Goals, as_columns, places_and_labels
from hf_dart.trees.vocabulary import token_ids


@dataclass
class EditTrainingArguments(DartTrainingArguments):
    """`DartTrainingArguments` and that of the edit pass alone."""

    editor_only: bool = option(False, "train the editor of a frozen head")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.selector_only:
            raise ValueError("selector_only and edit passes are trained apart; leave one of them out.")


class EditTrainer(DartTrainer):
    """Trainer of a [`DartHead`] together with its editor, or of the editor alone.

    A head without an editor is given one (`DartHead.add_editor`). Metrics of an evaluation also have `tau_edited`, that
    of greedy drafts after the edit pass. Arguments and errors are those of [`DartTrainer`].
    """

    true_share = 0.5
    """Share of the blocks that hold the true tokens; the others hold the head's own draft. With causal slots true
    tokens alone are on target: what is drafted after a wrong token is never accepted."""
    sampled_share = 0.5
    """Share of the blocks whose drafts are sampled, with the noise that the target's token was sampled with, as in
    `generate`; the others take the likeliest tokens."""

    passes = ("", "edited")
    drafter_arguments = (HeadArguments,)
    training_arguments = EditTrainingArguments

    def __init__(self, head: DartHead, target: PreTrainedModel, args: EditTrainingArguments, **kwargs: Any) -> None:
        self.check_drafter(head)
        if head.adapted and not isinstance(head.editor, ModulesToSaveWrapper):
            raise ValueError("An adapter would be saved without the editor; merge it into its head first.")
        if head.editor is None:
            head.add_editor()
        if args.editor_only:
            head.requires_grad_(False)
        super().__init__(head, target, args, **kwargs)
        head.get_submodule("editor").requires_grad_(True)

    def draw(self, inputs: dict[str, Any], generator: torch.Generator) -> int:
        """Add `anchors`, `true` and `sampled` [B, K], and a `seed`."""
        blocks, anchors = super().draw(inputs, generator), inputs["anchors"]
        for name, share in (("true", self.true_share), ("sampled", self.sampled_share)):
            drawn = torch.rand(anchors.shape, generator=generator) < share * (not self.evaluates)
            inputs[name] = drawn.to(anchors.device)
        return blocks

    def block_states(self, model: nn.Module, inputs: dict[str, Any], features: Tensor, goals: Goals) -> Tensor:
        """Return the states [B, K, d, H] of the first drafts; add `edited`, those of the edit pass, and `blocks`."""
        blocks = inputs["blocks"] = head_blocks(self.drafter, inputs)
        mask = blocks.mask
        first, edited = model(
            features=features[:, :-1],
            next_embeddings=self.next_embeddings(inputs),
            positions=blocks.positions,
            attention_mask=mask,
            edits=Edits(mask[:, :, blocks.real :], partial(self._slots, inputs, goals)),
        )
        inputs["edited"] = blocks.drafts(edited)
        return blocks.drafts(first)

    @torch.no_grad()
    def _slots(self, inputs: dict[str, Any], goals: Goals, states: Tensor) -> Tensor:
        """Return the tokens [B, K (d - 1)] of the slots after a first pass of `states` [B, S, H]; -1 where absent."""
        ids, vocabulary, present = inputs["input_ids"], self.drafter.draft_vocabulary, inputs["anchors"] >= 0
        places, _ = places_and_labels(inputs, self.drafter.draft_length)
        truth = ids.flatten()[places[:, 1:]]
        hidden = inputs["blocks"].drafts(states)[present][:, :-1]  # [N, d - 1, H]
        # Numbers over the vocabulary are drawn on their device: one core of the host would be too slow.
        noise = torch.Generator(hidden.device).manual_seed(inputs["seed"])
        chunk = self.args.loss_chunk or max(len(hidden), 1)
        parts = (hidden, places, truth, inputs["sampled"][present])
        drafted = []
        for states, where, labels, sampled in zip(*(part.split(chunk) for part in parts), strict=True):
            logits = self.drafter.logits(states)
            columns = logits.argmax(-1)
            if bool(sampled.any()):
                known = as_columns(labels[sampled], vocabulary)
                coupled = coupled_draft(logits[sampled], goals.at(where[sampled][:, :-1]), known, noise)
                columns[sampled] = torch.where(known != NO_LABEL, coupled, columns[sampled])
            drafted.append(token_ids(columns, vocabulary))
        held = ids.new_full((*present.shape, truth.shape[1]), -1)
        held[present] = torch.where(inputs["true"][present][:, None], truth, torch.cat(drafted))
        return held.flatten(1)

    def _edited(self, drafts: Drafts) -> Drafts:
        states = drafts.inputs["edited"][drafts.inputs["anchors"] >= 0]
        # Their first token is the first draft's, and not trained again.
        return replace(drafts, hidden=torch.cat([states[:, :1].detach(), states[:, 1:]], dim=1))

    def evaluated(self, drafts: Drafts) -> list[Drafts]:
        return [drafts, self._edited(drafts)]

    def draft_loss(self, drafts: Drafts) -> Tensor:
        """Return the sum of the objective of the first drafts, and of the edit pass."""
        loss = drafts.hidden.new_zeros(()) if self.args.editor_only else super().draft_loss(drafts)
        return loss + super().draft_loss(self._edited(drafts))


def coupled_draft(
    draft_logits: Tensor,  # [n, m, V], as the target's
    target_logits: Tensor,
    labels: Tensor,  # [n, m] what the target took; where there is none, the result means nothing
    generator: torch.Generator,  # on the device of the logits
) -> Tensor:
    """Draft tokens [n, m] sampled with the noise of the target's own sampling, given which tokens that gave.

    The target takes argmax p / E, E ~ Exp(1). Given that it took y: E_y = p_y E', and every other E_v is p_v E' more
    than an Exp(1) variable, with one E' ~ Exp(1); min_v E_v / p_v = E' does not depend on y.
    """
    target = log_probabilities(target_logits).exp()
    own = torch.empty_like(target[..., :1]).exponential_(generator=generator)
    noise = torch.empty_like(target).exponential_(generator=generator)
    noise.scatter_(-1, labels.clamp(min=0)[..., None], 0.0)
    return (log_probabilities(draft_logits) - (noise + own * target).log()).argmax(-1)
