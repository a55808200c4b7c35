"""A call that is broken off, wherever: target, head, cache and generator stay usable and at one and the same token.

What is promised of a cache that was passed in: after a failure in the prefill it is as it was; later it holds the
prompt and a beginning of what has been generated, never as much as the generator has drawn tokens for. So the text
up to that token, the cache and the generator together go on exactly where the call was broken off.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager, suppress
from itertools import count, product
from threading import RLock
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.cases import replay
from support.compare import assert_identical, run, snapshot
from support.engines import engine
from support.families import needs_running_states
from support.interruptions import (
    GREEDY,
    SAMPLED,
    TOKENS,
    assert_goes_on,
    assert_holds_a_prefix,
    held_entries,
    interrupt,
    interrupted_at,
    states_by_token,
    used,
)
from support.tiny import prompts, tiny_target
from support.turns import KINDS, RAGGED
from support.users import Listener, OwnError, fail
from torch import nn
from transformers import DynamicCache

from hf_dart import DartHead, LookupDrafter, SuffixStore, TreeConfig, attach
from hf_dart.cache.target_cache import TargetCache
from hf_dart.decoding import feed, request, session
from hf_dart.decoding.session import Session
from hf_dart.models.forwards import StandIn, standing_in
from hf_dart.models.stock_steps import CACHE


@pytest.fixture(scope="module")
def pair() -> tuple[Any, DartHead]:
    return used("gemma3")  # full and sliding layers


def failing_criterion(length: int) -> Any:
    """It fails when it is shown more than `length` slots."""
    return lambda ids, scores, **_: fail() if ids.shape[1] > length else torch.zeros(len(ids), dtype=torch.bool)


def failing_processor(length: int) -> Any:
    """It fails when it shall choose the token after `length` slots."""
    return lambda ids, scores: fail() if ids.shape[1] == length else scores


def test_rows_that_part_beyond_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the window of a row of few tokens would show was dropped, as others were ahead: the cache has the prompt."""
    target = attach(tiny_target("mistral", sliding_window=16, max_position_embeddings=2048))
    for weight in target.parameters():
        weight.data *= 0.1 if weight.ndim > 1 else 1  # so small that its text repeats itself
    wrote: list[Any] = []
    limits, write_back = Session.limits, TargetCache.write_back
    monkeypatch.setattr(TargetCache, "write_back", lambda own, grown: [write_back(own, grown), wrote.append(own)])
    monkeypatch.setattr(Session, "limits", lambda one: [min(limits(one)[0], 1), *limits(one)[1:]])  # of few tokens
    inputs = prompts([700, 9])
    cache = DynamicCache(config=target.config)
    options: Any = {"past_key_values": cache, "max_new_tokens": 900, "tree_config": TreeConfig(nodes=16)}
    with pytest.raises(KeyboardInterrupt):
        target.generate(**inputs, **options, assistant=LookupDrafter(), streamer=Listener(300, KeyboardInterrupt))
    (broken,) = wrote
    assert broken.lengths[1] < broken.entries.stores[0].first < broken.lengths[0]
    assert cache.get_seq_length() == 700


# ---- the user breaks off ----------------------------------------------------------------------------------


ATTENTION = product((("llama", "dynamic"), ("gemma3", "dynamic"), ("gemma3", "static")), ([7], RAGGED), (True, False))
STATES = product(("lfm3", "zaya", "qwen3_5", "falcon_h1", "nemotron_h", "jamba"), KINDS, ([7], RAGGED))
LONG, RUNS = pytest.mark.matrix, needs_running_states
CASES = [
    ("gemma3", "dynamic", RAGGED, True, 9, 1),
    ("gemma3", "static", [7], True, 9, 1),
    pytest.param("lfm2", "dynamic", RAGGED, True, 5, 1, marks=RUNS),
    pytest.param("falcon_h1", "dynamic", [7], True, 5, 1, marks=RUNS),
    *(pytest.param(*pair, *case, 40, seed, marks=LONG) for pair, *case in ATTENTION for seed in (2, 3)),
    *(pytest.param(*case, True, 24, 1, marks=[LONG, RUNS]) for case in STATES),
]


