"""Attention of targets: by what the user chose, and to trees by what takes a tree's mask.

FlashAttention, and most kernels of the Hub, know causal and windowed attention alone, and FlexAttention wants masks of
another kind. Trees are verified by SDPA there, and what stock would run too (the prompt, a step without a draft) by the
user's kernel. Targets look functions up in transformers' registry, by the name in their config, in every call: once a
tree was verified, a function stands there that calls the user's kernel for all threads but those that verify a tree.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from hf_dart.models.support import parts_of


def attention_of(target: PreTrainedModel) -> str:
    """Return the attention implementation that `target` was set to, "sdpa" for example."""
    return target.config.get_text_config(decoder=True)._attn_implementation


class TreeAttention:
    """The attention that verifies the trees of a target: eager and SDPA themselves, SDPA in the place of others.

    Targets of which a class that the text goes through has no SDPA (attention sinks, soft caps) take eager attention.
    `own` is the name of the target's, `name` that of its trees; whether they are two is what `differs` says.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        self.own = self.name = attention_of(target)
        if self.own not in ("eager", "sdpa"):
            text = target.config.get_text_config(decoder=True)
            models = [part for part in parts_of(target) if isinstance(part, PreTrainedModel) and part.config is text]
            self.name = "sdpa" if all(model._supports_sdpa for model in models or [target]) else "eager"
        self.differs = self.name != self.own

    def for_trees(self) -> AbstractContextManager[None]:
        """Return a context in which targets of this thread attend as for trees, by `grouped_attention` for SDPA."""
        return nullcontext() if self.name == self.own == "eager" else in_place_of(self.own, self.name)


def for_trees(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Return a context in which a model takes masks [B, 1, Q, S] such as those of trees, in this thread."""
    attention = TreeAttention(model)
    return attention.for_trees() if attention.differs else nullcontext()


def registered(interface: Any, name: str) -> Any:
    """Return the function that a registry of transformers has under a name, also while replaced; None if none."""
    function = interface._global_mapping.get(name)
    return function.own if isinstance(function, _HereOrOwn) else function


# ---- of a whole tree, without copies of the cache -------------------------------------------------------------

_NARROW = (torch.float16, torch.bfloat16)
_ROW = 8  # numbers that kernels read of a mask at once: each of its rows has to begin at a multiple of as many


def attend_in_groups(
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, H / g, S, D]
    value: Tensor,  # [B, H / g, S, D']
    mask: Tensor,  # [B or 1, 1, Q, S]
    scaling: float | None = None,
) -> Tensor:  # [B, H, Q, D']
    """Attention under a mask where g heads share keys and values, which are read where they lie.

    The queries of a group stand side by side, as g · Q queries of one head under the mask repeated g times. PyTorch's
    own way (`enable_gqa`) is no faster on a CPU, and far slower for one query in bfloat16 (torch 2.13).
    """
    batch, heads, queries, width = query.shape
    groups = heads // key.shape[1]
    grouped = query.reshape(batch, heads // groups, groups * queries, width)
    mask = mask if groups == 1 else mask.repeat(1, 1, groups, 1)
    return masked_attention(grouped, key, value, mask, scaling).reshape(batch, heads, queries, -1)


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, H / g, S, D]
    value: Tensor,  # [B, H / g, S, D']
    attention_mask: Tensor | None,  # [B, 1, N, S]
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [B, N, H, D']
    """Attention with the interface of transformers' `sdpa_attention_forward`.

    Queries under no mask are not taken in groups, nor those without a mask that all heads share.
    """
    groups = query.shape[1] // key.shape[1]
    shared_mask = attention_mask is not None and attention_mask.shape[1] == 1
    if (groups == 1 and not query.is_cuda) or not shared_mask or dropout or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    assert attention_mask is not None
    return attend_in_groups(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def masked_attention(
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, H, S, D]
    value: Tensor,  # [B, H, S, D']
    mask: Tensor,  # [B or 1, 1, Q, S], bool or added to scores
    scaling: float | None = None,
) -> Tensor:  # [B, H, Q, D']
    """`scaled_dot_product_attention`; on CUDA by the memory-efficient kernel, wherever that can take it.

    Left to itself, PyTorch takes cuDNN's on recent GPUs where numbers are bfloat16 or float16, which makes a plan for
    every new number of keys: 0.4 s each, and the text grows with every round.
    """
    if not query.is_cuda or not _is_for_efficient(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    if mask.dtype == torch.bool:
        mask = added_mask(mask, query.dtype)
    bias = aligned(mask.to(query.dtype)).expand(*query.shape[:3], key.shape[2])
    kernel: Any = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, bias, False, scale=scaling)[0]


def added_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask [...] that is added to scores for a bool one [...]: 0 where that is true."""
    # Half of the least number: kernels that take exp2 multiply by log2(e), and -inf of a row that has no key in one
    # block of keys would become NaN. It is as good as hidden: exp() of it is 0 next to any score.
    hidden = torch.finfo(dtype).min / 2
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, hidden)


