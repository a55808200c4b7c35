"""A case as calls of `generate`, stock's and ours: arguments, surroundings, and all that they leave, compared."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    StaticCache,
    TopPLogitsWarper,
)
from transformers.generation import stopping_criteria as criteria_module

from hf_dart.drafters.base import Drafter
from hf_dart.models.stock_steps import CACHE
from support import drawn
from support.caches import CLOSE, assert_same_cache
from support.compare import Run, configs_put_back, same, snapshot, tally
from support.engines import Everywhere
from support.tiny import VOCABULARY, ReplayDrafter, prompts
from support.users import TOKENIZER, Clock, Criterion, Listener, OwnError, Processor, Stopped, allowed

DRAWN = tally("float64, whatever is drawn")
# Experts are weighed in fp32, and mixed layers of theirs round to it.
_IN_FP32 = {"rtol": 1e-4, "atol": 1e-4}
_softmax = torch.nn.functional.softmax


def softmax(given: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
    """In the dtype of what is given.

    Eager attention takes its softmax in fp32: in float64, padded rows are NaN in stock then, and near-ties part texts.
    """
    return _softmax(given, dim=dim, dtype=None if given.dtype == torch.float64 else dtype)


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
        far, first = 1 + case["seed"] % 2, case["seed"] % 3 == 0
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0) * far + first
    elif form == "right padding":
        inputs = {name: value.flip(1) for name, value in inputs.items()}
    elif form == "no tokens":
        inputs = {name: value[:, :0] for name, value in inputs.items()}
    return {} if form == "none" else inputs


def own_of(case: dict[str, Any], width: int) -> tuple[dict[str, Any], list[Any]]:
    """What the user brings beside options, made again; and those parts that record their calls."""
    own: dict[str, Any] = {}
    if case["processors"]:
        warper = {"stock's top-p": TopPLogitsWarper(0.7)}
        own["logits_processor"] = [warper.get(kind) or Processor(kind) for kind in case["processors"]]
    if case["criteria"]:
        stocks = {"stock's length": MaxLengthCriteria(width + 9), "stock's EOS": EosTokenCriteria([4, 13, 22])}
        own["stopping_criteria"] = [stocks.get(kind) or Criterion(kind) for kind in case["criteria"]]
    if case["allowed tokens"]:
        own["prefix_allowed_tokens_fn"] = allowed
    if case["streamer"]:
        own["streamer"] = Listener(case["seed"] % 20 if case["streamer"] == "interrupts" else None, Stopped)
    if "stop_strings" in case["options"]:
        own["tokenizer"] = TOKENIZER
    parts = [*own.get("logits_processor", []), *own.get("stopping_criteria", []), own.get("streamer")]
    return own, [part for part in parts if isinstance(part, Processor | Criterion | Listener)]


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
) -> tuple[Run, list[Any]]:
    """One side's call by the case's route, and what the user's own parts were shown; arguments stay as they were."""
    options, ids = copy.deepcopy(case["options"]), inputs.get("input_ids")
    own, told = own_of(case, 0 if ids is None else ids.shape[1])
    own.update({CACHE: given_cache} if given_cache is not None else {})
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
    return Run(output, torch.get_rng_state(), error), told


@dataclass
class Tallies:
    """What became of the calls."""

    kinds: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    taus: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.kinds.items()))
        accepted, runs = sum(tau > 1.3 for tau in self.taus), len(self.taus)
        return f"calls: {kinds}; tau above 1.3 in {accepted} of {runs}, {sum(self.taus) / max(1, runs):.2f} in the mean"


def is_sentence(error: Any) -> bool:
    text = str(error).strip()
    return isinstance(error, ValueError | TypeError) and "\n" not in text and text.endswith(".")


def assert_same_shown(ours: list[Any], stock: list[Any]) -> None:
    for left, right in zip(ours, stock, strict=True):
        if isinstance(right, Listener):
            assert left.calls == right.calls
        else:
            torch.testing.assert_close(left.calls, right.calls, rtol=1e-5, atol=1e-5, equal_nan=True)


