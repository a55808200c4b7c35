"""How a target attends: by what its user chose, and to trees by what takes a tree's mask.

FlashAttention, and most kernels of the Hub, know causal and windowed attention alone. Trees are verified by SDPA there,
over the same weights and the same cache, and what stock would run too (the prompt, a step without a draft) by the
user's kernel. Targets look up their attention by a name in their config, in every call. Other threads that call the
same target are to find the user's name there, so a config meanwhile answers the thread of the verifying forward alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property, lru_cache
from threading import Lock
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedConfig, PreTrainedModel

from hf_dart.models.packed import PACKED
from hf_dart.models.support import parts_of

FLEX = "flex_attention"

# By the id of a config, what it answers here.
_here: ContextVar[MappingProxyType[int, str]] = ContextVar("_here", default=MappingProxyType({}))
_answering = Lock()
_inside: dict[int, int] = {}  # by the id of a config, how many are inside of `switched` with it
_by_name: WeakSet[PreTrainedModel] = WeakSet()  # targets whose code asks for "sdpa" by its name


def attention_of(target: PreTrainedModel) -> str:
    """The attention implementation that `target` was set to, "sdpa" for example, also while trees take another."""
    return target.config.get_text_config(decoder=True)._attn_implementation_internal


class TreeAttention:
    """Which attention verifies the trees of a target: eager and SDPA themselves, SDPA in the place of others.

    Targets whose class has no SDPA (attention sinks, soft caps) take FlexAttention if they were loaded with it, and
    eager attention otherwise.

    Args:
        target: the causal LM.

    Attributes:
        own: that of the target.
        name: that of its trees.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        self.own = attention_of(target)
        self.name = self.own
        if self.own not in ("eager", "sdpa"):
            self.name = PACKED if _declares(target, "_supports_sdpa") else FLEX if self.own == FLEX else "eager"
        self._target = target

    @cached_property
    def _configs(self) -> dict[int, PreTrainedConfig]:
        """By their ids; looked for when first needed, as drafters make one of these at every step."""
        configs = (vars(part).get("config") for part in parts_of(self._target))
        return {id(config): config for config in configs if isinstance(config, PreTrainedConfig)}

    @property
    def shown(self) -> str:
        """`name` as users know it."""
        return "sdpa" if self.name == PACKED else self.name

    @property
    def differs(self) -> bool:
        """Are trees verified by another attention than the target's own?"""
        return self.name != self.own

    def switched(self, name: str | None = None) -> AbstractContextManager[None]:
        """A context in which the target attends by `name`, that of trees where left out, in this thread alone."""
        return _switched(self._configs, name or self.name)

    @cached_property
    def packs(self) -> bool:
        """Does `packed` attend by `packed_attention` in the place of the target's own SDPA?

        Not for classes that say that no other kernel can take its place: those with indexers (DeepSeek V3.2,
        GLM-MoE-DSA) mask what these leave out only where the attention is called "sdpa" or "eager".
        """
        others = ("_supports_flash_attn", "_supports_flex_attn")
        replaceable = any(_declares(self._target, other) for other in others)
        return replaceable and self.name == "sdpa" and self._target not in _by_name

    def unpack(self) -> None:
        """Leave the target its own SDPA from now on: its code asks for it by name, and does something else without."""
        _by_name.add(self._target)
        self.packs = False

    def pack_again(self) -> None:
        """Take `unpack` back: it was not the name."""
        _by_name.discard(self._target)
        self.packs = True

    def packed(self) -> AbstractContextManager[None]:
        """A context in which the target attends to trees, by `packed_attention` where that is SDPA, in this thread."""
        name = PACKED if self.packs else self.name
        return nullcontext() if name == self.own else self.switched(name)


def _declares(target: PreTrainedModel, support: str) -> bool:
    """Do all classes that the text goes through declare this?"""
    text = target.config.get_text_config(decoder=True)
    models = [part for part in parts_of(target) if isinstance(part, PreTrainedModel) and part.config is text]
    return all(getattr(model, support) for model in models or [target])


def for_trees(model: PreTrainedModel) -> AbstractContextManager[None]:
    """A context in which a model takes masks [B, 1, Q, S] such as those of trees, in this thread."""
    attention = TreeAttention(model)
    return attention.switched() if attention.differs else nullcontext()


def block_mask(seen: Tensor) -> BlockMask:
    """The mask [B, 1, Q, S] bool of what queries see, as FlexAttention takes it."""

    def sees(row: Tensor, head: Tensor, query: Tensor, entry: Tensor) -> Tensor:
        return seen[row, 0, query, entry]

    rows, _, queries, entries = seen.shape
    return create_block_mask(sees, rows, None, queries, entries, device=str(seen.device))


@contextmanager
def _switched(configs: dict[int, PreTrainedConfig], name: str) -> Iterator[None]:
    with _answering:  # whoever comes first makes the configs answer, and whoever goes last ends it
        for key, config in configs.items():
            if key not in _inside:
                kind: Any = type(config)
                object.__setattr__(config, "__class__", _asking(kind, name))
            _inside[key] = _inside.get(key, 0) + 1
    token = _here.set(MappingProxyType({**_here.get(), **dict.fromkeys(configs, name)}))
    try:
        yield
    finally:
        _here.reset(token)
        with _answering:
            for key, config in configs.items():
                _inside[key] -= 1
                if not _inside[key]:
                    del _inside[key]
                    object.__setattr__(config, "__class__", type(config).__base__)


@lru_cache(maxsize=256)
def _asking(kind: Any, name: str) -> type[PreTrainedConfig]:
    """A kind of config which, asked for its attention, looks who asks; copies of one are of the usual kind."""

    def answer(config: Any) -> str:
        if torch.compiler.is_compiling():  # what is compiled meanwhile is a forward over a tree
            return name
        return _here.get().get(id(config), config._attn_implementation_internal)

    def reduced(config: Any, protocol: Any) -> Any:
        made_by, (_, *others), *state = kind.__reduce_ex__(config, protocol)
        return made_by, (kind, *others), *state

    stock: Any = PreTrainedConfig._attn_implementation
    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__reduce_ex__": reduced,
        "_attn_implementation": property(answer, stock.fset),
    }
    return type(kind.__name__, (kind,), members)
