"""The verifier of captured rounds: masks are made once for all layers of a kind.

Each tier's cache is no longer than the text needs, so that the cost follows the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_dart.cache.states import StatefulCache
from hf_dart.engine.cache import FixedCache
from hf_dart.models.packed import MASKS, NODES, for_groups
from hf_dart.models.running_states.tree_forward import tree_forwards
from hf_dart.models.verify import Verifier
from hf_dart.trees.tree import DraftTree


class PackedVerifier(Verifier):
    """A verifier on fixed shapes, which tells `packed_attention` what that need not find out in every layer.

    Args:
        like: of a call; its rows' shifts of positions are to be filled in (`load`).
        cache: where the committed tokens of B rows are.
        hands_down: does the target hand arguments that it does not know down to its attention?
    """

    def __init__(self, like: Verifier, cache: FixedCache, hands_down: bool) -> None:
        shift = like.shift
        if shift is not None:
            with torch.inference_mode(False):  # as all that a round reads
                size = (*shift.shape[:-1], len(cache.lengths))
                shift = torch.zeros(size, dtype=shift.dtype, device=cache.lengths.device)
        super().__init__(like.target, cache, like.kinds, like.feature_layers, shift=shift)
        self._hands_down = hands_down

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Within it the target computes as rounds do, in this thread; what runs this is inside of it."""
        with self.attention.packed(), tree_forwards(self.mixers):
            yield

    def _attending(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _states(self, tree: DraftTree) -> AbstractContextManager[None]:
        if isinstance(self.cache.cache, StatefulCache):
            self.cache.cache.states.begin(tree)
        return nullcontext()

    def load(self, like: Verifier, seats: Sequence[int]) -> None:
        """Take over the shifts of positions of a call's rows `seats` [B]."""
        if self.shift is not None and like.shift is not None:
            self.shift.copy_(like.shift[..., list(seats)])

    def extra_inputs(
        self, tree: DraftTree, positions: Tensor, masks: Tensor | dict[str, Tensor], computed: Tensor | None
    ) -> dict[str, Any]:
        if not self._hands_down:
            return {}
        heads = self.target.config.get_text_config(decoder=True).num_attention_heads
        pairs: list[tuple[Tensor, Tensor]] = []
        for kind in self.kinds:
            mask = masks[kind.name] if isinstance(masks, dict) else masks
            pairs.append((mask, for_groups(mask, heads // self.cache.cache.layers[kind.layer].keys.shape[1])))
        return {MASKS: pairs} if computed is None else {MASKS: pairs, NODES: computed}
