"""Stand-ins, on a CPU and in any dtype, for kernels that take no mask of a tree: FlashAttention's and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, masking_utils
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from hf_dart.models import attention

FLASH = "flash_attention_2"
HUB = "kernels-community/flash-attn3"
OWN = "a_kernel_of_the_users"
FLEX = "flex_attention"


def attends_to_trees() -> bool:
    """Whether this thread is inside of `TreeAttention.packed`, and attends otherwise than its models' configs say."""
    return attention._here.get() is not None


@dataclass
class Calls:
    """Which threads called a kernel, with how many queries in a row."""

    queries: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def add(self, queries: int) -> None:
        self.queries.append(queries)
        self.threads.append(get_ident())


def set_attention(target: Any, name: str) -> Any:
    """The target, set to it without a look at what is installed."""
    target.config._attn_implementation = name
    return target


@contextmanager
def flash_kernels(name: str = FLASH) -> Iterator[Calls]:
    """transformers' own code for FlashAttention, over kernels in PyTorch; `name` may be one of the Hub's."""
    calls = Calls()

    def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:  # [B, Q, H, D], [B, S, H / g, D] twice
        calls.add(q.shape[1])
        return torch.stack([_attend(*row, **options) for row in zip(q, k, v, strict=True)])

    def of_any_length(  # q [sum of Q, H, D], cu_seqlens [B + 1]; transformers looks at the names
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, s_aux: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        calls.add(max_seqlen_q)
        sizes = (q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k)
        rows = zip(*(part.split(ends.diff().tolist()) for part, ends in sizes), strict=True)
        options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
        return torch.cat([_attend(*row, **options, softcap=softcap, s_aux=s_aux) for row in rows])

    kernels = {
        "_loaded_implementation": name,
        "_flash_fn": dense,
        "_flash_varlen_fn": of_any_length,
        "_pad_fn": flash._pad_input,
        "_unpad_fn": flash._unpad_input,
        "_process_flash_kwargs_fn": flash._lazy_define_process_function(of_any_length),
    }
    with (
        patch.multiple(flash, **kernels),
        patch.dict(AttentionInterface._global_mapping, {name: flash_attention_forward}),
        patch.dict(AttentionMaskInterface._global_mapping, {name: flash_attention_mask}),
    ):
        yield calls


def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, s_aux: Tensor | None = None, dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """q [Q, H, D], k and v [S, H / g, D], s_aux [H] to [Q, H, D]; the last query sees the last key."""
    groups = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(groups, 1).transpose(0, 1) for part in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * scale  # [H, Q, S]
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    ahead = torch.arange(k.shape[1]) - torch.arange(k.shape[1] - len(q), k.shape[1])[:, None]
    hidden = (ahead > 0) if causal else torch.zeros_like(ahead, dtype=torch.bool)
    if window_size[0] >= 0:
        hidden = hidden | (ahead < -window_size[0])
    scores = scores.masked_fill(hidden, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux[:, None, None].expand(-1, len(q), 1)], dim=-1)
    return (scores.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1)


@contextmanager
def own_kernel(change: Callable[[Tensor], Tensor] = lambda mixed: mixed) -> Iterator[Calls]:
    """An attention that a user registered as `OWN`: it knows [B, S] masks of padding, and refuses others."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, sliding_window: int | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if attention_mask is not None and attention_mask.ndim != 2:
            raise NotImplementedError("this kernel takes no mask of four dimensions")
        calls.add(query.shape[2])
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        mixed = query.new_zeros(*query.shape[:3], value.shape[3]).transpose(1, 2)
        for row in range(len(query)):
            seen = torch.ones(key.shape[2]).bool() if attention_mask is None else attention_mask[row].bool()
            asking = seen[-query.shape[2] :]
            parts = query[row][:, asking], key[row][:, seen], value[row][:, seen]
            q, k, v = (part.transpose(0, 1) for part in parts)
            mixed[row, asking] = _attend(q, k, v, softmax_scale=scaling, causal=True, window_size=window)
        return change(mixed), None

    calls = Calls()
    with patch.dict(AttentionInterface._global_mapping), patch.dict(AttentionMaskInterface._global_mapping):
        AttentionInterface.register(OWN, attend)
        AttentionMaskInterface.register(OWN, flash_attention_mask)
        yield calls


@contextmanager
def flex_kernel() -> Iterator[Calls]:
    """transformers' `flex_attention` over PyTorch's in its uncompiled form, which knows float64 and sinks on a CPU.

    transformers compiles it, and refuses sinks on a CPU; the correction for them is the one that it applies elsewhere.
    """

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: BlockMask,
        scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert isinstance(attention_mask, BlockMask)
        calls.add(query.shape[2])

        def capped(score: Tensor, *place: Tensor) -> Tensor:
            return score if softcap is None else softcap * torch.tanh(score / softcap)

        options = {"scale": scaling, "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
        mixed, aux = flex_attention(query, key, value, capped, attention_mask, **options)
        if s_aux is not None:
            mixed = mixed * (aux.lse - torch.logaddexp(aux.lse, s_aux[:, None].to(aux.lse))).exp()[..., None]
        return mixed.to(query.dtype).transpose(1, 2).contiguous(), None

    def uncompiled(*args: Any, _compile: bool = False, **kwargs: Any) -> BlockMask:
        return create_block_mask(*args, **kwargs)

    calls = Calls()
    with (
        patch.dict(AttentionInterface._global_mapping, {FLEX: attend}),
        patch.object(masking_utils, "create_block_mask", uncompiled),
        patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),  # nor traced, for every length again
    ):
        yield calls
