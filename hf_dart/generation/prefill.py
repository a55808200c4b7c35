"""Stock prefill, read by the drafter chunk by chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_dart.features import features_request, gather_features
from hf_dart.proposal import Drafter


class PromptFeed:
    """Hands prompt positions to the drafter, each with the token behind it.

    The last position has no such token yet: its features wait in `last` for the first generated token.

    Args:
        tokens: [B, T] the prompt tokens that prefill runs over (a cached prefix left out).
        pads: left padding of each row within them.
    """

    def __init__(self, drafter: Drafter[Any], state: Any, tokens: Tensor, pads: list[int]) -> None:
        self._drafter, self._state = drafter, state
        self._tokens = tokens
        self._pads = torch.tensor(pads)
        self._next = 0  # slot of the first position that was not handed on
        self.last: Tensor | None = None  # [B, 1, F]

    def __call__(self, features: Tensor) -> None:
        """Take in the features [B, C, F] of the next C slots."""
        if self.last is not None:
            features = torch.cat([self.last.to(features.device), features], dim=1)
        self.last = features[:, -1:]
        ready = features.shape[1] - 1
        if ready == 0:
            return
        slots = slice(self._next + 1, self._next + 1 + ready)
        # Rows begin behind their padding.
        skipped = (self._pads - self._next).clamp(0, ready)
        entries = (torch.arange(ready) + skipped[:, None]).clamp(max=ready - 1)
        self._drafter.extend(
            self._state,
            features.gather(1, entries.to(features.device)[..., None].expand(-1, -1, features.shape[-1])),
            self._tokens[:, slots].gather(1, entries.to(self._tokens.device)),
            ready - skipped,
        )
        self._next += ready


class PrefillRecorder:
    """Stands in for the target during stock `_prefill` and hands on the features of every chunk.

    `_prefill` returns the last chunk's outputs only, and hooks on the target would be state that concurrent
    calls see; this proxy is neither.
    """

    def __init__(self, target: Any, feed: PromptFeed, feature_layers: list[int]) -> None:
        self._target = target
        self._feed = feed
        self._feature_layers = feature_layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, **inputs: Any) -> Any:
        outputs = self._target(**inputs, **features_request(self._feature_layers))
        self._feed(gather_features(outputs, self._feature_layers, inputs["input_ids"]))
        return outputs

    def prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
        """Stock prefill (prefix reuse, chunks) with this recorder in the model's place; its outputs."""
        return type(self._target)._prefill(self, input_ids, generation_config, model_kwargs)
