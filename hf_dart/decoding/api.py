"""`model.generate(..., assistant=drafter)`: a per-instance override that adds one keyword, and what it runs."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from hf_dart.cache.stock_layers import undone_on_failure
from hf_dart.decoding.request import Request, admit
from hf_dart.decoding.session import DartGenerateOutput, Session, break_off, one_round, result
from hf_dart.decoding.suffix_store import Namespace, namespace_of
from hf_dart.decoding.walk import NoiseStream
from hf_dart.drafters.base import Drafter
from hf_dart.drafters.compatibility import unwrapped
from hf_dart.drafters.lookup import LookupDrafter
from hf_dart.models.devices import host_by_default, users_default
from hf_dart.models.packed_weights import release, release_changed
from hf_dart.models.processes import is_shared
from hf_dart.models.trial import check_verification, forget
from hf_dart.trees.config import TreeConfig

_KEYWORDS = ("assistant", "tree_config", "refine", "trace", "memory")


def attach(
    model: PreTrainedModel, drafter: Drafter[Any] | None = None, *, learner: Any = None, memory: Any = None
) -> Any:
    """Let `model.generate` take `assistant=` (and `tree_config=`, `refine=`, ...); other calls are stock's own.

    With a `drafter`, calls without `assistant=` draft too, so that whatever calls `model.generate` itself (a pipeline,
    an evaluation harness, a server) does: those that cannot be drafted exactly run as stock's own, with one warning
    for each reason. `assistant=None`, `assistant_model=` and `custom_generate=` turn the drafter off for a call.

    Only this instance is changed: no class is patched, and deep copies, pickles, PEFT wrappers and pipelines of the
    model keep the keyword. Call `attach` again on a shallow copy; until then it shares the original's `generate`. A
    `generate` of the instance's own (a repository's, a partial) still serves calls without `assistant=`.

    The target is first tried on a random tree (`models.trial.check_verification`), unless it is being trained. The
    result holds for its modules, their code and hooks, its attention, device and dtype. What that code reads (a global,
    an attribute) is not checked: attach again after changing it; what was compiled is then compiled again.

    Args:
        model: a causal LM, or a wrapper of one by PEFT or `torch.compile`.
        drafter: for calls without `assistant=`, in place of one given before; None leaves that.
        learner: a [`Learner`], which trains the drafter on what it drafts for; None leaves one given before.
        memory: a [`SuffixStore`], or a namespace of one, that drafted calls copy from and are kept in, unless they
            name another one; `memory=None` turns it off for a call. Without any drafter, it drafts by itself
            ([`LookupDrafter`]). None leaves one given before.

    Returns:
        The model.

    Raises:
        TypeError: `model` is no model, `drafter` no drafter of ours, or `learner` or `memory` none of its kind.
        ValueError: the model cannot verify trees, or the drafter was made for another one, or cannot learn.
    """
    target = unwrapped(model)
    if isinstance(vars(target).get("generate"), AttachedGenerate):
        forget(target)
    if drafter is not None:
        _refuse_other(drafter)
        drafter.check_target(target)
    if learner is not None:
        if drafter is None:
            raise ValueError("learner= trains the drafter; give both: attach(model, drafter, learner=learner).")
        if not callable(getattr(learner, "attach", None)):
            raise TypeError(f"learner= takes a hf_dart.Learner, not {type(learner).__name__}.")
        if is_shared(target):
            raise ValueError("Processes that hold a target together would learn different things; leave learner= out.")
        observers = drafter.observers
        learner.attach(drafter)
    try:
        return attached(model, drafter, namespace_of(memory), learner)
    except BaseException:
        if drafter is not None and learner is not None:
            drafter.observers = observers  # a learner of an earlier call goes on
        raise


def attached(
    model: PreTrainedModel, drafter: Drafter[Any] | None = None, memory: Namespace | None = None, learner: Any = None
) -> Any:
    """Attach `model`, which is returned; what its target has passed before is not tried again."""
    target = unwrapped(model)
    release_changed(target)  # trials read them
    if not target.training:
        check_verification(target)
    own, known = vars(target).get("generate"), None
    if isinstance(own, AttachedGenerate):
        if own.learner not in (None, learner or own.learner):
            own.learner.detach()
        drafter, known, learner, own = drafter or own.default, own.memory, learner or own.learner, own.own
    if memory is not None and drafter is None:
        drafter = LookupDrafter()
    target.generate = AttachedGenerate(target, own, drafter, memory or known, learner)
    return model


def detach(model: PreTrainedModel) -> Any:
    """Undo `attach`: `generate` of this model is what it was, without `assistant=` and without a default drafter.

    Args:
        model: a causal LM, or a wrapper of one by PEFT or `torch.compile`; one that is not attached stays as it is.

    Returns:
        The model.
    """
    target = unwrapped(model)
    release(target)
    forget(target)
    own = vars(target).pop("generate", None)
    if isinstance(own, AttachedGenerate):
        if own.learner is not None:
            own.learner.detach()
        own = own.own
    if own is not None:
        target.generate = own
    return model


class AttachedGenerate:
    """`generate` of an attached model; see the function of that name. Unlike bound methods, pickles keep it."""

    def __init__(
        self,
        model: PreTrainedModel,
        own: Any,  # a `generate` that the instance had before, for calls without drafts
        default: Drafter[Any] | None,  # of calls that name no drafter and no other way to generate; None: stock's own
        memory: Namespace | None,  # of drafted calls that name none
        learner: Any,  # that `detach` ends
    ) -> None:
        self.model, self.own, self.default, self.memory, self.learner = model, own, default, memory, learner
        self._reasons: set[str] = set()  # why calls ran without drafts, without numbers, each told once

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unnamed = "assistant" not in kwargs and kwargs.get("custom_generate") is None
        if self.default is not None and unnamed and kwargs.get("assistant_model") is None:
            try:
                drafts = {"assistant": self.default, "memory": self.memory, **kwargs}
                return _run_drafted(self.model, args, drafts, optional=True)
            except UndraftedError as reason:
                if (kind := re.sub(r"\d+", "", str(reason))) not in self._reasons:
                    self._reasons.add(kind)
                    warnings.warn(f"This call of generate runs without drafts: {reason}", stacklevel=2)
        elif unnamed and (shaping := [name for name in _KEYWORDS[1:] if kwargs.get(name)]):
            raise ValueError(f"{shaping[0]}= shapes drafts, and this call has no drafter; give assistant=drafter.")
        if kwargs.get("assistant") is not None:
            return generate(self.model, *args, **{"memory": self.memory, **kwargs})
        if self.own is None:
            return generate(self.model, *args, **kwargs)
        if kwargs.get("custom_generate") is None:
            kwargs = {name: value for name, value in kwargs.items() if name not in _KEYWORDS}
        return self.own(*args, **kwargs)


class UndraftedError(Exception):
    """Error of a call that may run without drafts, and cannot be drafted exactly; it has emitted nothing. Says why."""


@contextmanager
def _refusals(optional: bool) -> Iterator[None]:
    """Turn a refusal (`ValueError`) raised inside into an [`UndraftedError`] if drafts are optional."""
    try:
        yield
    except ValueError as refusal:
        if optional:
            raise UndraftedError(str(refusal)) from refusal
        raise


def generate(
    model: PreTrainedModel,
    *args: Any,
    assistant: Drafter[Any] | None = None,
    tree_config: TreeConfig | None = None,
    refine: int | None = None,
    trace: bool | None = None,
    memory: Any = None,
    **kwargs: Any,
) -> Any:
    """`model.generate(*args, **kwargs)` with the keywords that `attach` adds, on a model that need not be attached.

    Args:
        model: the target.
        args: those of `model.generate`.
        assistant: the drafter; None is stock's own call.
        tree_config: the shape of draft trees in this call; None is the drafter's own.
        refine: how many edit passes the drafter makes over its draft; None is what `tree_config` says.
        trace: keep every round and its tree in the statistics, for `hf_dart.View`.
        memory: a [`SuffixStore`], or a namespace of one, that the call copies from and is kept in; None for none.
        kwargs: those of `model.generate`.

    Returns:
        What `model.generate` returns; with `return_dict_in_generate=True` also the statistics, as `draft_stats`.

    Raises:
        TypeError: `assistant` is no drafter of ours, `tree_config` no [`TreeConfig`], or `memory` no store.
        ValueError: something was asked for that could not equal stock's output; the message says what to do instead.
    """
    if isinstance(kwargs.get("assistant_model"), Drafter):
        raise TypeError("assistant_model= takes a language model; pass a hf_dart drafter as assistant=.")
    named = dict(zip(_KEYWORDS, (assistant, tree_config, refine, trace, memory), strict=True))
    custom = kwargs.get("custom_generate")
    if assistant is None and custom is None:
        return type(model).generate(model, *args, **kwargs)
    if assistant is None or isinstance(custom, str):
        # A repository's `generate` takes assistant= itself, and calls this function again if it is ours.
        return type(model).generate(model, *args, **{k: v for k, v in named.items() if v is not None}, **kwargs)
    return _run_drafted(model, args, {**named, **kwargs})


def _run_drafted(
    model: PreTrainedModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    optional: bool = False,
    run: Callable[..., Any] | None = None,
) -> Any:
    """Run `generate` with `assistant` (of `kwargs`) as drafter, or `run` with all that it has prepared."""
    drafting: dict[str, Any] = {name: kwargs.pop(name, None) for name in _KEYWORDS}
    _refuse_other(drafting["assistant"])
    stock = type(model).generate
    kwargs = _by_name(stock, args, kwargs)
    # Stock does not pass these to a callable. It gives the prompt to a streamer before a call can be refused, so the
    # callable does that, too.
    streamer, tokenizer, synced_gpus = (kwargs.pop(name, None) for name in ("streamer", "tokenizer", "synced_gpus"))
    with _refusals(optional):
        if kwargs.get("assistant_model") is not None or kwargs.get("custom_generate") is not None:
            raise ValueError("assistant= excludes assistant_model= and custom_generate=; give one of them.")
        if (mode := kwargs.get("generation_mode", "text")) != "text":  # Janus
            raise ValueError(f"generation_mode={mode!r} writes no text to draft; leave it or assistant= out.")
        if kwargs.get("cache_implementation") == "paged":
            raise ValueError(
                "cache_implementation='paged' is continuous batching, which takes no drafts; leave it or assistant= "
                "out."
            )
        if _option(model, kwargs, "token_healing"):
            raise ValueError(
                "generate has no tokenizer to heal a prompt with here; heal it first, with "
                "model.heal_tokens(input_ids, tokenizer), and pass token_healing=False."
            )
        _take_stop_strings(model, kwargs, tokenizer)
    decode = partial(
        run or speculative_generate, **drafting, streamer=streamer, synced_gpus=bool(synced_gpus), optional=optional
    )
    return stock(model, **{**kwargs, "custom_generate": decode})


def requested(
    model: PreTrainedModel, *args: Any, assistant: Drafter[Any], overlaps: bool = False, **kwargs: Any
) -> Request:
    """Prepare the call `generate(model, *args, assistant=assistant, **kwargs)` of one row for a seat (`seats.Seats`).

    Nothing of it has run when this returns; `open_request` begins it, now or later. Calls that no seat takes are
    refused, too. If it `overlaps` another one, the weights of the target are taken for those that that one found.
    """
    if type(model).generate is not GenerationMixin.generate and getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"{type(model).__name__}.generate may switch adapters amid other requests; call it for each.")
    return _run_drafted(model, args, {"assistant": assistant, **kwargs}, run=partial(_admit_to_seat, overlaps=overlaps))


@host_by_default
def _admit_to_seat(model: PreTrainedModel, input_ids: Tensor, optional: bool, **options: Any) -> Request:
    """Return what `request.admit` does, for a seat."""
    request, rows = replace(admit(model, input_ids, **options), windowed=False), len(input_ids)
    if rows > 1:
        raise ValueError(f"This request has {rows} rows; give each a request of its own, and num_return_sequences=1.")
    if request.collects("output_hidden_states"):
        raise ValueError("Hidden states are not collected of requests that share a forward; call generate for them.")
    _show_prompt(request.streamer, input_ids)
    return request


def _show_prompt(streamer: Any, input_ids: Tensor) -> None:
    """Tell a streamer, if there is one, of the prompts [B, P] as they were given."""
    if streamer is not None:
        with users_default():
            streamer.put(input_ids.cpu())


def _refuse_other(drafter: Any) -> None:
    if not isinstance(drafter, Drafter):
        raise TypeError(
            f"assistant= takes a loaded drafter, not {type(drafter).__name__}; give load_drafter(path, target=model), "
            "or LanguageModelDrafter(small, model) for a small language model."
        )


def _by_name(stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of `stock(model, *args, **kwargs)` by name."""
    signature = inspect.signature(stock)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
        signature = inspect.signature(GenerationMixin.generate)  # which passes them on
    _, *named = signature.bind_partial(None, *args).arguments.items()
    return dict(**dict(named), **kwargs)


