"""Linear layers with packed weights on a CPU, where a token tree then costs little more than one token.

MKL's float32 product of 2 to 32 rows takes up to four times as long as that of one, although both read every weight
once. oneDNN's does not if the weights lie in blocks, as its own order has them. That is a second copy of the weights,
which trees alone are run with: stock's prefill and its single steps read the plain ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_dart.models.devices import contents_of
from hf_dart.models.support import parts_of

logger = logging.get_logger(__name__)

_LEAST = 128 * 2**20  # bytes that are worth it: fewer may stay in a processor's cache, where plain ones are as fast
_ROWS = 16  # rows that oneDNN lays the blocks out for

_known: WeakKeyDictionary[PreTrainedModel, PackedWeights] = WeakKeyDictionary()


class PackedWeights(TorchFunctionMode):
    """Context in which this thread's products with some weights [out, in] read packed copies of them.

    A weight that was written to or moved since it was packed is read as it is.
    """

    def __init__(self, state: list[tuple[int, ...]]) -> None:  # of the weights, by their contents
        super().__init__()
        self.state = state
        self._packed: dict[int, tuple[Tensor, tuple[int, ...], Tensor]] = {}

    @property
    def ready(self) -> bool:
        """True once there are copies."""
        return bool(self._packed)

    def pack(self, weights: list[Tensor]) -> None:
        """Make the copies."""
        reorder = torch.ops.mkldnn._reorder_linear_weight
        made = (reorder(weight.detach(), _ROWS) for weight in weights)
        self._packed = {
            id(weight): (weight, state[:2], copy) for weight, state, copy in zip(weights, self.state, made, strict=True)
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take a product with a packed weight; all else is PyTorch's."""
        if func is F.linear and len(args) > 1 and not torch.compiler.is_compiling():
            weight, state, copy = self._packed.get(id(args[1]), (None, None, None))
            if weight is not None and state == (weight.data_ptr(), weight._version) and args[0].dtype == weight.dtype:
                bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
                return torch.ops.mkldnn._linear_pointwise(args[0], copy, bias, "none", [], "")
        return func(*args, **(kwargs or {}))


def pack(target: PreTrainedModel) -> None:
    """Pack a target's weights where that pays; those that have changed, once two calls have seen them as they are.

    A target that is trained between its calls would have them packed for each one.
    """
    weights = packable(target)
    size = sum(weight.nbytes for weight in weights)
    if size < _LEAST:
        release(target)
        return
    known = _known.get(target)
    state = [] if known is None else contents_of(weights)
    if known is not None and known.state != state:
        _known[target] = PackedWeights(state)
    elif known is None or not known.ready:
        free = free_memory()
        if free is not None and size > free // 2:
            logger.warning_once(
                f"Drafts are verified with plain weights, which is slower: packed ones take {size / 2**30:.1f} GiB "
                f"more, and {free / 2**30:.1f} GiB are free."
            )
            return
        known = PackedWeights(state or contents_of(weights))
        known.pack(weights)
        _known[target] = known


def release(target: PreTrainedModel) -> None:
    """Free the packed weights of a target."""
    _known.pop(target, None)


def release_changed(target: PreTrainedModel) -> None:
    """Free the packed weights of a target whose weights have changed since."""
    known = _known.get(target)
    if known is not None and known.state != contents_of(packable(target)):
        release(target)


def packed_weights(target: PreTrainedModel) -> AbstractContextManager[Any]:
    """Return the context in which a forward of this target reads packed weights, if there are any."""
    known = _known.get(target)
    return nullcontext() if known is None or torch.is_autocast_enabled("cpu") else known


def packable(target: PreTrainedModel) -> list[Tensor]:
    """Return the weights that can be packed, for which modules are looked through where there may be any."""
    possible = target.dtype == torch.float32 and target.device.type == "cpu"
    if not possible or not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
        return []
    linear = (part.weight for part in parts_of(target) if isinstance(part, nn.Linear))
    plain = (one for one in linear if type(one) is nn.Parameter and one.dtype == torch.float32 and one.is_cpu)
    # LoRA's are not worth it.
    return list({id(one): one for one in plain if not one.is_inference() and min(one.shape) > _ROWS}.values())


def free_memory() -> int | None:
    """Return the bytes that may be taken without swapping, where Linux tells."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except OSError:
        return None
