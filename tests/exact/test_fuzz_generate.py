"""Whatever is drawn - target, prompt, options, arguments, drafter, tree, cache, turns - ours equals stock in float64.

Compared: tokens, dtype, the generator, scores, logits, hidden states, the cache, what streamers and the user's own
processors and criteria were shown; and nothing that was passed in is written to. Where stock raises ours does, with
stock's own kind of error or one sentence.

    pytest tests/exact/test_fuzz_generate.py              300 cases; with -m matrix 3,000 others
    PYTHONPATH=tests python tests/exact/test_fuzz_generate.py SEED INDEX          one case again
    PYTHONPATH=tests python tests/exact/test_fuzz_generate.py SEED --cases 300    300 others
"""

from __future__ import annotations

import argparse
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from support import drawn
from support.called import Stopped, call, prompt_of
from support.compare import tally
from support.outcome import Outcome, configs_put_back, same, snapshot
from support.tiny import VOCABULARY, ReplayDrafter, prompts
from support.users import OwnError
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    StaticCache,
)

import hf_dart
from hf_dart.cache.stock_layers import attention_layers, held_by

CLOSE = {"rtol": 1e-9, "atol": 1e-9}

FUZZED = tally("fuzz")
# Experts are weighed in fp32, and mixed layers of theirs round to it.
_IN_FP32 = {"rtol": 1e-4, "atol": 1e-4}


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


# ---- both, compared --------------------------------------------------------------------------------------


def is_sentence(error: Any) -> bool:
    text = str(error).strip()
    return isinstance(error, ValueError | TypeError) and "\n" not in text and text.endswith(".")


def assert_same_shown(ours: Any, stock: Any) -> None:
    assert len(ours) == len(stock), f"{len(ours)} calls instead of {len(stock)}"
    for left, right in zip(ours, stock, strict=True):
        if isinstance(right, list | tuple):
            assert_same_shown(left, right)
        elif isinstance(right, Tensor):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5, equal_nan=True)
        else:
            assert left == right, f"{left} instead of {right}"


def assert_same_cache(ours: Any, stock: Any, pads: list[int], tolerance: dict[str, float]) -> None:
    """All layers hold the same entries; what padding left there is nobody's business."""
    assert type(ours) is type(stock)
    slots = int(stock.get_seq_length())
    assert int(ours.get_seq_length()) == slots
    for left, right in zip(attention_layers(ours), attention_layers(stock), strict=True):
        assert type(left) is type(right)
        assert int(left.get_seq_length()) == int(right.get_seq_length())
        if not right.is_initialized:
            continue
        assert left.keys.shape == right.keys.shape
        for got, want in zip(held_by(left), held_by(right), strict=True):
            for row, pad in enumerate(pads):
                first = max(0, pad - (slots - want.shape[2]))
                torch.testing.assert_close(got[row, :, first:], want[row, :, first:], equal_nan=True, **tolerance)


def compare(ours: tuple[Outcome, Any], stock: tuple[Outcome, Any], tallies: Tallies) -> str:
    """What became of the pair: "same", "refused" (by ours) or "both raise".

    Raises:
        AssertionError: they differ.
    """
    (mine, shown), (theirs, wanted) = ours, stock
    by_user = isinstance(theirs.output, OwnError | Stopped)
    if mine.error is not None and is_sentence(mine.output) and (by_user or theirs.error is None):
        tallies.refusals[str(mine.output)] += 1
        return "refused"
    if theirs.error is not None:
        tallies.errors[repr(theirs.output)[:120]] += 1
        assert mine.error is not None, f"stock raises {theirs.output!r}"
        # The user's own may come before what ours would say.
        alike = is_sentence(mine.output) or mine.error in (theirs.error, OwnError, Stopped)
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