def _take_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any], tokenizer: Any) -> None:
    """Make the criterion of stop strings: for a callable, `generate` drops the tokenizer that it is made with."""
    stop_strings = _option(model, kwargs, "stop_strings")
    if stop_strings is None:
        return
    if tokenizer is None:
        raise ValueError("stop_strings needs the tokenizer; pass tokenizer= to generate.")
    config = kwargs.get("generation_config")
    if config is None or "stop_strings" in kwargs or model.generation_config.stop_strings is not None:
        kwargs["stop_strings"] = None  # a keyword overrides both configs
    else:  # stock deprecates keywords beside a config
        kwargs["generation_config"] = config = copy(config)
        config.stop_strings = None
    criteria = kwargs.get("stopping_criteria") or []
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # one of the user's own replaces it
        strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        criterion = _stop_criterion(tokenizer, len(tokenizer), strings, model.device)
        kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, criterion])


@lru_cache(maxsize=8)
def _stop_criterion(tokenizer: Any, size: int, stop_strings: tuple[str, ...], device: Any) -> StopStringCriteria:
    """Make stock's criterion, which spells out all `size` tokens and keeps no state of a call; one for each device."""
    return StopStringCriteria(stop_strings=list(stop_strings), tokenizer=tokenizer)


def _option(model: PreTrainedModel, kwargs: dict[str, Any], name: str) -> Any:
    """Return an option of `generate` from where stock takes it: keyword, config of the call, config of the model."""
    if name in kwargs:
        return kwargs[name]
    configs = (kwargs.get("generation_config"), model.generation_config)
    given = (getattr(config, name) for config in configs if config is not None)
    return next((value for value in given if value is not None), None)