@pytest.mark.parametrize(("family", "kind", "lengths", "sampled", "cases", "seed"), CASES)
def test_interrupted_anywhere(family: str, kind: str, lengths: list[int], sampled: bool, cases: int, seed: int) -> None:
    reached = interrupt(family, kind, lengths, sampled, cases=cases, seed=seed)
    assert len(set(reached)) > min(3, cases // 2)


def test_interrupted_anywhere_in_stocks_steps() -> None:
    """With a criterion that is not known, tokens are drawn from the default generator as they come."""
    criterion = failing_criterion(1000)
    reached = interrupt("gemma3", "dynamic", RAGGED, True, cases=7, seed=1, stopping_criteria=[criterion])
    assert len(set(reached)) > 3


def test_no_forward_is_left_in_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those over packed weights would be, which stock's own steps would read."""
    monkeypatch.setattr("hf_dart.models.forwards._INSTALLING", RLock())  # the one of this test alone stays locked
    modules = [nn.Identity() for _ in range(3)]
    for line in count(1):
        with suppress(KeyboardInterrupt), interrupted_at(line) as passed, standing_in(list(map(StandIn, modules))):
            assert line > passed[0] or all(isinstance(vars(module)["forward"], StandIn) for module in modules)
        assert not any("forward" in vars(module) for module in modules)
        if passed[0] < line:
            break
    assert line > 50


@pytest.mark.parametrize(
    ("where", "part"), [(feed, "mask_kinds"), (session, "Verifier"), (session, "Walker"), (session, "row_weights")]
)
def test_a_kept_interruption_holds_no_noise(pair: tuple[Any, DartHead], where: Any, part: str) -> None:
    """Before the first round; notebooks keep the last exception, and with it all that the call held."""
    target, head = pair

    with patch.object(where, part, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt) as kept:
        run(target, prompts(RAGGED), 0, **SAMPLED, assistant=head)
    assert_identical(target, head, prompts(RAGGED), **SAMPLED)
    del kept


# ---- something fails --------------------------------------------------------------------------------------


def failing(what: str, last: int, tokens: int) -> dict[str, Any]:
    """Options of a call that fails after so many tokens, at the slot `last`."""
    streamer = Listener(tokens + 1 if what.startswith("streamer") else None)
    at = {"streamer in step": 999, "processor": last}.get(what)
    if what == "criterion":
        return {"streamer": streamer, "stopping_criteria": [failing_criterion(last)]}
    return {"streamer": streamer, "logits_processor": [] if at is None else [failing_processor(at)]}


@pytest.mark.parametrize(("lengths", "tokens"), [([7], 5), (RAGGED, 0), (RAGGED, 5)])
@pytest.mark.parametrize("what", ["processor", "criterion", "streamer", "streamer in step"])
def test_what_the_user_passed_fails(pair: tuple[Any, DartHead], what: str, lengths: list[int], tokens: int) -> None:
    """The generator is where stock's is; one row's streamer has heard the same."""
    (target, head), inputs, slots = pair, prompts(lengths), max(lengths)
    text = run(target, inputs, 0, **SAMPLED).sequences
    perfect = replay(target, inputs, misses=[0.0, 1.0, 0.0, 0.5][: len(lengths)], **SAMPLED)
    before = snapshot(target), [weight.sum().item() for weight in head.parameters()]
    heard, states = [], []
    for drafting in ({}, {"assistant": head}, {"assistant": perfect}):
        options, cache = failing(what, slots + tokens, tokens), DynamicCache(config=target.config)
        with pytest.raises(OwnError):
            run(target, inputs, 0, **{CACHE: cache}, **options, **SAMPLED, **drafting)
        states.append(torch.get_rng_state())
        heard.append(options["streamer"].calls)
        if drafting:
            drawn = tokens if what == "processor" else tokens + 1
            assert_goes_on(target, cache, inputs, text, drawn, **SAMPLED, **drafting)
    assert all(torch.equal(states[0], state) for state in states[1:])
    if len(lengths) == 1 or what.startswith("streamer"):
        assert heard[0] == heard[1] == heard[2]
    assert (snapshot(target), [weight.sum().item() for weight in head.parameters()]) == before
    assert_identical(target, head, inputs, **SAMPLED)


def test_a_row_has_ended_before(pair: tuple[Any, DartHead]) -> None:
    """The cache holds as much as that row has committed, though the others are further."""
    (target, head), inputs, slots = pair, prompts(RAGGED), max(RAGGED)
    text = run(target, inputs, 0, **GREEDY).sequences
    options = {**GREEDY, "eos_token_id": int(text[0, slots + 4]), "pad_token_id": 0}
    text = run(target, inputs, 0, **options).sequences
    cache = DynamicCache(config=target.config)
    with pytest.raises(OwnError):
        run(target, inputs, 0, **{CACHE: cache}, streamer=Listener(10), assistant=head, **options)
    assert assert_holds_a_prefix(target, cache, inputs, text) == slots + 4


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("lengths", [[7], RAGGED])
def test_a_streamer_fails_amid_captured_rounds(lengths: list[int]) -> None:
    """What was committed in the tier is in the cache that was passed in."""
    target, head = used("llama")
    made = engine(target, head, first_tier=64)
    inputs, options = prompts(lengths), {**SAMPLED, "tree_config": TreeConfig(nodes=8, lookup=0)}
    text = run(target, inputs, 0, **SAMPLED).sequences
    for tokens in range(1, 5):
        cache, listener = DynamicCache(config=target.config), Listener(tokens + 1)
        with pytest.raises(OwnError):
            run(target, inputs, 0, **{CACHE: cache}, streamer=listener, assistant=head, **options)
        held = cache.get_seq_length()
        assert_goes_on(target, cache, inputs, text, tokens + 1, **options, assistant=head)
    assert held > inputs["input_ids"].shape[1]
    assert all(made.tiers)


# ---- memory runs out, or the drafter fails -----------------------------------------------------------------


@contextmanager
def out_of_memory(where: Any, name: str, call: int) -> Any:
    """The `call`-th call of a function fails."""
    function, calls = getattr(where, name), count(1)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(where, name, fails)
        patched.setattr(request, "check_verification", lambda *args: None)  # it would run a patched target first
        yield


@pytest.mark.parametrize(
    ("kind", "lengths", "call"),
    [("dynamic", [7], 2), ("dynamic", RAGGED, 8), ("static", RAGGED, 2), ("static", [7], 8)],
)
def test_out_of_memory_in_the_target(pair: tuple[Any, DartHead], kind: str, lengths: list[int], call: int) -> None:
    """In the prefill (the second layer of two, after the first has written its entries), and in later rounds."""
    (target, head), inputs = pair, prompts(lengths)
    text = run(target, inputs, 0, **SAMPLED).sequences
    states = states_by_token(len(lengths), target.config.vocab_size, 0)
    before = snapshot(target)
    cache, listener = KINDS[kind](target), Listener()
    with out_of_memory(type(target.model.layers[1].self_attn), "forward", call), pytest.raises(torch.OutOfMemoryError):
        run(target, inputs, 0, **{CACHE: cache}, streamer=listener, assistant=head, **SAMPLED)
    assert torch.equal(torch.get_rng_state(), states[listener.tokens])
    assert (listener.tokens == 0) == (call == 2)
    if call > 2:
        assert int(cache.get_seq_length()) > inputs["input_ids"].shape[1]
    assert_goes_on(target, cache, inputs, text, listener.tokens, **SAMPLED, assistant=head)
    assert snapshot(target) == before
    assert_identical(target, head, inputs, **SAMPLED)


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_memory_in_a_later_chunk_of_the_prefill(pair: tuple[Any, DartHead], kind: str) -> None:
    target, head = pair
    cache, inputs = KINDS[kind](target), prompts([9, 5])
    first = run(target, inputs, 0, **{CACHE: cache}, assistant=head, **GREEDY).sequences
    ids = torch.cat([first, prompts([14, 14], seed=3)["input_ids"]], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, ids.shape[1] - 9, dtype=torch.long)], dim=1)
    more = {"input_ids": ids, "attention_mask": mask}
    stocks = copy.deepcopy(cache)
    text = run(target, more, 0, **GREEDY, **{CACHE: stocks}, prefill_chunk_size=4).sequences
    if int(stocks.get_seq_length()) != text.shape[1] - 1:
        pytest.skip("this release of transformers reads a cached prefix again in chunks, which is refused")
    held = copy.deepcopy(held_entries(cache))
    options = {**GREEDY, CACHE: cache, "assistant": head, "prefill_chunk_size": 4}
    with out_of_memory(type(target.model.layers[1].self_attn), "forward", 4), pytest.raises(torch.OutOfMemoryError):
        run(target, more, 0, **options)
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {first.shape[1] - 1}
    assert all(torch.equal(*entries) for entries in zip(held, held_entries(cache), strict=True))
    assert torch.equal(run(target, more, 0, **options).sequences, run(target, more, 0, **GREEDY).sequences)