def compare(ours: tuple[Run, Any], stock: tuple[Run, Any], tallies: Tallies, empty: bool) -> str:
    """What became of a pair that does not differ: "same", "refused" (by ours) or "both raise".

    An `empty` prompt, of no tokens, is a mistake by itself.
    """
    (mine, shown), (theirs, wanted) = ours, stock
    by_user = isinstance(theirs.output, OwnError | Stopped)
    if mine.error is not None and is_sentence(mine.output) and (by_user or theirs.error is None):
        tallies.refusals[str(mine.output)] += 1
        return "refused"
    if theirs.error is not None:
        tallies.errors[repr(theirs.output)[:120]] += 1
        assert mine.error is not None, f"stock raises {theirs.output!r}"
        # The user's own may come before what ours would say, and stock's of an empty prompt before another of stock's.
        kinds = (theirs.error, OwnError, Stopped, *((IndexError,) if empty else ()))
        alike = is_sentence(mine.output) or mine.error in kinds
        assert alike, f"{mine.output!r}\nstock\n{theirs.output!r}"
        if by_user:
            assert_same_shown(shown, wanted)
            assert torch.equal(mine.state, theirs.state), "the generator is not where the user's error left it"
        return "both raise"
    if mine.error is not None:
        raise AssertionError(f"ours raises {mine.output!r}") from mine.output
    assert mine.sequences.dtype == theirs.sequences.dtype
    same(mine, theirs)
    assert_same_shown(shown, wanted)
    return "same"