@host_by_default
@torch.no_grad()
def speculative_generate(
    model: PreTrainedModel, input_ids: Tensor, optional: bool = False, **options: Any
) -> Tensor | DartGenerateOutput:
    """Decode with drafts: the callable that `assistant=` becomes, called by stock's `generate` with all prepared.

    Prompts [B, P] are expanded for `num_return_sequences` already; `options` are those of `request.admit`. Where drafts
    are `optional`, a call that cannot be drafted raises [`UndraftedError`], so that it can run without.
    """
    with _refusals(optional):
        request = admit(model, input_ids, **options)
    if not optional:
        _show_prompt(request.streamer, input_ids)
    session = begin_session(request, shown=input_ids if optional else None)
    engine = session.request.drafter.engine
    with broken_off_on_failure(session):
        session.first_token()
        if engine is not None and not session.rows.finished:
            engine.run(session)
        while not session.rows.finished:
            one_round(session)
        return close_call(session)


def open_request(request: Request, generator: torch.Generator | None = None) -> Session:
    """Begin a call that was let in, its tokens drawn from `generator`: read the prompt and emit each row's first token.

    Rounds of the session are to be run until all rows have finished; then `close_call` follows, or `session.break_off`
    where one fails.
    """
    session = begin_session(request, generator)
    with broken_off_on_failure(session):
        session.first_token()
    return session


