"""`Student`: the weights that a head had and those that it learns, the steps of learning, and how the two compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hf_dart.drafters.dart.drafter import DartHead
from hf_dart.drafters.eagle.drafter import EagleDrafter
from hf_dart.learning.ring import Segment
from hf_dart.models.devices import contents_of, where_it_runs
from hf_dart.training.muon import MUON, matrix_names
from hf_dart.training.objective.blocks import draw_anchors
from hf_dart.training.objective.chunks import chunked
from hf_dart.training.objective.drafting import eagle_states, head_states
from hf_dart.training.objective.losses import coupled_chain
from hf_dart.training.objective.objective import PRESETS
from hf_dart.training.trainers.drafts import as_columns, places_and_labels

PASSES: dict[type, Callable[..., Tensor]] = {DartHead: head_states, EagleDrafter: eagle_states}
"""The training pass of each kind of drafter that learns."""
SEGMENTS, BLOCKS = 4, 16  # texts in a step, and blocks that begin in each
_ANYWHERE = 0.5  # share of the segments in which drafts begin anywhere
_WARMUP = 10  # steps
_AVERAGED = 16  # steps over which the running mean of the weights reaches
_LOGITS = 2**23  # numbers that are held at once
_IMPOSSIBLE = -1e4  # a logit of no weight
_FIXED = ("selector", "editor")  # parts of a head that stay as they are


def trained_names(drafter: Any) -> list[str]:
    """Names of the weights that learn: matrices of the layers and of what is in front of them."""
    return [name for name in matrix_names(drafter) if name.split(".")[0] not in _FIXED]


class Student:
    """A head that learns beside the one that drafts, which changes only when it takes the weights over (`use`)."""

    def __init__(self, head: Any) -> None:
        self.head, self.names = head, trained_names(head)
        self._depth = head.tree_config.resolve_depth(head.draft_length)
        self.generator = torch.Generator().manual_seed(0)  # of all that is drawn; the global ones are not moved
        self.frozen, self.learnt = self._copied(), self._copied()
        self.left = self.contents()  # in the head
        self.begin_again()

    def _copied(self) -> Any:
        """Copy the head, without the tokens of a draft that its trees do not reach; what is not trained is shared."""
        own = {*self.names}
        tensors = [*self.head.named_parameters(), *self.head.named_buffers()]
        memo: dict[int, Any] = {id(tensor): tensor for name, tensor in tensors if name not in own}
        memo |= {id(self.head.observers): (), id(self.head.last_stats): None, id(self.head._pace_records): None}
        fixed = (getattr(self.head, name, None) for name in _FIXED)
        memo |= {id(one): one for one in (self.head.ngram, self.head.head_rows, *fixed)}
        with torch.inference_mode(False):
            copied = copy.deepcopy(self.head, memo)
        if getattr(self.head.config, "block_attention", "causal") == "causal":  # else later tokens change earlier ones
            copied.config.draft_length = self._depth
        return copied

    def _weights(self, head: Any) -> list[nn.Parameter]:
        return [head.get_parameter(name) for name in self.names]

    @torch.no_grad()
    def _copy(self, weights: Sequence[Tensor], to: Any) -> None:
        for weight, new in zip(self._weights(to), weights, strict=True):
            weight.copy_(new)
        torch.clear_autocast_cache()  # of weights as they were

    def contents(self) -> list[tuple[int, ...]]:
        """Keys of the values that the head drafts with, wherever they lie."""
        return [key[2:] for key in contents_of(self._weights(self.head))]

    def begin_again(self) -> None:
        """Learn from the weights that the head had when the learner was attached."""
        self._copy(self._weights(self.frozen), self.learnt)
        self.steps, self._optimizer = 0, cast(Any, None)

    def use(self, learnt: bool) -> None:
        """Let the head draft with what was learnt, or as it did at first, unless others have written to it."""
        if self.left == self.contents():
            self._copy(self._weights(self.learnt if learnt else self.frozen), self.head)
            self.left = self.contents()

    def step(self, segments: Sequence[Segment], rate: float) -> float:
        """Take one step of Muon (arXiv 2502.16982) on drafts of some segments; return their mean loss, in nats.

        In half of the segments they are those that rounds began with, if there are enough: after drafts that had
        failed, they are harder than others (as in Draft-OPD, arXiv 2605.29343). What is learnt is a running mean of the
        weights that steps lead to. Nothing is learnt if the loss is not finite.
        """
        weights, batch = self._weights(self.learnt), self._batch(segments)
        if self._optimizer is None:
            # Steps are too small for 16 bits.
            self._masters = [one.detach().to(torch.promote_types(one.dtype, torch.float32)).clone() for one in weights]
            self._means = [one.clone() for one in self._masters]
            self._optimizer = torch.optim.Muon(self._masters, weight_decay=0.0, **MUON)
        drafted = batch["drafted"]
        anywhere = (torch.rand(len(segments), 1, generator=self.generator) < _ANYWHERE).to(drafted.device)
        anywhere |= drafted.sum(1, keepdim=True) < BLOCKS // 2  # drafts had paused
        wanted = batch["loss_mask"] & (drafted | anywhere)
        batch["anchors"] = draw_anchors(batch["documents"], BLOCKS, self.head.draft_length, self.generator, wanted)
        self._copy(self._masters, self.learnt)
        with torch.enable_grad(), torch.autocast(self.head.device.type, enabled=False):
            hidden, goals, labels = self._drafts(self.learnt, batch)
            loss = chunked(self._losses, hidden, *goals, labels, chunk_size=self._at_once(hidden)) / max(len(hidden), 1)
            if not torch.isfinite(loss):
                return float(loss.detach())
            gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        with torch.no_grad():
            for master, gradient in zip(self._masters, gradients, strict=True):
                master.grad = None if gradient is None else gradient.to(master)
            nn.utils.clip_grad_norm_(self._masters, 1.0)
            self.steps += 1
            for group in self._optimizer.param_groups:
                group["lr"] = rate * min(1.0, self.steps / _WARMUP)
            self._optimizer.step()
            self._optimizer.zero_grad()
            reach = min((self.steps + 7) / 8, _AVERAGED)  # at first they change much
            for mean, master in zip(self._means, self._masters, strict=True):
                mean.lerp_(master, 1 / reach)
        self._copy(self._means, self.learnt)
        return float(loss.detach())

    def _at_once(self, hidden: Tensor) -> int:
        """Return how many blocks with states [N, d, H] have their logits computed at once."""
        return max(1, _LOGITS // (self.head.config.vocab_size * max(hidden.shape[1], 1)))

    def _losses(self, hidden: Tensor, *goals: Tensor) -> Tensor:
        """Losses [n] of blocks with states [n, d, H]."""
        return PRESETS["dart"](self.learnt.logits(hidden), self._target_logits(*goals[:-1]), goals[-1])

    def _target_logits(self, states: Tensor, best: Tensor | None = None) -> Tensor:
        """Return the target's logits [n, d, M], by its last hidden states [n, d, H] or the best k of them [n, d, k]."""
        head = self.head
        with torch.no_grad():
            if best is not None:
                blank = states.new_full((*states.shape[:-1], head.config.vocab_size), _IMPOSSIBLE)
                logits = blank.scatter(-1, best, states)
            elif head.lm_head is None:  # drafts are read by the target's
                return head.logits(states)
            else:
                logits = where_it_runs(head.shared.lm_head, states)
        return logits if head.draft_vocabulary is None else logits[..., head.draft_vocabulary]

    @torch.no_grad()
    def expected(self, segments: Sequence[Segment], stride: int, heads: Sequence[Any]) -> Tensor:
        """Draft tokens that are accepted on average, [heads, n] of blocks at every `stride`-th position.

        Draft and target take their tokens with one noise, as in decoding, at the temperature of the text.
        """
        found = []
        for segment in segments:
            batch = self._batch([segment])
            # All tokens that could be drafted there are known.
            starts = range(max(segment.prompt - 1, 0), len(segment) - self.head.draft_length - 1, stride)
            if not starts:
                continue
            batch["anchors"] = torch.tensor([starts], device=self.head.device)
            found.append(torch.stack([self._accepted(head, batch, segment.temperature) for head in heads]))
        return torch.cat(found, dim=1) if found else torch.zeros(len(heads), 0)

    def _accepted(self, head: Any, batch: dict[str, Any], temperature: float) -> Tensor:
        hidden, goals, labels = self._drafts(head, batch)
        accepted = []
        parts = (one.split(self._at_once(hidden)) for one in (hidden, labels, *goals))
        for part, own, *given in zip(*parts, strict=True):
            drafted, targets = head.logits(part), self._target_logits(*given)
            if temperature:
                accepted.append(coupled_chain(drafted / temperature, targets / temperature, own).exp().sum(-1))
            else:
                accepted.append((drafted.argmax(-1) == own).cummin(-1).values.sum(-1))
        return torch.cat(accepted).float().cpu()

    def _batch(self, segments: Sequence[Segment]) -> dict[str, Any]:
        """Rows [B, T] of segments: features, ids, goals and so on of all positions; `drafted` is where drafts began."""

        def stacked(parts: Sequence[Any], fill: int = 0) -> Tensor:
            return pad_sequence([*parts], batch_first=True, padding_value=fill).to(self.head.device)

        # Position i reads the token after it; the first token itself is never read.
        ids = [one.next_tokens.roll(1) for one in segments]
        known = [torch.arange(len(one)) > (one.prompt if one.best else 0) for one in segments]
        return {
            "features": stacked([one.features for one in segments]).to(self.head.dtype),
            "input_ids": stacked(ids),
            "documents": stacked([torch.zeros_like(one) for one in ids], fill=-1),
            "loss_mask": stacked(known),
            "drafted": nn.functional.pad(stacked([one.begun for one in segments]), (2, 0))[:, :-2],
            "goals": [stacked(part) for part in zip(*(one.best or (one.features,) for one in segments), strict=True)],
        }

    def _drafts(self, head: Any, batch: dict[str, Any]) -> tuple[Tensor, list[Tensor], Tensor]:
        """States [N, d, H] of a batch's blocks, what `_target_logits` takes [N, d, ...], and labels [N, d].

        Of the d tokens of a draft only those that its trees reach.
        """
        ids, anchors = batch["input_ids"], batch["anchors"]
        passed = next(run for kind, run in PASSES.items() if isinstance(head, kind))
        with torch.no_grad():
            embeddings = head.embed(ids[:, 1:])
        hidden = passed(head, head, batch, batch["features"], embeddings)[anchors >= 0][:, : self._depth]
        places, labels = places_and_labels(batch, self._depth)
        goals = [goal.flatten(0, 1)[places] for goal in batch["goals"]]
        if len(goals) == 1:  # the last of the layers
            goals[0] = goals[0][..., -(goals[0].shape[-1] // len(head.feature_layers)) :]
        return hidden, goals, as_columns(labels, self.head.draft_vocabulary)
