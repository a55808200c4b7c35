"""The trial of a target: a random tree through the target, held against stock's own steps over its paths.

A rule that depends on length shows only beyond that length: a window hides nothing from a short text. So the tree is
run on 12 tokens and again on both sides of every length that the cache's layers or the config name (`_Trial.marks`).
Long texts are never computed: the target's own keys and values are repeated until the cache is that long. Ours and
stock's steps start from copies of one cache; as one entry among thousands would drown in rounding, the entries at the
edge of each window are enlarged. One row, a batch and a padded batch are tried by the first call of their kind.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_dart.cache.states import states_of
from hf_dart.cache.stock_layers import attention_layers, held_by, keeps_states, take_states, window_of
from hf_dart.cache.target_cache import TargetCache
from hf_dart.models.attention import TreeAttention
from hf_dart.models.devices import device_of, generator_state, host_by_default, matmul_precision, set_generator_state
from hf_dart.models.identity import as_before, changed, identity
from hf_dart.models.packed_weights import packed_weights
from hf_dart.models.positions import position_limit
from hf_dart.models.processes import highest
from hf_dart.models.quantised import refuse_shared_scales, rounding_of
from hf_dart.models.stock_steps import StockSteps, cache_name
from hf_dart.models.support import in_training, refuse_cache, refuse_compressed, refuse_target, with_row_adapters
from hf_dart.models.tolerance import allowance, coarsest, difference
from hf_dart.models.verify import MaskKind, Verifier, layer_windows, mask_kinds
from hf_dart.trees.tree import DraftTree

_PROMPT = 12
# A tree with siblings on every level: node 0 is the root.
TRIAL_TREE = [-1, 0, 0, 2, 2, 4]
# The paths that rows commit, whose slots and depths are apart: that of the first row, and that of the second.
_PATHS = [[0, 2, 4, 5], [0, 2, 3]]
# From three tokens before a mark the tree reaches across it, but only by its slots, its deepest node and what comes
# after; from five after, every node is past it.
_BEFORE, _AFTER = -3, 5
_EQUAL = 8  # rows whose logits tell how a batch rounds
_LONG = 2.0  # seconds that a trial may take in silence
_AT_ATTACH = 8191  # larger windows are tried only by a call that needs as much memory itself
_LOUDEST = 64.0  # factor by which entries at the edge of a window are scaled up at most
_TRIES = 3  # texts that may differ before a target is refused: rounding may send a token to another expert

# Left padding of the rows of a trial: one row, a batch, a padded batch; how each is called, and what to do instead.
_ONE, _UNPADDED, _PADDED = (0,), (0, 0), (0, 3)
_WORDS = {
    _ONE: ("", "a token tree", "it is not supported,"),
    _UNPADDED: (" in a batch", "trees of several rows", "pass one row at a time, or"),
    _PADDED: (" in a padded batch", "trees of padded rows", "pass rows of one length, or"),
}

_Case = tuple[Any, ...]
# Per model and identity, the number of slots up to which it passed in this process; and by which weights it did.
_passed: WeakKeyDictionary[Any, dict[_Case, int]] = WeakKeyDictionary()

_LOGGER = logging.getLogger(__name__)


class _RefusalError(ValueError):
    """A sentence that the user is to read as it is."""


@contextmanager
def _explained(model: PreTrainedModel, what: str) -> Iterator[None]:
    """Turn any failure of unknown code inside into a refusal."""
    try:
        yield
    except (torch.OutOfMemoryError, _RefusalError):
        raise
    except Exception as failure:
        reason = " ".join(str(failure).split())
        raise _RefusalError(
            f"{type(model).__name__} cannot run {what} ({type(failure).__name__}: {reason}); call generate "
            "without assistant=."
        ) from failure


def _unmoved(model: PreTrainedModel, forward: Callable[[], Any]) -> Any:
    """Run a forward; raise if it draws from the generator that tokens are drawn from, which is put back."""
    device = device_of(model.get_input_embeddings())
    before = now = generator_state(device)
    for _ in range(3):  # other threads may draw meanwhile
        outputs = forward()
        if torch.equal(now, now := generator_state(device)):
            return outputs
    set_generator_state(device, before)
    mode = "call model.eval() first, or " if in_training(model) else ""
    raise _RefusalError(
        f"{type(model).__name__} draws random numbers in its forward, so that its tokens depend on how often it "
        f"runs; {mode}call generate without assistant=."
    )


def forget(model: PreTrainedModel) -> None:
    """Try the model again when that is next asked for, and keep nothing that was made of it (`identity`)."""
    changed(model)
    _passed.pop(model, None)


@host_by_default
@torch.no_grad()
def check_verification(
    model: PreTrainedModel,
    text: int | None = None,  # slots of the coming call's longest text; None: of its position table, as far as is cheap
    nodes: int = 0,  # slots after them that trees may fill
    rows: int = 1,
    padded: bool = False,
) -> None:
    """Check that tree verification is right for a model: once per what it consists of (`identity`).

    Runs a small tree, commits one path, runs one more token, and compares the logits with stock's own steps over that
    path, from the same cache. Where they differ by more than rounding does, so may stock's own in a batch of equal
    rows, within limits. A target that computes something else is refused, at least with such rows. The global
    generators are not moved.
    """
    refuse_target(model)
    pads = _ONE if rows == 1 and not padded else _PADDED if padded else _UNPADDED
    case, weights = (*identity(model), pads), bool(packed_weights(model))
    passed = _passed.setdefault(model, {})
    table = position_limit(model) + 1
    slots = min(_AT_ATTACH, table) if text is None else text + nodes
    # A hook may be in one process alone; then all run the trial.
    new, further = highest(model, (case, weights) not in passed, slots > passed.get(case, 0))
    if not (new or further):
        return
    started = perf_counter()
    with as_before(model), _without_row_adapters(model):  # by itself: the first forward of all may unpack weights
        trial = _Trial(model, pads)
    with as_before(model), _without_row_adapters(model):
        longest = max(table, text or 0) - len(TRIAL_TREE)
        near = [mark for mark in trial.marks if mark <= slots and further]
        marked = {min(mark + shift, longest) for mark in near for shift in (_BEFORE, _AFTER)}
        lengths = sorted({_PROMPT, *(length for length in marked if length > _PADDED[1])})
        seconds = (perf_counter() - started) * len(lengths) * 4  # up to seven forwards each, of fewer tokens
        if seconds > _LONG:
            _LOGGER.warning(
                f"hf_dart: trying token trees on {type(model).__name__}, once per process and kind of batch, after "
                f"texts of {', '.join(map(str, lengths))} tokens: about {seconds:.0f} s"
            )
        # Beyond the window of stock's own layers every node is past it: the root shows what those have dropped.
        beyond = {mark + _AFTER for mark in near if mark in trial.windows}
        for length in lengths:
            trial.run(length, 1 if length in beyond else len(_PATHS[0]))
    # A mark at the end of the position table is tried again by a call that goes further.
    ahead = [mark - 1 for mark in trial.marks if mark + _AFTER > min(slots, longest)]
    case = (*identity(model), pads)  # of unpacked weights
    passed[case] = max(passed.get(case, 0), slots, min(ahead, default=sys.maxsize))
    passed[case, weights] = 0


@contextmanager
def _without_row_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Leave out the hooks of `with_row_adapters` for a while: a trial has other rows than the call."""
    held = []
    for part, keys in with_row_adapters(model):
        held.append((part, part._forward_pre_hooks))
        kept = {key: hook for key, hook in part._forward_pre_hooks.items() if key not in keys}
        part._forward_pre_hooks = OrderedDict(kept)
    try:
        yield
    finally:
        for part, hooks in held:
            part._forward_pre_hooks = hooks