def begin_session(request: Request, generator: torch.Generator | None = None, shown: Tensor | None = None) -> Session:
    """Read the prompt of a call that was let in; the streamer is `shown` it then, as it was given, if not before.

    Should that fail, generator and cache are as they were; with `shown`, a refusal is an [`UndraftedError`].
    """
    noise = None
    if request.generation_config.do_sample:
        ids = request.input_ids
        noise = NoiseStream(len(ids), 0, ids.device, forecast=request.in_step, generator=generator)
    undone = undone_on_failure(request.stock_cache, request.total) if request.users_cache else nullcontext()
    try:
        with undone:
            with _refusals(shown is not None):
                session = Session(request, noise)
            if shown is not None:
                _show_prompt(request.streamer, shown)
        return session
    except BaseException:
        if noise is not None:
            noise.end()
        raise


@contextmanager
def broken_off_on_failure(session: Session) -> Iterator[None]:
    """Leave generator and cache as stock would have, should the block raise."""
    try:
        yield
    except BaseException:
        try:
            break_off(session)
        finally:
            if session.noise is not None:
                session.noise.end()
        raise


def close_call(session: Session) -> Tensor | DartGenerateOutput:
    """End a call whose rows have all finished; returns what `speculative_generate` does."""
    output, drafter = result(session), session.request.drafter
    drafter.last_stats = session.stats  # set before readers of the streamer see its end
    if session.request.streamer is not None:
        session.request.streamer.end()
    session.pace.finish(drafter, session.grower.copied)
    session.tell_end(finished=True)
    return output
