"""`DartTrainer`: all blocks of a batch drafted by one pass of a DART head, or its selector on the frozen head."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.drafters.dart.drafter import DartHead
from hf_dart.training.objective.drafting import head_states
from hf_dart.training.objective.losses import annealed_kl
from hf_dart.training.trainers.arguments import DartTrainingArguments, HeadArguments, LoraArguments
from hf_dart.training.trainers.drafts import Drafts, Goals
from hf_dart.training.trainers.trainer import DrafterTrainer
from hf_dart.trees.vocabulary import token_ids

_CANDIDATES = 32  # tokens per depth that a selector learns to rank
_CERTAIN = 1e4  # a logit next to which all others vanish


class DartTrainer(DrafterTrainer[DartHead]):
    """Trainer of a [`DartHead`], which learns to draft for its target; arguments and errors as [`DrafterTrainer`]'s."""

    drafter_arguments: ClassVar[tuple[type, ...]] = (HeadArguments, LoraArguments)
    drafter_class = DartHead
    training_arguments = DartTrainingArguments
    takes_images = True

    def __init__(self, head: DartHead, target: PreTrainedModel, args: DartTrainingArguments, **kwargs: Any) -> None:
        self.check_drafter(head)
        if getattr(args, "selector_only", False):
            if head.selector is None:
                raise ValueError("selector_only needs a head with a selector; call head.add_selector(rank) first.")
            if head.adapted:
                raise ValueError("An adapter would be saved without the selector; merge it into its head first.")
            head.requires_grad_(False)
            head.selector.requires_grad_(True)
            if args.ddp_find_unused_parameters is None:
                args.ddp_find_unused_parameters = False  # as for an LM head of its own
        else:  # freeze what the losses do not reach
            for part in (head.selector, head.editor):
                if part is not None:
                    part.requires_grad_(False)
        super().__init__(head, target, args, **kwargs)
        if self.is_fsdp_enabled and args.selector_only:
            # Its gradients arise outside the forward that FSDP gathers the weights for.
            raise ValueError("FSDP is for heads that learn as a whole; selectors are small, train them without fsdp.")

    def block_states(self, model: nn.Module, inputs: dict[str, Any], features: Tensor, goals: Goals) -> Tensor:
        return head_states(self.drafter, model, inputs, features, self.next_embeddings(inputs))

    def draft_loss(self, drafts: Drafts) -> Tensor:
        """Return the sum of the objective over the blocks, or that of the selector alone."""
        return self._selector_loss(drafts) if self.args.selector_only else super().draft_loss(drafts)

    def _selector_loss(self, drafts: Drafts) -> Tensor:
        """Annealed KL among the head's best candidates, each after the token that really came before it.

        In a share of the blocks these are the best with the noise that sampling would draw, and the goal is the one
        that the target would take of them with that noise.
        """
        head, hidden = self.drafter, drafts.hidden
        assert head.selector is not None
        if not len(hidden):  # with zero gradients, as other processes wait for them
            return sum((weight.sum() * 0.0 for weight in head.selector.parameters()), hidden.new_zeros(()))
        generator = torch.Generator(hidden.device).manual_seed(drafts.inputs["seed"])
        parts: list[tuple[Tensor, ...]] = []
        with torch.no_grad():
            for part in drafts.split(self.args.loss_chunk):
                logits = head.logits(part.hidden)
                noisy = torch.rand(len(logits), 1, 1, device=logits.device, generator=generator)
                noisy = noisy < self.args.selector_noise
                gumbel = torch.zeros_like(logits, dtype=torch.float32)
                if noisy.any():
                    gumbel = torch.where(noisy, -gumbel.exponential_(generator=generator).log(), 0.0)
                best = (logits + gumbel).topk(min(_CANDIDATES, logits.shape[-1]))
                candidates = token_ids(best.indices, head.draft_vocabulary)
                goals = part.goals.at(part.places).gather(-1, best.indices) + gumbel.gather(-1, best.indices)
                taken = goals == goals.amax(-1, keepdim=True)
                goals = torch.where(noisy, torch.where(taken, _CERTAIN, 0.0), goals)
                parts.append((logits.gather(-1, best.indices), best.values, candidates, goals))
        own, ranked, candidates, wanted = (torch.cat(each) for each in zip(*parts, strict=True))
        before = drafts.inputs["input_ids"].flatten()[drafts.places]
        # A token is projected once, however often it occurs.
        tokens, places = torch.cat([before[..., None], candidates], dim=-1).unique(return_inverse=True)
        delta = head.selector(hidden, own, head.embed(tokens), places[..., :1], places[..., 1:])
        return annealed_kl(ranked + delta[..., 0, :], wanted, self.args.objective.gamma).sum()
