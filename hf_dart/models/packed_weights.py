"""Linear layers with packed weights on a CPU, where a token tree then costs little more than one token.

MKL's float32 product of 4 to 32 rows takes up to four times as long as that of one, although both read every weight
once. oneDNN's does not if the weights lie in blocks, as its own order has them. That is a second copy of the weights,
which trees and drafts alone are run with: stock's prefill and its single steps read the plain ones. Of fewer rows,
MKL's product is the faster one on some processors, and on others oneDNN's of four rows, which is measured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_dart.models.devices import contents_of
from hf_dart.models.features import lm_head_of
from hf_dart.models.forwards import StandIn, forward_before
from hf_dart.models.support import parts_of

logger = logging.get_logger(__name__)

_LEAST = 128 * 2**20  # bytes that are worth it: fewer may stay in a processor's cache, where plain ones are as fast
_ROWS = 16  # rows that oneDNN lays the blocks out for
_ALWAYS = 4  # rows from which on packed weights are the faster ones
_TIMED, _REPEATS = 8, 2  # weights of a shape that are timed, and how often
_CONTAINER = Path("/sys/fs/cgroup")  # has its memory's limit

_known: WeakKeyDictionary[PreTrainedModel, PackedWeights] = WeakKeyDictionary()


class PackedLinear(StandIn):
    """Forward of an `nn.Linear` that reads a packed copy of its weight [out, in], in threads that verify or draft.

    A weight that was replaced, written to or moved since it was packed is read as it is. So are all under autocast, for
    fewer rows than `fewest`, and of a module whose instance has a forward of its own, such as a hook of Accelerate's.
    Other rows are filled up to as many as `filled`.
    """

    module: nn.Linear

    def __init__(self, module: nn.Linear, copy: Tensor, fewest: int, filled: int) -> None:
        super().__init__(module)
        self.weight, self.copy, self.fewest, self.filled = module.weight, copy, fewest, filled
        self.state = module.weight.data_ptr(), module.weight._version

    def __call__(self, input: Tensor) -> Tensor:
        """Compute what `nn.Linear.forward` does."""
        if torch.compiler.is_compiling() or threading.get_ident() not in self.users or self.before is not None:
            return self._forward(input)
        rows, weight = input.numel() // input.shape[-1], self.weight
        replaced = self.module._parameters.get("weight") is not weight
        changed = replaced or (weight.data_ptr(), weight._version) != self.state
        if rows < self.fewest or changed or torch.is_autocast_enabled("cpu"):
            return self._forward(input)
        if rows >= self.filled:
            return packed_linear(input, self.copy, self.module.bias)
        entries = F.pad(input.reshape(rows, -1), (0, 0, 0, self.filled - rows))
        return packed_linear(entries, self.copy, self.module.bias)[:rows].view(*input.shape[:-1], -1)


@dataclass
class PackedWeights:
    """What is known of a model's weights: their state, and the forwards that read copies, once there are any."""

    state: list[tuple[int, ...]]  # by their contents
    linear: list[PackedLinear] = field(default_factory=list)
    drafters: WeakKeyDictionary[Any, PackedWeights] = field(default_factory=WeakKeyDictionary)  # of a target's

    def pack(self, layers: list[nn.Linear]) -> None:
        """Make the copies, one for each weight, and measure from how many rows on they are worth it."""
        copies = {weight: packed_copy(weight) for weight in weights_of(layers)}
        few: dict[torch.Size, tuple[int, int]] = {}
        for shape in {weight.shape for weight in copies}:
            alike = {weight: copy for weight, copy in copies.items() if weight.shape == shape}
            few[shape] = few_rows([*alike][:_TIMED], [*alike.values()][:_TIMED])
        self.linear = [PackedLinear(layer, copies[layer.weight], *few[layer.weight.shape]) for layer in layers]


def packed_copy(weight: Tensor) -> Tensor:
    """Return a copy of a weight [out, in] for `packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)


def packed_linear(entries: Tensor, copy: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of a packed weight."""
    return torch.ops.mkldnn._linear_pointwise.default(entries, copy, bias, "none", [], "")


@torch.no_grad()
def few_rows(weights: list[Tensor], copies: list[Tensor]) -> tuple[int, int]:
    """Measure from how many rows on, 4 at most, products with packed copies of weights of one shape are faster.

    The number that fewer rows are filled up to is returned, too: four take less time than one on some processors.
    """
    full = weights[0].new_zeros(_ALWAYS, weights[0].shape[1])

    def least(product: Callable[[Tensor, Tensor], Tensor], rows: int, given: list[Tensor]) -> float:
        return min(seconds(product, full[:rows], given) for _ in range(_REPEATS))

    whole = least(packed_linear, _ALWAYS, copies)
    for rows in range(1, _ALWAYS):
        plain, packed = least(F.linear, rows, weights), least(packed_linear, rows, copies)
        if min(packed, whole) <= plain:
            return rows, _ALWAYS if whole < packed else rows
    return _ALWAYS, _ALWAYS