def drafted_by(case: dict[str, Any], stock: Outcome, pads: list[int], turn: int) -> tuple[Any, dict[str, Any]]:
    """The drafter of a turn, and the keywords that bring it in."""
    if not case["drafted turns"][turn]:
        return None, {}
    pair = case["target"], case["attention"], case["weights"]
    if case["drafter"] in ("replay", "hostile") and stock.error is None:
        drafter: Any = replay(case, stock.sequences, pads, turn)
    else:
        kind = case["drafter"]
        drafter = drawn.made_drafter(*pair, "head" if kind in ("replay", "hostile", "engine") else kind)
    if case["route"] == "custom_generate" and not case["streamer"] and "stop_strings" not in case["options"]:
        # transformers keeps this from a callable, so that it cannot be refused.
        return drafter, {"custom_generate": drafter.generate} if "synced_gpus" not in case["arguments"] else {}
    drafting = {"assistant": drafter, "trace": case["trace"]}
    return drafter, drafting if case["tree"] is None else {**drafting, "tree_config": case["tree"]}


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
    """Run all turns of a case both ways.

    Raises:
        AssertionError: they differ.
    """
    target = drawn.made_target(case["target"], case["attention"], case["weights"])
    head = made = None
    if case["drafter"] == "engine":
        head = drawn.made_drafter(case["target"], case["attention"], case["weights"], "head")
        made = hf_dart.compile(target, head, backend=None, first_tier=case["first tier"])
    best, kind = 0.0, ""
    inputs = prompt_of(case, target)
    both = theirs, ours = caches(case, target)
    text = inputs.get("input_ids")
    times = case["options"].get("num_return_sequences") or 1
    ends_early = case["target"] in ("gpt2", "opt")  # the table of positions
    ids_alone = "input_ids" in inputs and "inputs_embeds" not in inputs and times == 1
    tolerance = _IN_FP32 if drawn.TARGETS[case["target"]][0] in drawn.FP32 else CLOSE
    try:
        for turn in range(case["turns"] if ids_alone and theirs is not None else 1):
            mask = inputs.get("attention_mask")
            pads = [0] * len(inputs.get("input_ids", [[]])) if mask is None else (mask == 0).sum(-1).tolist()
            pads = [pad for pad in pads for _ in range(max(1, times))]
            with configs_put_back(target):
                stock = call(case, target, inputs, case["seed"] + turn, theirs, {})
            before = snapshot(target)  # by now stock has made what it makes at first use, such as long frequencies
            drafter, drafting = drafted_by(case, stock[0], pads, turn)
            mine = call(case, target, inputs, case["seed"] + turn, ours, drafting)
            assert snapshot(target) == before, "the target was changed"
            if mine[0].error is None and stock[0].error is IndexError and len(mine[0].sequences) > 1 and ends_early:
                break  # stock runs a row that has ended on, past the end of the table
            kind = compare(mine, stock, tallies)
            tallies.kinds[kind] += 1
            if kind != "same":
                break
            if not isinstance(stock[0].output, Tensor):
                assert_same_cache(mine[0].output.past_key_values, stock[0].output.past_key_values, pads, tolerance)
            if theirs is not None:
                assert_same_cache(ours, theirs, pads, tolerance)
            if drafting and drafter.last_stats is not None and drafter.last_stats.rounds:
                best = max(best, drafter.last_stats.tau)
                FUZZED.add(drafter.last_stats)
            if turn + 1 < case["turns"] and ids_alone and theirs is not None:
                text = torch.cat([text, stock[0].sequences[:, inputs["input_ids"].shape[1] :]], dim=1)
                text = follow_up(case, inputs, text, both, case["seed"] + turn)
        if best:
            tallies.taus.append(best)
        if made is not None:
            tallies.kinds["captured"] += any(made.tiers)
    finally:
        if head is not None:
            head.engine = None


def follow_up(case: dict[str, Any], inputs: dict[str, Any], text: Tensor, both: list[Any], seed: int) -> Tensor:
    """Put four more tokens after the text; rows that ended early have visible pads inside.

    Args:
        inputs: of the last turn; those of the next one when this returns.
        text: [B, T] all that was said before the last turn, and its ids.
        both: the caches of both sides.

    Returns:
        [B, T'] the same for the next turn.
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


def failure_of(seed: int, index: int, tallies: Tallies, drafter: str | None = None) -> str | None:
    """How a case differs, with the line that runs it again; None if it does not."""
    case = drawn.draw(seed, index, drafter)
    try:
        run_case(case, tallies)
    except Exception as error:
        again = f"PYTHONPATH=tests python tests/exact/test_fuzz_generate.py {seed} {index}"
        again += f" --drafter {drafter}" if drafter else ""
        return f"{again}\n  {case['target']}, {case['drafter']}: {type(error).__name__}: {error}"
    return None


def many(seed: int, drafter: str | None = None, cases: int = 300) -> Tallies:
    """That many cases of a seed, counted.

    Raises:
        AssertionError: some differ, or too few returned, or had drafts accepted, to show anything.
    """
    tallies = Tallies()
    found = (failure_of(seed, index, tallies, drafter) for index in range(cases))
    failures = [failure for failure in found if failure is not None]
    assert not failures, "\n".join([*failures, str(tallies)])
    # Well below what any seed has shown: they tell that something is no longer drawn, not how often it should be.
    assert tallies.kinds["same"] > cases / 2, tallies
    if drafter is not None:
        assert drafter != "engine" or tallies.kinds["captured"] > cases / 20, tallies
        return tallies
    assert sum(tau > 1.3 for tau in tallies.taus) > cases / 4, tallies
    assert tallies.kinds["refused"] < cases / 6, tallies
    assert tallies.kinds["both raise"] > cases / 10, tallies
    assert tallies.kinds["captured"] > cases / 100, tallies
    return tallies


def test_any_call() -> None:
    many(0)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_calls(seed: int) -> None:
    many(seed)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("drafter", ["engine", "diffusion", "eagle"])
def test_many_calls_of_one_drafter(drafter: str, seed: int) -> None:
    many(seed, drafter)


def test_every_option_and_argument_is_drawn() -> None:
    """A new release of transformers may have others."""
    drawn_fields = {"do_sample", *drawn.SAMPLING, *drawn.FIELDS, *(name for name, _ in drawn.ODD)}
    older = {"_commit_hash"}  # a note of older releases
    assert set(vars(GenerationConfig())) - drawn_fields - older == drawn.ELSEWHERE
    arguments = {
        "self", "inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
        "synced_gpus", "assistant_model", "streamer", "negative_prompt_ids", "negative_prompt_attention_mask",
        "custom_generate", "kwargs",
    }  # fmt: skip
    assert set(inspect.signature(GenerationMixin.generate).parameters) == arguments


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("index", type=int, nargs="?")
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--drafter")
    given = parser.parse_args()
    counted = Tallies()
    if given.index is not None:
        drawn_case = drawn.draw(given.seed, given.index, given.drafter)
        print(*(f"{name}: {value!r}" for name, value in drawn_case.items()), sep="\n")
    for number in range(given.cases) if given.index is None else [given.index]:
        if (failure := failure_of(given.seed, number, counted, given.drafter)) is not None:
            print(failure, flush=True)
    for what, texts in (("refused", counted.refusals), ("both raise", counted.errors)):
        print(*(f"{what} {count} x: {text}" for text, count in texts.most_common()), sep="\n")
    print(counted)
