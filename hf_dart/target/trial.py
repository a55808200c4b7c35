"""Proof by trial: a random tree through the target, held against its own plain forward.

A rule that depends on length shows only behind that length: a window hides nothing from a short text. So the
tree is run on 12 tokens and again on both sides of every length that the cache's layers or the config name
(`_Trial.marks`). Those long texts are never computed: the target's own keys and values are repeated until the cache
is that long, which costs what a few decoding steps on it cost, whatever the window. Ours and stock's forward
start from copies of the same cache, so the comparison is as sharp as on a real text; and because one entry
among thousands would drown in rounding, the entries at the edge of each window are enlarged.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hf_dart.cache.stock_layers import attention_layers, window_of
from hf_dart.cache.tree_cache import keeps_only_states, tree_cache
from hf_dart.target.attention import attention_of
from hf_dart.target.devices import device_of, host_by_default, matmul_precision, users_default
from hf_dart.target.support import parts_of, refuse_cache, refuse_compressed, refuse_model
from hf_dart.target.untouched import as_before
from hf_dart.target.verify import Verifier, layer_windows, mask_kinds, position_limit
from hf_dart.trees.tree import DraftTree

_PROMPT = 12
# A tree with siblings on every level and a path of depth 3: node 0 is the root.
_PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]
_KEPT, *_LEFT = [0, 1, 3, 6], [0, 2, 5, 7], [0, 1, 4]  # its paths; the first one is committed
# From three tokens before a mark the tree reaches across it, but only by its slots and deepest nodes; from five
# behind, every node is past it.
_AROUND = (-3, 5)
# Windows of more slots are looked at only by a call that needs as much memory itself.
_AT_ATTACH = 8191
# Entries at the edge of a window are made this much louder than the others, at most.
_LOUDEST = 64.0

# How far logits of a tree may lie apart from those of plain text, above what plain text itself is apart: roundings of
# the largest one.
_ULPS = 8

# Texts that may differ before a target is refused.
_TRIES = 3

# What a target's logits may differ by when several tokens are fed at once and not one by one: roundings of the largest
# logit, but (some families compute parts in fp32 whatever their dtype) no less than this share of it.
_ROUNDINGS = 16
_SHARE = 2**-12

# Code of these does to a tree what it does to a text.
_TRUSTED = ("transformers.", "peft.", "accelerate.", "torch.nn.modules.", "torch.utils._contextlib.", "torch._dynamo.")
# States of one target that are remembered as proved; hooks that count their calls make a new one for each.
_STATES = 64
# What a module holds that is not told to its code: PyTorch's own books, what `generate` reads, and a config that
# engines set for a while.
_NOT_TOLD = {*vars(nn.Module()), "config", "generate", "generation_config"} - {"training"}
# Values of one list, dict or object that are looked at.
_SWITCHES = 64

_Case = tuple[str, torch.dtype, frozenset[Any]]
# Models, and up to how many slots each was proved right in this process, as it was then.
_proved: WeakKeyDictionary[Any, dict[_Case, int]] = WeakKeyDictionary()


class _RefusalError(ValueError):
    """A sentence that the user is to read as it is."""


@contextmanager
def _explained(model: Any) -> Iterator[None]:
    """Unknown code may fail on a tree in any way at all."""
    try:
        yield
    except (torch.OutOfMemoryError, _RefusalError):
        raise
    except Exception as failure:
        raise ValueError(
            f"{type(model).__name__} cannot run a token tree ({type(failure).__name__}: {failure}); call generate "
            "without assistant=."
        ) from failure


@host_by_default
@torch.no_grad()
def prove(model: Any, text: int | None = None, nodes: int = 0) -> None:
    """Check that tree verification is right for a model: once per attention, dtype, and what others made of it.

    Runs an 8-node tree, commits one path, runs one more token, and compares all logits with plain forwards from
    the same cache. What a plain forward itself differs by when it is fed token by token sets the tolerance, and
    has to be rounding. The global generators are not moved.

    Args:
        model: the target.
        text: slots of the longest text of the coming call; by default as much of the target's position table as
            is cheap.
        nodes: slots behind them that trees may fill.

    Raises:
        ValueError: the target computes something else for a tree; it is not supported.
    """
    refuse_model(model)
    case = (attention_of(model), model.dtype, frozenset(changes(model)))
    proved = _proved.setdefault(model, {})
    table = position_limit(model)[0] + 1
    slots = min(_AT_ATTACH, table) if text is None else text + nodes
    if slots <= proved.get(case, 0):
        return
    with as_before(model):
        with _explained(model):
            trial = _Trial(model)
        refuse_cache(trial.short)
        refuse_compressed(trial.short, _PROMPT)
        longest = max(table, text or 0) - len(_PARENTS)
        lengths = {min(mark + shift, longest) for mark in trial.marks if mark <= slots for shift in _AROUND}
        with _explained(model):
            for length in sorted({_PROMPT} | {length for length in lengths if length > 0}):
                trial.run(length)
    # A mark at the end of the position table is looked at again by a call that goes further.
    ahead = [mark - 1 for mark in trial.marks if mark + _AROUND[1] > min(slots, longest)]
    if len(proved) >= _STATES:
        proved.clear()
    proved[case] = max(slots, min(ahead, default=sys.maxsize))


def changes(model: Any) -> Iterator[tuple[Any, ...]]:
    """What others have made of a model: code of their own in it, with all that this is told, and adapters."""
    parts = parts_of(model)
    forwards = {kind: getattr(kind, "forward", kind) for kind in set(map(type, parts))}  # of TorchScript there is none
    others = {kind: forward for kind, forward in forwards.items() if _is_others(forward)}
    yield from map(_told, others.values())
    for part in parts:
        functions = []
        if part._forward_pre_hooks or part._forward_hooks or "forward" in part.__dict__:
            functions = [function for function in _hung_on(part) if _is_others(function)]
            yield from map(_told, functions)
        if functions or type(part) in others:
            told = _settings(value for name, value in tuple(vars(part).items()) if name not in _NOT_TOLD)
            yield type(part), *told
    # LoRA adds the same to every position, whatever batch it is switched on in.
    kinds = {config.peft_type for config in getattr(model, "peft_config", {}).values()}
    yield from ((kind,) for kind in kinds - {"LORA"})


def _told(function: Any) -> tuple[Any, ...]:
    """The code of a function, and what this is told: closures that are made anew for every call are one."""
    layers = _layers_of(function)
    told = _settings(value for layer in layers for value in _held_by(layer))
    return *(getattr(layer, "__code__", type(layer)) for layer in layers), *told


def _hung_on(part: Any) -> Iterator[Any]:
    """Hooks of a module, those of accelerate too, and what stands in place of its forward, or did when those came."""
    yield from (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
    for forward in (part.__dict__.get("forward"), part.__dict__.get("_old_forward")):
        if forward is not None and getattr(forward, "__func__", None) is not getattr(type(part), "forward", None):
            yield forward
    hook = part.__dict__.get("_hf_hook")
    for one in getattr(hook, "hooks", (hook,)):
        if one is not None and not type(one).__module__.startswith("accelerate."):
            yield from (one.pre_forward, one.post_forward)


def _is_others(function: Any) -> bool:
    # Not `__module__`, which functools.wraps takes from what is wrapped.
    codes = (layer for layer in _layers_of(function) if not isinstance(layer, (functools.partial, MethodType)))
    makers = (getattr(code, "__globals__", {}).get("__name__", type(code).__module__) for code in codes)
    return not all(f"{maker}.".startswith(_TRUSTED) for maker in makers)


def _layers_of(function: Any) -> list[Any]:
    """A function, and what a partial, a method, a decorator or what `torch.compile` made of one runs in the end."""
    for name in ("func", "__func__", "_torchdynamo_orig_callable", "__wrapped__"):
        inner = getattr(function, name, None)
        if inner is not None:
            return [function, *_layers_of(inner)]
    return [function]


def _held_by(function: Any) -> Iterator[Any]:
    """What a partial, a method, a closure, an instance or a module hands to its code."""
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
    for holder in (function, getattr(function, "__self__", None)):
        yield from tuple(getattr(holder, "__dict__", {}).values())
    if not isinstance(function, FunctionType):
        return
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from (function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty one
            yield cell.cell_contents


def _settings(told: Iterable[Any]) -> Iterator[Any]:
    """What of it is plain, or code; and the switches in the rest: numbers there are mostly records of what was seen."""
    for value in told:
        if value is None or isinstance(value, (bool, int, float, str)):
            yield value
        elif isinstance(value, FunctionType):
            yield value.__code__
        elif not isinstance(value, ModuleType):
            inner = value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
            inner = value if isinstance(value, (list, tuple, set, frozenset)) else inner
            few = tuple(islice(inner, _SWITCHES))
            yield from (one for one in few if one is None or isinstance(one, (bool, str)))


class _Trial:
    """Trees against plain text behind prefixes of any length.

    Attributes:
        short: a stock cache that holds 12 random tokens.
        marks: lengths behind which the target may compute otherwise: windows, chunks, steps of attention scales.
            Those of the cache's layers and all that the config names, as some models slide without telling the
            cache.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        embeddings = model.get_input_embeddings()
        generator = torch.Generator().manual_seed(0)
        length = _PROMPT + _TRIES * (len(_PARENTS) + 1)
        tokens = torch.randint(embeddings.weight.shape[0], (1, length), generator=generator)
        self._tokens = tokens.to(device_of(embeddings))
        self.short = self._prefill(_PROMPT)

    def run(self, length: int) -> None:
        """Raise if trees behind `length` tokens are not plain text.

        A right target may differ once, where rounding sends a token to another expert; a wrong one always does.
        """
        name, steady = type(self._model).__name__, False
        for nodes in self._tokens[:, _PROMPT:].chunk(_TRIES, dim=1):
            error, allowed, noise, rounding = self._tree_against_plain(length, nodes)
            if error <= allowed and noise <= rounding:
                return
            steady = steady or noise <= rounding
        if not steady:
            raise _RefusalError(
                f"{name} computes other logits when several tokens are fed at once (behind {length} tokens they differ "
                f"by {noise:.2g}, which is no rounding); it is not supported, call generate without assistant=."
            )
        raise _RefusalError(
            f"{name} computes something else for a token tree than for plain text (behind "
            f"{length} tokens logits differ by {error:.2g}, allowed {allowed:.2g}); it is not supported, call "
            "generate without assistant=."
        )

    @cached_property
    def marks(self) -> set[int]:
        text = self._model.config.get_text_config(decoder=True).to_dict()
        named = [
            value for name, value in text.items() if any(part in name for part in ("window", "chunk", "floor_scale"))
        ]
        windows = [window_of(layer) for layer in self.short.layers]
        numbers = (value for value in [*named, *windows] if isinstance(value, (int, float)) and value is not True)
        return {int(value) for value in numbers if value > 0}

    def _prefill(self, length: int) -> Any:
        tokens = self._tokens.repeat(1, -(-length // self._tokens.shape[1]))[:, :length]
        cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        return self._forward(tokens, cache).past_key_values

    def _forward(self, tokens: Tensor, cache: Any) -> Any:
        with users_default():
            return self._model(input_ids=tokens, past_key_values=cache, use_cache=True)

    def _prefix(self, length: int) -> DynamicCache:
        """A cache of `length` entries: those of a short prompt, repeated.

        Layers that keep more than keys and values are filled by a prompt of that length.
        """
        if not keeps_only_states(self.short):
            return self._prefill(length)
        loudness = torch.ones(length)
        for mark in self.marks:
            edge = length - mark
            loudness[max(edge - 4, 0) : max(edge + len(_PARENTS), 0)] = min(max(mark / 16, 1.0), _LOUDEST)
        cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        for layer, filled in zip(attention_layers(cache), attention_layers(self.short), strict=True):
            entries = torch.arange(length, device=filled.device) % filled.keys.shape[2]
            louder = loudness.to(filled.device, filled.dtype)[:, None]
            layer.update(filled.keys[:, :, entries], filled.values[:, :, entries] * louder)
        return cache

    def _tree_against_plain(self, length: int, tokens: Tensor) -> tuple[float, float, float, float]:
        """Differences of logits between tree and plain text, and between plain text fed at once and one by one.

        Args:
            tokens: [1, 9], of which 8 are nodes, one comes after.

        Returns:
            The largest difference of the first kind and what is allowed; the largest of the second and what is.
        """
        nodes, after = tokens.split([len(_PARENTS), 1], dim=1)
        prefix, room = self._prefix(length), length + 2 * len(_PARENTS)
        trees = tree_cache(prefix, [0], room, keep=False, windows=layer_windows(self._model, prefix))
        verify = Verifier(self._model, trees, mask_kinds(self._model, self.short), [])
        parents = torch.tensor([_PARENTS], device=nodes.device)
        logits, _ = verify(DraftTree.from_parents(nodes, parents, max_depth=len(_PARENTS)))
        trees.commit(torch.tensor([_KEPT]), [len(_KEPT)])
        behind, _ = verify(DraftTree.chain(after))
        error = noise = largest = 0.0
        for text, drafted in (
            (torch.cat([nodes[:, _KEPT], after], dim=1), torch.cat([logits[:, _KEPT], behind], dim=1)),
            *((nodes[:, path], logits[:, path]) for path in _LEFT),
        ):
            whole, steps = self._plain(length, text)
            error = max(error, _difference(drafted, whole))
            noise = max(noise, _difference(steps, whole))
            largest = max(largest, float(whole.abs().max()))
        # Some families compute parts in fp32 whatever their dtype.
        least = max(_ULPS * torch.finfo(self._model.dtype).eps, 64 * torch.finfo(torch.float32).eps)
        allowed = 8 * noise + least * largest
        return error, allowed, noise, max(_ROUNDINGS * self._coarseness(whole), _SHARE) * largest

    def _coarseness(self, logits: Tensor) -> float:
        """The relative rounding of what the target computes in: under autocast, its weights do not tell."""
        states = attention_layers(self.short)[0].values
        coarsest = max(torch.finfo(part.dtype).eps for part in (logits, states))
        coarsest = max(coarsest, torch.finfo(self._model.dtype).eps)
        lowered = logits.device.type != "cpu" or not {"highest", "ieee", "none"}.issuperset(matmul_precision())
        return max(coarsest, 2**-10) if lowered else coarsest  # TF32

    def _plain(self, length: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Stock's logits [1, n, V] of tokens behind a prefix, fed at once and one by one."""
        cache = self._prefix(length)
        whole = self._forward(tokens, cache).logits
        cache = self._prefix(length)
        steps = [self._forward(token, cache).logits for token in tokens.split(1, dim=1)]
        return whole, torch.cat(steps, dim=1)


def _difference(left: Tensor, right: Tensor) -> float:
    return float((left.cpu().double() - right.cpu().double()).abs().max())  # Apple GPUs have no float64