class _Trial:
    """Trees against stock's steps after prefixes of any length; `short` is a stock cache of 12 random tokens per row.

    `pads` are the left padding of each row.
    """

    def __init__(self, model: PreTrainedModel, pads: tuple[int, ...]) -> None:
        self._model, self._pads = model, list(pads)
        embeddings = model.get_input_embeddings()
        generator = torch.Generator().manual_seed(0)
        size = (len(pads), _PROMPT + _TRIES * (len(TRIAL_TREE) + 1))
        tokens = torch.randint(embeddings.weight.shape[0], size, generator=generator)
        self._tokens = tokens.to(device_of(embeddings))
        rows, *self._refusal = _WORDS[pads]
        self._text, self._tree = f"plain text over a DynamicCache{rows}", f"a token tree{rows}"
        with _explained(model, self._text):
            given = model, self._tokens[:, :_PROMPT], self._pads
            self._outputs = _unmoved(model, lambda: StockSteps(*given, _empty_cache(model)).prefill())
        short = self._outputs[cache_name(model)]
        holds_nothing = type(short) is DynamicCache and not states_of(short)
        if type(short) is not DynamicCache or (
            holds_nothing and not any(layer.is_initialized for layer in attention_layers(short))
        ):
            raise _RefusalError(
                f"{type(model).__name__} uses a {type(short).__name__} that holds neither keys and values nor running "
                "states, from which rejected drafts could be taken back; call generate without assistant=."
            )
        refuse_shared_scales(model)
        self.short = refuse_cache(short)
        refuse_compressed(self.short, _PROMPT)
        held = (held_by(layer)[1].dtype for layer in attention_layers(short))
        self._dtype = coarsest(self._outputs.logits, rounding_of(model), *held)
        self._attention = TreeAttention(model)
        self.windows = [window_of(layer) for layer in self.short.layers]

    @cached_property
    def marks(self) -> set[int]:
        """Lengths beyond which the target may compute otherwise: windows, chunks, steps of attention scales.

        All that the config names count: some models slide without telling the cache.
        """
        text = self._model.config.get_text_config(decoder=True).to_dict()
        named = [
            value
            for name, value in text.items()
            if any(part in name for part in ("window", "chunk", "floor_scale"))
            and not any(part in name for part in ("layers", "pattern"))  # numbers of layers, such as Qwen3's 28
        ]
        numbers = (value for value in [*named, *self.windows] if isinstance(value, (int, float)) and value is not True)
        return {int(value) for value in numbers if value > 0}

    def run(self, length: int, deepest: int) -> None:
        """Raise if trees after `length` tokens, of which `deepest` nodes are committed, are not stock's steps."""
        paths = [path[:deepest] for path in _PATHS[: len(self._pads)]]
        allowed = allowance(self._dtype)
        for tokens in self._tokens[:, _PROMPT:].chunk(_TRIES, dim=1):
            (error,) = highest(self._model, self._tree_against_steps(length, tokens, paths))
            if error <= allowed:
                return
            allowed = allowance(self._dtype, self.noise)
            if error <= allowed:
                return
        trees, instead = self._refusal
        raise _RefusalError(
            f"{type(self._model).__name__} computes something else for {trees} than stock does token by token (after "
            f"{length} tokens logits differ by {error:.2g} of the largest, allowed {allowed:.2g}); {instead} call "
            "generate without assistant=."
        )

    def _tree_against_steps(self, length: int, tokens: Tensor, committed: list[list[int]]) -> float:
        """Return the largest difference of a logit between trees and stock's steps, of the path that each row commits.

        Of `tokens` [B, 7] 6 are nodes, one comes after.
        """
        paths = [[*path, len(TRIAL_TREE)] for path in committed]
        rows, texts = range(len(paths)), [path + path[-1:] * (len(paths[0]) - len(path)) for path in paths]
        with _explained(self._model, self._text):
            steps = self._steps(length, [*rows])
            wanted = steps(tokens[torch.tensor(rows)[:, None], texts])
        with _explained(self._model, self._tree):
            found = self._trees(length, tokens, committed, steps.shift)
        ours = torch.cat([found[row, path] for row, path in zip(rows, paths, strict=True)])
        return difference(ours, torch.cat([wanted[row, : len(path)] for row, path in zip(rows, paths, strict=True)]))

    def _trees(self, length: int, tokens: Tensor, committed: list[list[int]], shift: Tensor | None) -> Tensor:
        """Logits [B, 7, V] of trees, and of a token after the paths that they commit."""
        nodes, after = tokens.split([len(TRIAL_TREE), 1], dim=1)
        prefix, room = self._prefix(length, [*range(len(tokens))]), length + 2 * len(TRIAL_TREE)
        windows = layer_windows(self._model, prefix)
        trees = TargetCache(prefix, self._pads, room, keep=False, windows=windows)
        verify = Verifier(self._model, trees, mask_kinds(self._model, self.short), [], shift=shift)
        parents = torch.tensor([TRIAL_TREE] * len(nodes), device=nodes.device)
        logits, _ = verify(DraftTree.from_parents(nodes, parents))
        filled_up = [path + [0] * (len(committed[0]) - len(path)) for path in committed]
        trees.commit(torch.tensor(filled_up), [len(path) for path in committed])
        return torch.cat([logits, verify(DraftTree.chain(after))[0]], dim=1)

    # ---- stock's steps ------------------------------------------------------------------------------------

    def _steps(self, length: int, rows: list[int]) -> StockSteps:
        """Stock's loop after a prefix, in a batch of these of the rows."""
        ids = self._tokens.repeat(1, -(-length // self._tokens.shape[1]))[rows, :length]  # whichever, in front
        pads = [self._pads[row] for row in rows]
        return StockSteps(self._model, ids, pads, self._prefix(length, rows)).resumed(self._outputs)

    def _prefix(self, length: int, rows: list[int]) -> Any:
        """Return a cache of `length` entries: those of a short prompt, repeated, and of random running states."""
        loudness = torch.ones(length)
        for mark in self.marks:
            edge = length - mark
            loudness[max(edge - 4, 0) : max(edge + len(TRIAL_TREE), 0)] = min(max(mark / 16, 1.0), _LOUDEST)
        cache, pads = _empty_cache(self._model), torch.tensor(self._pads)[:, None]
        slots = torch.arange(length)
        entries = torch.where(slots < pads, slots, pads + (slots - pads) % (_PROMPT - pads))  # [B, length]
        taken = torch.tensor(rows)
        for layer, filled in zip(cache.layers, self.short.layers, strict=True):
            if keeps_states(filled):
                take_states(layer, filled)
            if filled in attention_layers(self.short):
                here = taken.to(filled.device)[:, None]
                which = (entries[taken] % filled.keys.shape[2]).to(filled.device)  # a window may hold fewer
                keys, values = (part[here, :, which].transpose(1, 2) for part in (filled.keys, filled.values))
                layer.update(keys, values * loudness.to(values)[:, None])
        generator = torch.Generator().manual_seed(0)
        for slot, state in states_of(cache).items():
            states = state.clone()
            if slot.kind == "recurrent_states" and state.is_floating_point():
                states.copy_(torch.randn(state.shape, generator=generator))  # after 12 tokens some are next to nothing
            slot.write(cache, states[taken.to(state.device)])
        return cache

    # ---- what stock's own steps differ by -----------------------------------------------------------------

    @cached_property
    def noise(self) -> float:
        """Difference of logits of stock's steps in a batch of equal rows, or where the target attends as trees do.

        It is refused if it is no rounding.
        """
        rows, times = [*range(len(self._pads))], _EQUAL // len(self._pads)
        with _explained(self._model, self._text):
            one, many = self._first_step(rows), self._first_step(rows * times)
        lowered = one.device.type != "cpu" or not {"highest", "ieee", "none"}.issuperset(matmul_precision())
        dtype = coarsest(self._dtype, torch.float16) if lowered else self._dtype  # as coarse as TF32
        (noise,) = highest(self._model, difference(many, one.repeat(times, 1, 1)))
        if not noise <= allowance(dtype):
            raise _RefusalError(
                f"{type(self._model).__name__} computes other logits when several rows are fed at once (they differ by "
                f"{noise:.2g} of the largest); it is not supported, call generate without assistant=."
            )
        if not self._attention.differs:
            return noise
        own, name = self._attention.own, self._attention.name
        with _explained(self._model, f"with attention {name!r}"), self._attention.for_trees():
            trees = self._first_step(rows)
        (change,) = highest(self._model, difference(trees, one))
        if not change <= allowance(dtype):
            raise _RefusalError(
                f"Attention {own!r} takes no tree mask, and {name!r} computes something else with "
                f"{type(self._model).__name__} (logits differ by {change:.2g} of the largest); call "
                f"model.set_attn_implementation({name!r}), or generate without assistant=."
            )
        return max(noise, change)

    def _first_step(self, rows: list[int]) -> Tensor:
        """Logits [len(rows), 1, V] of stock's first step after the prompt, in a batch of these of the rows."""
        return self._steps(_PROMPT, rows)(self._tokens[rows, _PROMPT : _PROMPT + 1])


# ---- a step of stock's that is handed more than text ----------------------------------------------------------


def refuse_extra_inputs(
    target: PreTrainedModel, cache: TargetCache, kinds: list[MaskKind], shift: Tensor | None, extra: Mapping[str, Any]
) -> None:
    """Raise where inputs that stock passes on besides text change the logits of a token after the prompt.

    PaliGemma's processor marks the tokens of the prompt, and stock goes on marking those that it generates, which
    nothing looks at; of Qwen2.5-Omni stock keeps the mask of a sound that the prefill has read. GPT-2 has embeddings of
    such marks, and Mllama attends by them to images. The prefilled cache is left as it was.
    """
    if not extra:
        return
    batch, logits = len(cache.lengths), []
    for handed in ({}, extra):
        verify = Verifier(target, cache, kinds, [], shift=shift)
        verify.extra_inputs = handed
        cache.prepare(1)
        roots = cache.lengths - 1  # at the end of the text, where the position table cannot end yet
        root = DraftTree.chain(torch.zeros(batch, 1, dtype=torch.long))
        logits.append(verify.run(root, roots)[0])
        cache.commit(torch.zeros(batch, 1, dtype=torch.long), [0] * batch)
    if not torch.equal(*logits):
        raise ValueError(
            f"{type(target).__name__} is handed more than text with every token ({', '.join(extra)}), and drafts are "
            "not verified with it; leave it out, or leave assistant= out."
        )


def _empty_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))
