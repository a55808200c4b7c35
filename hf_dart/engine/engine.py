"""`hf_dart.compile`, and the `Engine` that it makes: which calls run captured parts, and what is kept for them."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable
from threading import Lock
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from transformers import PreTrainedModel

from hf_dart.decoding.session import Session, one_round
from hf_dart.drafters.base import Drafter
from hf_dart.drafters.compatibility import unwrapped
from hf_dart.engine.graphs import Capture, EngineConfig
from hf_dart.engine.tier import Tier, drafts_on_fixed_shapes
from hf_dart.models.devices import matmul_precision, state_of
from hf_dart.models.identity import identity, users_hooks
from hf_dart.models.positions import moving_rotary
from hf_dart.models.processes import group_of
from hf_dart.models.running_states.mixers import takes_levels
from hf_dart.models.support import parts_of

_KEPT = 16  # tiers that an engine keeps; the one that has not been used for longest goes first

_LOGGER = logging.getLogger(__name__)


def compile(
    model: PreTrainedModel, drafter: Any, *, progress: Callable[[str], object] | None = None, **options: Any
) -> Engine:
    """Compile the target's forward over a tree, and on a GPU capture it, for `model.generate(..., assistant=drafter)`.

    The tokens are the same. The target's forward and, for drafters that draft in one pass on fixed shapes (a
    [`DartHead`]), the draft are one launch each; the rest of a round is that of every call. They are compiled when a
    call first needs their batch size, tree size and length, which takes from seconds to minutes with a backend that
    generates code; later calls reuse them. Trees are padded to a power of two.

    Where this is not possible (running states that go through trees level by level, rotary frequencies that follow the
    text, several devices, forward hooks, collected hidden states), calls run uncompiled. The first of each kind warns
    and says why.

    Args:
        model: the target, or a PEFT wrapper of it.
        drafter: any drafter, which keeps the engine; `drafter.engine = None` turns it off.
        progress: called with a sentence on what is being compiled; by default it is logged (level INFO).
        options: fields of [`EngineConfig`].

    Returns:
        The engine.

    Raises:
        ValueError: the drafter is not for this target, or an option is out of range.
        TypeError: `drafter` is not a drafter of hf_dart.
    """
    target = unwrapped(model)
    if not isinstance(drafter, Drafter):
        raise TypeError(f"compile takes a hf_dart drafter such as DartHead, not {type(drafter).__name__}.")
    drafter.check_target(target)
    drafter.engine = Engine(target, EngineConfig(**options), progress or _LOGGER.info)
    return drafter.engine


class Engine:
    """The captured parts of rounds of one target and one drafter; `hf_dart.compile` makes it, the drafter keeps it.

    Each is made when a call first needs it. Calls of another target, and of other threads while one call uses it, run
    without it and without a warning. Copies of a drafter have none.
    """

    def __init__(self, target: PreTrainedModel, config: EngineConfig, progress: Callable[[str], object]) -> None:
        self.target, self.config = ref(target), config
        self._progress = progress
        self._busy = Lock()
        self._warned: set[str] = set()
        self._tiers: dict[tuple[Any, ...], Tier | None] = {}
        self.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @property
    def tiers(self) -> list[Tier | None]:
        """Tiers that are kept, the one used last at the end; None for one that could not be made."""
        return [*self._tiers.values()]

    def release(self) -> None:
        """Free all graphs and buffers; they are made again when they are needed."""
        kept, self._made_for = bool(self._tiers), ()
        self._clear()
        if kept:
            gc.collect()  # tiers are in reference cycles with their compiled code

    def _clear(self) -> None:
        self._tiers = {}
        self._capture: Capture | None = None  # a new one with the next graph: a pool may end with its last graph

    def run(self, session: Session) -> None:
        """Bring a prefilled session to its end, or as far as its rounds can run here; others go on from there."""
        if self.target() is not session.request.model or not self._busy.acquire(blocking=False):
            return
        try:
            reason = why_not(session)
            if reason is not None:
                self._warn(reason)
                return
            made_for = signature(session)
            if made_for != self._made_for:
                self.release()
                self._made_for = made_for
            while not session.rows.finished:
                key, tier = self._tier(session)
                if tier is None:
                    break
                with tier.taken_by(session):
                    while not session.rows.finished and tier.failure is None and tier.fits(session.cache.longest):
                        one_round(session)
                if tier.failure is not None:
                    self._warn(f"it failed ({_message(tier.failure)})")
                    self._tiers[key] = None
        finally:
            self._busy.release()

    def _tier(self, session: Session) -> tuple[tuple[Any, ...], Tier | None]:
        """Return the tier that a session goes on in, and its key; None if there is none."""
        request, batch = session.request, len(session.rows)
        nodes, slots = request.tree_config.resolve_nodes(batch, request.device.type), self.config.first_tier
        nodes = nodes if nodes == 1 else -(-nodes // 8) * 8
        while session.cache.longest + nodes > slots:
            slots *= 2
        key = (batch, slots, nodes, *_shapes(session))
        if key not in self._tiers:
            self._progress(f"hf_dart: preparing forwards of {nodes} nodes for {batch} row(s) of up to {slots} tokens")
            started = perf_counter()
            self._tiers[key] = self._made(session, slots, nodes)
            self._progress(f"hf_dart: prepared in {perf_counter() - started:.0f} s, for all such calls of this process")
        tier = self._tiers[key] = self._tiers.pop(key)  # in order of last use
        while len(self._tiers) > _KEPT:
            del self._tiers[next(iter(self._tiers))]
        if tier is not None:
            try:
                tier.load(session)
            except Exception as failure:  # which says nothing of the target: the next call may do
                self._warn(f"it could not be loaded ({_message(failure)})")
                return key, None
        return key, tier

    def _made(self, session: Session, slots: int, nodes: int) -> Tier | None:
        """Return a tier for calls like that of `session`, or None, with a warning."""
        try:
            tier = self._make(session, slots, nodes)
            tier.load(session)
            error = tier.difference(session)
            tier.warm_up(session)
        except Exception as failure:
            self._warn(f"it could not be made ({_message(failure)})")
            return None
        if not error:
            return tier
        name = type(session.request.model).__name__
        self._warn(f"{name} computes something else on fixed shapes (logits differ by {error:.2g} of the largest)")
        return None

    def _make(self, session: Session, slots: int, nodes: int) -> Tier:
        """Return a tier; where memory is short, in the place of all that were kept."""
        device = session.request.model.device
        self._capture = self._capture or Capture(self.config, device)
        try:
            return Tier(session, slots, nodes, self._capture)
        except torch.OutOfMemoryError:
            pass  # the error refers to what was made so far, until this block ends
        self._clear()
        gc.collect()  # frees it
        self._capture = Capture(self.config, device)
        return Tier(session, slots, nodes, self._capture)

    def _warn(self, reason: str) -> None:
        sentence = f"This call runs uncompiled: {reason}."
        if sentence not in self._warned:
            self._warned.add(sentence)
            warnings.warn(sentence, stacklevel=6)


def why_not(session: Session) -> str | None:
    """Return the reason why a session's target cannot run on fixed shapes; None if it can."""
    target = session.request.model
    parts = parts_of(target)
    asked = [
        (
            session.cache.states is not None and takes_levels(target),
            "the target keeps running states, which go through a tree level by level, as the host lays it out",
        ),
        (session.hidden_states is not None, "it collects hidden states"),
        (moving_rotary(target) is not None, "the target's rotary frequencies follow the length of the text"),
        (len({weight.device for weight in _tensors(parts)}) > 1, "the target does not lie on one device"),
        (group_of(target) is not None, "several processes hold the target together"),
        (any(hasattr(part, "_hf_hook") for part in parts), "the target is offloaded by accelerate"),
        (any(map(users_hooks, parts)), "the target has forward hooks, which a captured forward would not call"),
    ]
    return next((reason for holds, reason in asked if holds), None)


