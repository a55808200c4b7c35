"""Stock prefill, read by the drafter chunk by chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_dart.devices import users_default
from hf_dart.features import features_request, gather_features
from hf_dart.generation.stock_steps import next_inputs, position_shift
from hf_dart.proposal import Drafter

# Positions that a drafter takes in at once: its masks grow with them, times all positions before.
_AT_ONCE = 2048


class PromptFeed:
    """Hands prompt positions to the drafter, each with the token behind it.

    The last position has no such token yet: its features wait in `last` for the first generated token.

    Args:
        prompt: the ids [B, T] or embeddings [B, T, E] that prefill runs over (a cached prefix left out).
        pads: left padding of each row within them.
    """

    def __init__(self, drafter: Drafter[Any], state: Any, prompt: Tensor, pads: list[int]) -> None:
        self._drafter, self._state = drafter, state
        self._prompt = prompt
        self._pads = torch.tensor(pads)
        self._next = 0  # slot of the first position that was not handed on
        self.last: Tensor | None = None  # [B, 1, F]

    def __call__(self, features: Tensor) -> None:
        """Take in the features [B, C, F] of the next C slots.

        Raises:
            ValueError: more slots than the prompt has.
        """
        if self._next + (self.last is not None) + features.shape[1] > self._prompt.shape[1]:
            raise ValueError(
                "generate runs over more positions than the prompt has, as it does with input_ids, inputs_embeds and "
                "prefill_chunk_size together; leave one of them out, or leave assistant= out."
            )
        if self.last is not None:
            features = torch.cat([self.last.to(features.device), features], dim=1)
        self.last = features[:, -1:]
        ready = features.shape[1] - 1
        if ready == 0:
            return
        slots = slice(self._next + 1, self._next + 1 + ready)
        # Rows begin behind their padding; no entry is left over where the longest of them has none.
        skipped = (self._pads - self._next).clamp(0, ready)
        counts = ready - skipped
        entries = (torch.arange(int(counts.max())) + skipped[:, None]).clamp(max=ready - 1)
        next_tokens = self._prompt[:, slots]
        for first in range(0, entries.shape[1], _AT_ONCE):
            piece = entries[:, first : first + _AT_ONCE]
            taken = (counts - first).clamp(0, piece.shape[1])
            self._drafter.extend(self._state, _taken(features, piece), _taken(next_tokens, piece), taken)
        self._next += ready


def _taken(states: Tensor, entries: Tensor) -> Tensor:
    """Of `states` [B, T, ...], the entries [B, A] of each row."""
    rows = torch.arange(len(entries), device=states.device)[:, None]
    return states[rows, entries.to(states.device)]


class PrefillRecorder:
    """Stands in for the target during stock `_prefill` and hands on the features of every chunk.

    `_prefill` returns the last chunk's outputs only, and hooks on the target would be state that concurrent
    calls see; this proxy is neither.

    Attributes:
        width: how many positions the last chunk had.
        shift: `position_shift` of stock's first step behind the prompt.
    """

    def __init__(self, target: Any, feed: PromptFeed, feature_layers: list[int]) -> None:
        self._target = target
        self._feed = feed
        self._feature_layers = feature_layers
        self.width = 0
        self.shift: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, **inputs: Any) -> Any:
        if not inputs.get("output_hidden_states"):
            inputs.update(features_request(self._feature_layers))
        with users_default():
            outputs = self._target(**inputs)
        ran = inputs["inputs_embeds"][..., 0] if inputs.get("input_ids") is None else inputs["input_ids"]
        self.width = ran.shape[1]
        self._feed(gather_features(outputs, self._feature_layers, ran))
        return outputs

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """Asked by `_prefill` before it runs chunks; a compiled forward would pass this recorder by."""
        return False

    def prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], pads: list[int], total: int
    ) -> Any:
        """Stock prefill (prefix reuse, chunks) with this recorder in the model's place; its outputs.

        Args:
            pads: left padding of each row.
            total: slots of prompt and cached prefix.

        Raises:
            ValueError: stock's next step has positions that rounds cannot follow.
        """
        outputs = type(self._target)._prefill(self, input_ids, generation_config, model_kwargs)
        grown = torch.cat([input_ids, input_ids.new_zeros(len(input_ids), 1)], dim=1)  # by a token, whichever
        inputs, _ = next_inputs(self._target, grown, outputs, model_kwargs)
        self.shift = position_shift(self._target, inputs.get("position_ids"), pads, total)
        return outputs