def replay(case: dict[str, Any], stock: Tensor, pads: list[int], turn: int) -> ReplayDrafter:
    """A drafter that knows stock's answer and misses a share of it, per row."""
    known = {"embeddings": 0, "both": 2}.get(case["prompt"])
    if known is not None:
        ids = prompts(case["lengths"], case["seed"])["input_ids"]
        stock = torch.cat([ids.repeat_interleave(len(stock) // len(ids), 0), stock[:, known:]], dim=1)
    kind = drawn.Hostile if case["drafter"] == "hostile" else ReplayDrafter
    misses = (case["misses"] * 2)[: len(stock)]
    return kind(stock, pads, VOCABULARY, misses=misses, draft_length=case["draft length"], seed=turn)


def drafted_by(case: dict[str, Any], stock: Run, pads: list[int], turn: int) -> tuple[Any, dict[str, Any]]:
    """The drafter of a turn, and the keywords that bring it in."""
    if not case["drafted turns"][turn]:
        return None, {}
    pair = case["target"], case["attention"], case["weights"]
    tree = {} if case["tree"] is None else {"tree_config": case["tree"]}
    if case["drafter"] in ("replay", "hostile") and stock.error is None:
        drafter: Any = replay(case, stock.sequences, pads, turn)
    else:
        kind = case["drafter"]
        drafter = drawn.made_drafter(*pair, "head" if kind in ("replay", "hostile") else kind)
    if case["route"] == "custom_generate" and not case["streamer"] and "stop_strings" not in case["options"]:
        # transformers keeps this from a callable, so that it cannot be refused.
        return drafter, {"custom_generate": drafter.generate, **tree} if "synced_gpus" not in case["arguments"] else {}
    return drafter, {"assistant": drafter, "trace": case["trace"], **tree}


def caches(case: dict[str, Any], target: Any) -> list[Any]:
    """A cache for either side."""
    needed = max(case["lengths"]) + (case["options"].get("max_new_tokens") or 0) - 1
    room = 150 if case["room"] is None else max(1, int(needed) + case["room"])
    makes: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "dynamic": lambda: DynamicCache(config=target.config),
        "bare": DynamicCache,
        "static": lambda: StaticCache(config=target.config, max_cache_len=room),
    }
    return [makes[case["cache"]]() for _ in range(2)] if case["prompt"] not in ("none", "no tokens") else [None, None]


def run_case(case: dict[str, Any], tallies: Tallies) -> None:
    """Hold all turns of a case to stock's."""
    target = drawn.made_target(case["target"], case["attention"], case["weights"])
    engine = Everywhere(case["first tier"]) if case["captured"] else None
    best = 0.0
    inputs = prompt_of(case, target)
    both = theirs, ours = caches(case, target)
    text = inputs.get("input_ids")
    times = case["options"].get("num_return_sequences") or 1
    ends_early = case["target"] in ("gpt2", "opt")  # the table of positions
    ids_alone = "input_ids" in inputs and "inputs_embeds" not in inputs and times == 1
    tolerance = _IN_FP32 if drawn.TARGETS[case["target"]][0] in drawn.FP32 else CLOSE
    for turn in range(case["turns"] if ids_alone and theirs is not None else 1):
        mask = inputs.get("attention_mask")
        pads = [0] * len(inputs.get("input_ids", [[]])) if mask is None else (mask == 0).sum(-1).tolist()
        pads = [pad for pad in pads for _ in range(max(1, times))]
        with configs_put_back(target):
            stock = call(case, target, inputs, case["seed"] + turn, theirs, {})
        before = snapshot(target)  # by now stock has made what it makes at first use, such as long frequencies
        drafter, drafting = drafted_by(case, stock[0], pads, turn)
        with mock.patch.object(Drafter, "engine", engine):
            mine = call(case, target, inputs, case["seed"] + turn, ours, drafting)
        assert snapshot(target) == before, "the target was changed"
        if mine[0].error is None and stock[0].error is IndexError and len(mine[0].sequences) > 1 and ends_early:
            break  # stock runs a row that has ended on, past the end of the table
        kind = compare(mine, stock, tallies, case["prompt"] == "no tokens")
        tallies.kinds[kind] += 1
        if kind != "same":
            break
        if not isinstance(stock[0].output, Tensor):
            assert not drafting or mine[0].output.draft_stats is drafter.last_stats
            assert_same_cache(mine[0].output[CACHE], stock[0].output[CACHE], pads, close=tolerance)
        if theirs is not None:
            assert_same_cache(ours, theirs, pads, close=tolerance)
        if drafting and drafter.last_stats is not None and drafter.last_stats.rounds:
            best = max(best, drafter.last_stats.tau)
            DRAWN.add(drafter.last_stats)
        if turn + 1 < case["turns"] and ids_alone and theirs is not None:
            text = torch.cat([text, stock[0].sequences[:, inputs["input_ids"].shape[1] :]], dim=1)
            text = follow_up(case, inputs, text, both, case["seed"] + turn)
    if best:
        tallies.taus.append(best)
    tallies.kinds["captured"] += engine is not None and engine.calls > 0


def follow_up(case: dict[str, Any], inputs: dict[str, Any], text: Tensor, both: list[Any], seed: int) -> Tensor:
    """Make the inputs of a turn those of the next one, and return all text [B, T'] up to there.

    Four more tokens come after the text [B, T] so far; rows that ended early have visible pads inside.
    """
    slides = any(getattr(layer, "is_sliding", False) for layer in both[0].layers)
    if case["crop"] and case["cache"] == "dynamic" and not slides:
        for cache in both:
            cache.crop(-case["crop"])
    mask = inputs.get("attention_mask")
    mask = torch.ones(len(text), inputs["input_ids"].shape[1]) if mask is None else mask
    whole = torch.cat([text, prompts([4] * len(text), seed)["input_ids"]], dim=1)
    inputs.clear()
    inputs["attention_mask"] = torch.cat([mask, mask.new_ones(len(text), whole.shape[1] - mask.shape[1])], dim=1)
    inputs["input_ids"] = whole[:, int(both[0].get_seq_length()) :] if case["feed"] == "new tokens" else whole
    return whole


def failures_of(cases: Iterable[tuple[str, dict[str, Any]]], tallies: Tallies) -> list[str]:
    """Run cases, each with a name of its own; which of them differ, and how."""
    found = []
    for name, case in cases:
        try:
            run_case(case, tallies)
        except Exception as error:
            found.append(f"{name}\n  {case['target']}, {case['drafter']}: {type(error).__name__}: {error}")
    return found
