"""Attention of targets: by what the user chose, and to trees by what takes a tree's mask.

FlashAttention, and most kernels of the Hub, know causal and windowed attention alone, and FlexAttention wants masks of
another kind. Trees are verified by SDPA there, over the same weights and the same cache, and what stock would run too
(the prompt, a step without a draft) by the user's kernel. Targets look functions up in transformers' registry, by the
name in their config, in every call: once a tree was verified, a function stands there that looks which thread asks, and
calls the user's kernel for all but those that verify a tree. Configs stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from hf_dart.models.packed import packed_attention
from hf_dart.models.support import parts_of


def attention_of(target: PreTrainedModel) -> str:
    """Return the attention implementation that `target` was set to, "sdpa" for example."""
    return target.config.get_text_config(decoder=True)._attn_implementation


class TreeAttention:
    """The attention that verifies the trees of a target: eager and SDPA themselves, SDPA in the place of others.

    Targets whose class has no SDPA (attention sinks, soft caps) take eager attention.

    Args:
        target: the causal LM.

    Attributes:
        own: that of the target.
        name: that of its trees.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        self.own = self.name = attention_of(target)
        if self.own not in ("eager", "sdpa"):
            self.name = "sdpa" if _has_sdpa(target) else "eager"

    @property
    def differs(self) -> bool:
        """True if trees are verified by another attention than the target's own."""
        return self.name != self.own

    def packed(self) -> AbstractContextManager[None]:
        """Return a context in which targets of this thread attend as for trees, by `packed_attention` for SDPA."""
        return nullcontext() if self.name == self.own == "eager" else _in_place_of(self.own, self.name)


def _has_sdpa(target: PreTrainedModel) -> bool:
    """Return True if all classes that the text goes through declare support for SDPA."""
    text = target.config.get_text_config(decoder=True)
    models = [part for part in parts_of(target) if isinstance(part, PreTrainedModel) and part.config is text]
    return all(model._supports_sdpa for model in models or [target])


def for_trees(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Return a context in which a model takes masks [B, 1, Q, S] such as those of trees, in this thread."""
    attention = TreeAttention(model)
    return attention.packed() if attention.differs else nullcontext()


def registered(interface: Any, name: str) -> Any:
    """Return the function that a registry of transformers has under a name, also while replaced; None if none."""
    function = interface._global_mapping.get(name)
    return function.own if isinstance(function, _HereOrOwn) else function


# ---- in the registries of transformers ------------------------------------------------------------------------


def _eager(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the eager attention of a module, which its file keeps to itself."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


_TABLES: tuple[tuple[Any, dict[str, Callable[..., Any]]], ...] = (
    (AttentionInterface, {"sdpa": packed_attention, "eager": _eager}),
    (AttentionMaskInterface, {"sdpa": sdpa_mask, "eager": eager_mask}),
)
# The attention of this thread where a model asks for a name: that name, and the one to take in its place.
_here: ContextVar[tuple[str, str] | None] = ContextVar("_here", default=None)


@torch.compiler.assume_constant_result
def _asked() -> tuple[str, str]:
    """Return the names of `_here`; code that is compiled holds those of the thread that compiles it."""
    return _here.get() or ("", "")


class _HereOrOwn:
    """A function in the place of a kernel's: another one in threads that verify trees, the kernel's in all others.

    Args:
        name: of the kernel.
        own: its function.
        others: functions by the names that trees are attended to by.
    """

    def __init__(self, name: str, own: Callable[..., Any], others: Mapping[str, Callable[..., Any]]) -> None:
        self.own = own
        self._name, self._others = name, others

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        asked, name = _asked()
        return (self._others[name] if asked == self._name else self.own)(*args, **kwargs)


@contextmanager
def _in_place_of(own: str, name: str) -> Iterator[None]:
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