def seconds(product: Callable[[Tensor, Tensor], Tensor], entries: Tensor, weights: list[Tensor]) -> float:
    """Time of the products of some entries with each of the weights."""
    start = perf_counter()
    for weight in weights:
        product(entries, weight)
    return perf_counter() - start


def pack(target: PreTrainedModel, drafter: Any = None) -> None:
    """Pack the weights of a target where that pays, and then those of its drafter, of any size.

    Those that have changed are packed once two calls have seen them as they are: of a model that is trained between its
    calls they would be packed for each one.
    """
    if torch.is_autocast_enabled("cpu"):  # nothing would read them
        return
    pack_layers(_known, target, packable(target), _LEAST)
    known = _known.get(target)
    if known is not None and known.linear and isinstance(drafter, PreTrainedModel):
        pack_layers(known.drafters, drafter, packable(drafter, *drafter.rows_read), 1)


def pack_layers(kept: MutableMapping[Any, PackedWeights], model: Any, layers: list[nn.Linear], least: int) -> None:
    """Pack the weights of a model's layers, if of so many bytes at least, and keep what is known of them."""
    weights = weights_of(layers)
    size = sum(weight.nbytes for weight in weights)
    if size < least:
        kept.pop(model, None)
        return
    known = kept.get(model)
    state = [] if known is None else contents_of(weights)
    if known is not None and known.state != state:
        kept[model] = PackedWeights(state)
    elif known is None or not known.linear:
        free = free_memory()
        if free is not None and size > free // 2:
            logger.warning_once(
                f"Trees and drafts are run with plain weights, which is slower: packed ones take "
                f"{size / 2**30:.1f} GiB more, and {free / 2**30:.1f} GiB are free."
            )
            return
        known = PackedWeights(state or contents_of(weights))
        known.pack(layers)
        kept[model] = known


def release(target: PreTrainedModel) -> None:
    """Free the packed weights of a target."""
    _known.pop(target, None)


def release_changed(target: PreTrainedModel) -> None:
    """Free the packed weights of a target whose weights have changed since."""
    known = _known.get(target)
    if known is not None and known.state != contents_of(weights_of(packable(target))):
        release(target)


def packed_weights(target: PreTrainedModel) -> Sequence[PackedLinear]:
    """Return the forwards, for `standing_in`, by which this target reads packed weights; none if there are none."""
    known = _known.get(target)
    return () if known is None or torch.is_autocast_enabled("cpu") else known.linear


def packed_drafts(target: PreTrainedModel, drafter: Any) -> Sequence[PackedLinear]:
    """Return the forwards by which drafts read packed weights: the drafter's, and that of the target's LM head."""
    found = packed_weights(target)
    own = _known[target].drafters.get(drafter) if found else None
    lm_head = lm_head_of(target)
    return [*(one for one in found if one.module is lm_head), *([] if own is None else own.linear)]


def packable(model: PreTrainedModel, *further: nn.Module) -> list[nn.Linear]:
    """Return the linear layers of a model on a CPU, and of further modules, whose weights can be packed."""
    if model.device.type != "cpu" or not packs(model.dtype):
        return []
    towers = (tower for kind in ("image", "audio") if (tower := model.get_encoder(kind)) is not model)
    aside = {part for tower in towers for part in parts_of(tower)}  # which trees do not go through
    parts = [part for part in dict.fromkeys([*parts_of(model), *further]) if part not in aside]
    dtype = model.dtype
    if any(vars(part).get("merged_adapters") and part.disable_adapters for part in parts):
        return []  # the next forward takes PEFT's adapter out of them
    linear = [part for part in parts if isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward]
    linear = [layer for layer in linear if forward_before(layer) is None]  # it would not be read
    # LoRA's are not worth it.
    return [layer for layer in linear if is_plain(layer.weight, dtype) and min(layer.weight.shape) > _ROWS]


def packs(dtype: torch.dtype) -> bool:
    """Tell whether oneDNN multiplies with packed weights of a dtype, on this processor."""
    if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
        return False
    narrow = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(narrow) or dtype == torch.float32


def is_plain(weight: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether a weight is a parameter in this dtype on the CPU whose changes are counted."""
    kept = type(weight) is nn.Parameter and not weight.is_inference()
    return kept and weight.dtype == dtype and weight.is_cpu


def weights_of(layers: list[nn.Linear]) -> list[Tensor]:
    """Return the weights of some layers, each once."""
    return list(dict.fromkeys(layer.weight for layer in layers))


def free_memory() -> int | None:
    """Return the bytes that may be taken without swapping, within the limit of a container, where Linux tells."""
    free: int | None = None
    with suppress(OSError, ValueError):  # there may be no limit, or "max"
        free = 1024 * int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0])
        limit, held, parts = ((_CONTAINER / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
        free = min(free, int(limit) - int(held) + int(parts.split("inactive_file ")[1].split()[0]))
    return free