@pytest.mark.parametrize(("kind", "call"), [("dynamic", 1), ("dynamic", 2), ("static", 2)])
def test_out_of_memory_where_the_cache_is_handed_back(pair: tuple[Any, DartHead], kind: str, call: int) -> None:
    """Not one layer is ahead of another then; the cache holds the prompt."""
    (target, head), inputs = pair, prompts(RAGGED)
    text = run(target, inputs, 0, **SAMPLED).sequences
    cache = KINDS[kind](target)
    whole, store = TargetCache._append, SuffixStore()

    def fails_from(self: Any, stock: Any, own: Any, grown: int) -> None:
        (_, keys), _ = own.parts
        if keys // 2 + 1 >= call:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        whole(self, stock, own, grown)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TargetCache, "_append", fails_from)
        with pytest.raises(torch.OutOfMemoryError):
            run(target, inputs, 0, **{CACHE: cache}, assistant=head, memory=store, **SAMPLED)
    assert store.tokens > 0, "what follows is done, too"
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {inputs["input_ids"].shape[1]}
    assert_goes_on(target, cache, inputs, text, TOKENS, **SAMPLED)
    torch.manual_seed(0)
    assert_identical(target, head, inputs, **SAMPLED)


def test_a_call_without_a_listener(pair: tuple[Any, DartHead]) -> None:
    """The generator is at the token that every row has reached."""
    (target, head), inputs = pair, prompts(RAGGED)
    states = states_by_token(len(RAGGED), target.config.vocab_size, 0)
    drafter = replay(target, inputs, misses=[0.1, 0.7, 0.3, 0.5], **SAMPLED)
    with out_of_memory(type(drafter), "propose", 3), pytest.raises(torch.OutOfMemoryError):
        run(target, inputs, 0, assistant=drafter, **SAMPLED)
    reached = [index for index, state in enumerate(states) if torch.equal(state, torch.get_rng_state())]
    assert reached[0] > 1
    assert_identical(target, head, inputs, **SAMPLED)
