"""Linear layers with packed weights on a CPU, where a token tree then costs little more than one token.

MKL's float32 product of 4 to 32 rows takes up to four times as long as that of one, although both read every weight
once. oneDNN's does not if the weights lie in blocks, as its own order has them. That is a second copy of the weights,
which trees alone are run with: stock's prefill and its single steps read the plain ones. Of fewer rows, MKL's product
is the faster one on some processors, which is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import inf
from time import perf_counter
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
_ALWAYS = 4  # rows from which on packed weights are the faster ones
_TIMED, _REPEATS = 8, 2  # weights of a shape that are timed, and how often

_known: WeakKeyDictionary[PreTrainedModel, PackedWeights] = WeakKeyDictionary()


class PackedWeights(TorchFunctionMode):
    """Context in which this thread's products with some weights [out, in] read packed copies of them.

    A weight that was written to or moved since it was packed is read as it is.
    """

    def __init__(self, state: list[tuple[int, ...]]) -> None:  # of the weights, by their contents
        super().__init__()
        self.state = state
        # By the weight's id: the weight, its state, the copy, and the fewest rows for which that is read.
        self._packed: dict[int, tuple[Tensor, tuple[int, ...], Tensor, int]] = {}

    @property
    def ready(self) -> bool:
        """True once there are copies."""
        return bool(self._packed)

    def pack(self, weights: list[Tensor]) -> None:
        """Make the copies, and measure from how many rows on they are worth it."""
        copies = [torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS) for weight in weights]
        fewest: dict[torch.Size, int] = {}
        for shape in {weight.shape for weight in weights}:
            alike = [number for number, weight in enumerate(weights) if weight.shape == shape][:_TIMED]
            fewest[shape] = fewest_rows([weights[number] for number in alike], [copies[number] for number in alike])
        self._packed = {
            id(weight): (weight, state[:2], copy, fewest[weight.shape])
            for weight, state, copy in zip(weights, self.state, copies, strict=True)
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take a product with a packed weight; all else is PyTorch's."""
        if func is F.linear and len(args) > 1 and not torch.compiler.is_compiling():
            entries, known = args[0], self._packed.get(id(args[1]))
            if known is not None and entries.numel() >= known[3] * entries.shape[-1]:
                weight, state, copy, _ = known
                if state == (weight.data_ptr(), weight._version) and entries.dtype == weight.dtype:
                    return packed_linear(entries, copy, args[2] if len(args) > 2 else (kwargs or {}).get("bias"))
        return func(*args, **(kwargs or {}))


def packed_linear(entries: Tensor, copy: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of a packed weight."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(entries, copy, bias, "none", [], "")
    return product


@torch.no_grad()
def fewest_rows(weights: list[Tensor], copies: list[Tensor]) -> int:
    """Measure from how many rows on, 4 at most, products with packed copies of weights of one shape are faster."""
    for rows in range(1, _ALWAYS):
        entries = torch.zeros(rows, weights[0].shape[1])
        plain = packed = inf
        for _ in range(_REPEATS):
            plain = min(plain, seconds(F.linear, entries, weights))
            packed = min(packed, seconds(packed_linear, entries, copies))
        if packed <= plain:
            return rows
    return _ALWAYS


def seconds(product: Callable[[Tensor, Tensor], Tensor], entries: Tensor, weights: list[Tensor]) -> float:
    """Time of the products of some entries with each of the weights."""
    start = perf_counter()
    for weight in weights:
        product(entries, weight)
    return perf_counter() - start


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