def signature(session: Session) -> tuple[Any, ...]:
    """Return a key that changes when graphs no longer compute what the models would: weights, adapters or code differ.

    Drafters may keep results computed from their weights and from those that they borrow, so that writing to these
    changes the key too.
    """
    target, drafter = session.request.model, session.request.drafter
    modules: list[Any] = parts_of(target)
    key: list[Any] = [identity(target), *_precision(), *map(id, modules)]  # changes if modules are replaced
    if drafts_on_fixed_shapes(session):
        head: Any = drafter
        key += [id(head.draft_vocabulary), head.draft_window, head.draft_sink]
        made_of = [*head.parameters(), *head.shared.embeddings.parameters(), *head.shared.lm_head.parameters()]
        key += [state_of(weight) for weight in made_of]
        modules += parts_of(head)
    key += [(tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in _tensors(modules)]
    layers = [layer for layer in modules if hasattr(layer, "merged_adapters")]  # PEFT's
    key += [(layer.active_adapters, layer.disable_adapters, repr(layer.merged_adapters)) for layer in layers]
    key += [repr(getattr(layer, "scaling", None)) for layer in layers]
    return tuple(key)


def _tensors(parts: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Parameters and buffers of the modules themselves, several times faster than by `Module.parameters`."""
    owned = [tensor for part in parts for tensor in (*part._parameters.values(), *part._buffers.values())]
    return [tensor for tensor in owned if tensor is not None]


def _shapes(session: Session) -> tuple[Any, ...]:
    """Return a key of the shapes, besides rows, length and nodes, by which tiers of one target and drafter differ."""
    cache, shift, features = session.cache, session.verify.shift, session.seen.features
    positions = () if shift is None else (*shift.shape[:-1], shift.dtype)
    states = {} if cache.states is None else cache.states.committed
    kept = [(slot, state.shape[1:], state.dtype, state.device) for slot, state in states.items()]
    stored = [(store.shape_for(1, 0), store.storage.dtype, store.storage.device) for store in cache.entries.stores]
    return features.shape[-1], features.dtype, drafts_on_fixed_shapes(session), positions, *stored, *kept


def _precision() -> list[Any]:
    """Return PyTorch's settings of precision and kernels, which a captured kernel keeps for good."""
    matmul, backends = torch.backends.cuda.matmul, torch.backends.cuda
    reduced = (matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction)
    kernels = (backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled())
    return [matmul_precision(), *map(str, reduced), *kernels, backends.cudnn_sdp_enabled(), torch.get_num_threads()]


def _message(failure: Exception) -> str:
    """Return the beginning of an error; those of compilers name what went wrong in the second line."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return f"{type(failure).__name__}: {' '.join(lines[:2]) or 'no message'}"[:300]
