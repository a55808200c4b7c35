"""The frozen target as the teacher of a drafter: its features of a batch, and its logits where drafts learn from them.

No tensor of all tokens over the whole vocabulary is made. The LM head is run on the tokens that blocks of drafts come
after, on the rows of its weight that a draft vocabulary has. Where all tokens count, as in evaluations, a few rows of
the batch at a time go through the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.drafters.trained import TrainedDrafter
from hf_dart.models.attention import for_trees
from hf_dart.models.devices import device_of, has_rows
from hf_dart.models.features import lm_head_of, vocabulary_size
from hf_dart.models.forwards import standing_in
from hf_dart.models.packed_weights import pack, packed_weights
from hf_dart.models.tolerance import same
from hf_dart.models.verify import features_request, gather_features, merged_embeddings
from hf_dart.training.objective.blocks import document_positions
from hf_dart.training.trainers.drafts import Goals, as_columns

# Logits of whole distributions that are held at a time, as far as one row of the batch allows: 256 MiB in float32.
_HELD = 2**26
_AT_ONCE = 16  # whole distributions whose log-sums are taken at a time


class Teacher:
    """A target in evaluation mode, whose weights stay as they are, and the drafter that learns from it."""

    def __init__(self, target: PreTrainedModel, drafter: TrainedDrafter) -> None:
        self.target, self.drafter = target.eval(), drafter
        self._packing_checked = False
        self._picks: dict[bool, bool] = {}

    @torch.no_grad()
    def text(
        self,
        ids: Tensor,  # [B, T], as `documents`
        documents: Tensor,
        places: Tensor,  # [U] of `Goals`
        everything: bool,  # also say what the tokens outside of the draft vocabulary have
    ) -> tuple[Tensor, Goals]:
        """Features [B, T, F] of packed rows of text, and the target's distributions after some tokens.

        Padding comes after the documents, where causal attention does not look: it needs no mask. Documents of one row
        are kept apart by positions that begin again at 0, which transformers turns into the mask of every kind of
        layer; targets that do not keep them apart are refused.
        """
        packed = bool((documents > 0).any())
        if packed and not self._packing_checked:
            self._check_packing(ids.device)
        pack(self.target)
        size, length = len(ids), ids.shape[1]
        if len(places) and (everything or self._columns() is None):
            most = int((places // length).bincount().max())
            size = max(1, _HELD // (most * self.drafter.config.vocab_size))
        features, goals = [], []
        for begin in range(0, len(ids), size):
            part = slice(begin, begin + size)
            own = places[(begin * length <= places) & (places < (begin + size) * length)]
            inputs = {"position_ids": document_positions(documents[part])} if packed else {}
            with for_trees(self.target) if packed else nullcontext(), standing_in(packed_weights(self.target)):
                output, logits = self._forward(ids[part], own - begin * length, everything, inputs)
            features.append(self._features_of(output, ids[part]))
            goals.append(self._goals(own, logits, everything))
        return torch.cat(features), Goals.joined(goals)

    @torch.no_grad()
    def images(
        self, ids: Tensor, beside: dict[str, Tensor], places: Tensor, everything: bool
    ) -> tuple[Tensor, Goals, Tensor]:
        """Features [B, T, F] and distributions of rows of one document each, with images or sounds (`collate`).

        And what the drafter reads of each token: the embeddings [B, T, E] with those of images in their places where
        it reads as the target does, else ids [B, T].
        """
        dtype = self.target.dtype
        seen = {name: value.to(dtype) if value.is_floating_point() else value for name, value in beside.items()}
        output, logits = self._forward(ids, places, everything, {**seen, "output_hidden_states": True})
        read = merged_embeddings(self.target, output, ids) if self.drafter.reads_embeddings else None
        if read is None:  # ids of images may have no embedding
            read = torch.where(ids < vocabulary_size(self.target), ids, 0)
        return self._features_of(output, ids), self._goals(places, logits, everything), read

    def _forward(self, ids: Tensor, places: Tensor, everything: bool, inputs: dict[str, Any]) -> tuple[Any, Tensor]:
        """Run the target: its output, and the logits [U, V] after the tokens at `places`, or [U, M]."""
        given = {"use_cache": False, **features_request(self.drafter.feature_layers), **inputs}
        vocabulary = None if everything else self.drafter.draft_vocabulary
        columns = None if everything else self._columns()
        if columns is None and not self._picks_rightly(None):
            output = self.target(input_ids=ids, **given)
            logits = output.logits.flatten(0, 1)[places.to(output.logits.device)]
        else:
            with self._picked(places, columns):
                output = self.target(input_ids=ids, **given)
            logits = output.logits[0]
        if vocabulary is not None and columns is None:
            logits = logits[:, vocabulary.to(logits.device)]
        return output, logits.to(self.drafter.device)

    def _columns(self) -> Tensor | None:
        """Return the draft vocabulary if the target's LM head can score it alone."""
        vocabulary = self.drafter.draft_vocabulary
        can = vocabulary is not None and has_rows(lm_head_of(self.target)) and self._picks_rightly(vocabulary)
        return vocabulary if can else None

    @contextmanager
    def _picked(self, places: Tensor, vocabulary: Tensor | None) -> Iterator[None]:
        """Let the LM head score the tokens at `places` [U] alone, [1, U, V]; of a draft vocabulary, [1, U, M].

        What the target does to logits after its LM head, such as softcapping, is done to these.
        """
        lm_head = lm_head_of(self.target)
        picked: list[Tensor] = []

        def pick(module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            picked.append(given[0].flatten(0, -2)[places.to(given[0].device)][None])
            return (picked[-1] if vocabulary is None else given[0][..., :0, :], *given[1:])

        def score(module: Any, given: Any, nothing: Tensor) -> Tensor:
            assert vocabulary is not None
            return self.drafter.head_rows(module, picked.pop(), vocabulary)

        scored = nullcontext() if vocabulary is None else lm_head.register_forward_hook(score)
        with lm_head.register_forward_pre_hook(pick), scored:
            yield

    def _picks_rightly(self, vocabulary: Tensor | None) -> bool:
        """Return True if the logits of picked tokens are those among all; tried once, on eight tokens."""
        kind = vocabulary is not None
        if kind not in self._picks:
            device = device_of(self.target.get_input_embeddings())
            ids, places = torch.arange(8, device=device).view(2, 4), torch.tensor([1, 2, 6], device=device)
            try:
                wanted = self.target(input_ids=ids, use_cache=False).logits.flatten(0, 1)[places]
                wanted = wanted if vocabulary is None else wanted[:, vocabulary.to(wanted.device)]
                with self._picked(places, vocabulary):
                    found = self.target(input_ids=ids, use_cache=False).logits
                self._picks[kind] = found.shape == (1, *wanted.shape) and same(found[0], wanted)
            # What looks for a token of its own among the columns, or takes no text alone.
            except (RuntimeError, IndexError, TypeError, ValueError):
                self._picks[kind] = False
        return self._picks[kind]

    def _goals(self, places: Tensor, logits: Tensor, everything: bool) -> Goals:
        """Make goals of logits [U, M], or [U, V] where `everything` is asked for, which are written to."""
        vocabulary = self.drafter.draft_vocabulary
        if not everything:
            return Goals(places, logits)
        best = logits.argmax(-1)
        if vocabulary is None:
            return Goals(places, logits, None, best)
        own = logits[:, vocabulary]
        logits.index_fill_(-1, vocabulary, -torch.inf)
        wide = torch.promote_types(logits.dtype, torch.float32)
        # A few at a time stay in a processor's cache.
        others = torch.cat([part.to(wide).logsumexp(-1) for part in logits.split(_AT_ONCE)])
        return Goals(places, own, others, as_columns(best, vocabulary, len(vocabulary)))

    def _features_of(self, output: Any, ids: Tensor) -> Tensor:
        features = gather_features(output, self.drafter.feature_layers, ids).to(self.drafter.device)
        if not torch.is_autocast_enabled(self.drafter.device.type):
            features = features.to(self.drafter.dtype)  # a target in 16 bits and a head in float32
        return features

    def _check_packing(self, device: torch.device) -> None:
        """Change a token of a first document: the logits of a second one in the row must not notice."""
        positions = torch.arange(8, device=device).repeat(2)[None]
        ids = torch.arange(16, device=device)[None].repeat(2, 1)
        ids[1, 0] += 1
        try:
            with for_trees(self.target):
                output = self.target(input_ids=ids, position_ids=positions.expand(2, -1), use_cache=False)
            change = (output.logits[0] - output.logits[1]).abs().float()
            apart = bool(change[8:].max() <= 1e-2 * change[:8].max())
        except TypeError:  # no position_ids
            apart = False
        if not apart:
            name = type(self.target).__name__
            raise ValueError(f"{name} mixes packed documents; give each a row (packing=False, or share_rows=False).")
        self._packing_checked = True
