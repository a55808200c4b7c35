"""`SlotDrafter`: a drafter whose own network attends to what is verified, over a `SlotCache`."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.cache.slots import SlotSpec
from hf_dart.drafters.base import Drafter
from hf_dart.drafters.proposal import Verified


class SlotDrafter(Drafter[SlotCache]):
    """A drafter that keeps its keys and values in a `SlotCache`, and can go on with that of an earlier call."""

    @property
    @abstractmethod
    def slot_spec(self) -> SlotSpec:
        """Heads, width, dtype and device of the buffers of keys and values that `begin` makes."""

    def resume(self, state: SlotCache, pending: list[Verified], lengths: Tensor) -> bool:
        spec = self.slot_spec
        if not state.writable(spec.device, spec.dtype):
            return False
        for verified in pending:
            self.extend(state, *verified)
        return state.cut(lengths)
