"""A drawn case as a call of `generate`: its arguments, where it happens, and all that it leaves."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, TopPLogitsWarper
from transformers.generation import stopping_criteria as criteria_module
from transformers.generation.streamers import BaseStreamer

from support.outcome import Outcome
from support.tiny import prompts
from support.users import TOKENIZER, Clock, Criterion, Processor, allowed

_softmax = torch.nn.functional.softmax


def softmax(given: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
    """In the dtype of what is given.

    Eager attention takes its softmax in fp32: in float64, padded rows are NaN in stock then, and near-ties part texts.
    """
    return _softmax(given, dim=dim, dtype=None if given.dtype == torch.float64 else dtype)


class Stopped(KeyboardInterrupt):
    """As by Ctrl-C, at a known moment."""


class Recorder(BaseStreamer):
    """Keeps what it is given.

    Args:
        last: the call that is interrupted.
    """

    def __init__(self, last: int | None) -> None:
        self.calls: list[Any] = []
        self.last = last

    def put(self, value: Tensor) -> None:
        self.calls.append((value.long(), value.dtype))
        if len(self.calls) == self.last:
            raise Stopped

    def end(self) -> None:
        self.calls.append(("end",))


def prompt_of(case: dict[str, Any], target: Any) -> dict[str, Any]:
    """The prompt as the case passes it."""
    inputs: dict[str, Any] = prompts(case["lengths"], case["seed"])
    ids, mask, form = inputs["input_ids"], inputs["attention_mask"], case["prompt"]
    if form in ("embeddings", "both"):
        inputs["inputs_embeds"] = target.get_input_embeddings()(inputs.pop("input_ids")).detach()
        inputs.update({"input_ids": ids[:, -2:]} if form == "both" else {})
    elif form in ("bool mask", "float mask"):
        inputs["attention_mask"] = mask.bool() if form == "bool mask" else mask.double()
    elif form == "no mask":
        del inputs["attention_mask"]
    elif form == "int32":
        inputs["input_ids"] = ids.int()
    elif form == "positions":
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0) + (case["seed"] % 3 == 0)
    elif form == "right padding":
        inputs = {name: value.flip(1) for name, value in inputs.items()}
    elif form == "no tokens":
        inputs = {name: value[:, :0] for name, value in inputs.items()}
    return {} if form == "none" else inputs


def own_of(case: dict[str, Any], width: int) -> tuple[dict[str, Any], list[Any]]:
    """What the user brings beside options, made again; and those parts that record their calls."""
    own: dict[str, Any] = {}
    if case["processors"]:
        made = {"stock's top-p": lambda: TopPLogitsWarper(0.7)}
        own["logits_processor"] = [made.get(kind, lambda kind=kind: Processor(kind))() for kind in case["processors"]]
    if case["criteria"]:
        stocks = {
            "stock's length": lambda: MaxLengthCriteria(width + 9),
            "stock's EOS": lambda: EosTokenCriteria([4, 13, 22]),
        }
        own["stopping_criteria"] = [stocks.get(kind, lambda kind=kind: Criterion(kind))() for kind in case["criteria"]]
    if case["allowed tokens"]:
        own["prefix_allowed_tokens_fn"] = allowed
    if case["streamer"]:
        own["streamer"] = Recorder(1 + case["seed"] % 20 if case["streamer"] == "interrupts" else None)
    if "stop_strings" in case["options"]:
        own["tokenizer"] = TOKENIZER
    parts = [*own.get("logits_processor", []), *own.get("stopping_criteria", []), own.get("streamer")]
    return own, [part for part in parts if isinstance(part, Processor | Criterion | Recorder)]


@contextmanager
def surroundings(kind: str) -> Iterator[None]:
    """Where the call happens, with a clock that starts at 0."""
    before = torch.get_default_dtype()
    inner = {"inference mode": torch.inference_mode, "no grad": torch.no_grad}.get(kind, nullcontext)
    clock = mock.patch.object(criteria_module, "time", SimpleNamespace(time=Clock().time))
    try:
        torch.set_default_dtype(torch.float64 if kind == "float64 by default" else before)
        with inner(), clock, mock.patch.object(torch.nn.functional, "softmax", softmax), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


def call(
    case: dict[str, Any], target: Any, inputs: dict[str, Any], seed: int, given_cache: Any, drafting: dict[str, Any]
) -> tuple[Outcome, list[Any]]:
    """One side's call by the case's route, and what the user's own parts were shown.

    Raises:
        AssertionError: an argument was written to.
    """
    options, ids = copy.deepcopy(case["options"]), inputs.get("input_ids")
    own, told = own_of(case, 0 if ids is None else ids.shape[1])
    own.update({"past_key_values": given_cache} if given_cache is not None else {})
    for name, value in case["arguments"].items():
        own[name] = (torch.zeros_like(ids) if ids is not None else None) if value == "like ids" else value
    if "guidance_scale" in options and case["negative prompt"] and ids is not None and ids.shape[1]:
        own["negative_prompt_ids"] = ids[:, -1:].clone()
        own["negative_prompt_attention_mask"] = torch.ones_like(ids[:, -1:])
    passed, kept = dict(inputs), {name: value.clone() for name, value in inputs.items()}
    positional = [passed.pop("input_ids")] if case["prompt"] == "positional" else []
    before, config = target.generation_config, None
    with surroundings(case["context"]):
        target(torch.tensor([[3, 4]]))  # rotary frequencies that follow what ran last are those of short texts
        try:
            if case["route"] == "model's config":
                target.generation_config = GenerationConfig(**{**before.to_diff_dict(), **options})
                options = {}
            elif case["route"] in ("config", "config and keywords"):
                names = sorted(options)[:: 1 if case["route"] == "config" else 2]
                made = GenerationConfig(**{name: options.pop(name) for name in names})
                options["generation_config"] = made
            config = copy.deepcopy(options.get("generation_config"))
            torch.manual_seed(seed)
            output: Any = target.generate(*positional, **passed, **options, **own, **drafting)
            error = None
        except (Exception, Stopped) as failure:
            output, error = failure, type(failure)
        finally:
            target.generation_config = before
    assert repr(options.get("generation_config")) == repr(config), "generation_config was written to"
    for name, value in inputs.items():
        assert torch.equal(value, kept[name]), f"{name} was written to"
    # Stock's first call shows ids in the dtype that they were passed in.
    calls = [(one[0].long() if isinstance(one[0], Tensor) else one[0], *one[1:]) for part in told for one in part.calls]
    return Outcome(output, error, torch.get_rng_state()), calls