def _is_for_efficient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if the kernel can take these tensors. Dtypes may differ under autocast, left to PyTorch."""
    fits = 8 if query.dtype in _NARROW else 4
    return (
        query.dtype in (*_NARROW, torch.float32)
        and query.dtype == key.dtype == value.dtype
        and all(part.shape[-1] % fits == 0 and part.stride(-1) == 1 for part in (query, key, value))
        and not torch.is_grad_enabled()
        and _efficient_allowed()
    )


@torch.compiler.assume_constant_result
def _efficient_allowed() -> bool:
    """Return True if the user has left the kernel enabled. Captured rounds are made again after a change."""
    return torch.backends.cuda.mem_efficient_sdp_enabled()


def aligned(mask: Tensor) -> Tensor:
    """Return a mask [..., S] in rows of which each begins where the kernel can read it."""
    if mask.stride(-1) == 1 and not any(step % _ROW for step in mask.stride()[:-1]):
        return mask
    return F.pad(mask, (0, -mask.shape[-1] % _ROW))[..., : mask.shape[-1]]


# ---- in the registries of transformers ------------------------------------------------------------------------


def _eager(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the eager attention of a module, which its file keeps to itself."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


_TABLES: tuple[tuple[Any, dict[str, Callable[..., Any]]], ...] = (
    (AttentionInterface, {"sdpa": grouped_attention, "eager": _eager}),
    (AttentionMaskInterface, {"sdpa": sdpa_mask, "eager": eager_mask}),
)
# The attention of this thread where a model asks for a name: that name, and the one to take in its place.
_here: ContextVar[tuple[str, str] | None] = ContextVar("_here", default=None)


@torch.compiler.assume_constant_result
def _asked() -> tuple[str, str]:
    """Return the names of `_here`; code that is compiled holds those of the thread that compiles it."""
    return _here.get() or ("", "")


class _HereOrOwn:
    """A function in the place of a kernel's `own`: one of `others` in threads that verify trees, else the kernel's."""

    def __init__(self, name: str, own: Callable[..., Any], others: Mapping[str, Callable[..., Any]]) -> None:
        self.own = own
        self._name, self._others = name, others

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        asked, name = _asked()
        return (self._others[name] if asked == self._name else self.own)(*args, **kwargs)


@contextmanager
def in_place_of(own: str, name: str) -> Iterator[None]:
    """Attend by `name` where a model asks for `own`, in this thread; masks are made for it, too.

    The functions stay in the registries from then on: taking them away would need a lock in every round, which an
    interruption may leave locked.
    """
    for interface, others in _TABLES:
        found = interface._global_mapping.get(own)
        if found is not None and not isinstance(found, _HereOrOwn):
            interface.register(own, _HereOrOwn(own, found, others))
    before = _here.get()
    try:
        _here.set((own, name))
        yield
    finally:
        _here.set(before)
