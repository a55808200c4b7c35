"""A call that is broken off, wherever: target, head, cache and generator stay usable and at one and the same token.

What is promised of a cache that was passed in: after a failure in the prefill it is as it was; later it holds the
prompt and a beginning of what has been generated, never as much as the generator has drawn tokens for. So the text
up to that token, the cache and the generator together go on exactly where the call was broken off.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from compare import assert_identical, run
from test_attach import snapshot
from test_caches import CLOSE
from test_exact import replay
from test_turns import KINDS, RAGGED
from tiny import prompts, tiny_head, tiny_target
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StaticCache, StoppingCriteria
from transformers.cache_utils import StaticLayer
from transformers.generation.streamers import BaseStreamer

import hf_dart.generation
from hf_dart import DartHead
from hf_dart.generation.attach import attach
from hf_dart.generation.cache import RaggedCache, RightAlignedCache
from hf_dart.generation.stock_layers import attention_layers, held_by, undone_on_failure

TOKENS = 15
GREEDY = {"do_sample": False, "max_new_tokens": TOKENS}
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": TOKENS}


def used(family: str) -> tuple[Any, DartHead]:
    """A target and its head behind a first call, at which transformers installs its hooks for hidden states."""
    target = attach(tiny_target(family))
    head = tiny_head(target)
    run(target, prompts([3]), 0, assistant=head, max_new_tokens=2)
    return target, head


@pytest.fixture(scope="module")
def pair() -> tuple[Any, DartHead]:
    return used("gemma3")  # full and sliding layers


class Listener(BaseStreamer):
    """Keeps what it is given; the first put is the prompt."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        pass

    @property
    def tokens(self) -> int:
        return max(0, len(self.heard) - 1)


def states_by_token(batch: int, vocabulary: int, seed: int) -> list[Tensor]:
    """The generator's state after 0, 1, ... tokens of stock sampling."""
    torch.manual_seed(seed)
    states = [torch.get_rng_state()]
    for _ in range(TOKENS):
        torch.multinomial(torch.full((batch, vocabulary), 1 / vocabulary), num_samples=1)
        states.append(torch.get_rng_state())
    return states


def entries(cache: Any) -> list[tuple[Tensor, Tensor]]:
    return [held_by(layer) for layer in attention_layers(cache) if layer.is_initialized]


def assert_holds_a_prefix(target: Any, cache: Any, inputs: dict[str, Tensor], text: Tensor) -> int:
    """All layers end at the same slot, and hold what the plain forward would have put there; returns that slot."""
    held = {int(layer.get_seq_length()) for layer in attention_layers(cache)}
    assert len(held) == 1
    slots = held.pop()
    if slots == 0:
        return 0
    mask = torch.ones(len(text), slots, dtype=torch.long)
    mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    plain = DynamicCache(config=target.config)
    with torch.no_grad():
        target(
            input_ids=text[:, :slots],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=plain,
            use_cache=True,
        )
    for ours, stock in zip(entries(cache), entries(plain), strict=True):
        for got, want in zip(ours, stock, strict=True):
            kept = min(got.shape[2], want.shape[2])
            for row, pad in enumerate((inputs["attention_mask"] == 0).sum(-1).tolist()):
                first = max(0, pad - (slots - kept))
                torch.testing.assert_close(
                    got[row, :, got.shape[2] - kept + first :], want[row, :, want.shape[2] - kept + first :], **CLOSE
                )
    return slots


def assert_goes_on(
    target: Any, cache: Any, inputs: dict[str, Tensor], stock: Tensor, token: int, **options: Any
) -> None:
    """From `token` on, with that cache and the generator as it is, the rest of stock's text comes out."""
    prompt = inputs["input_ids"].shape[1]
    text = stock[:, : prompt + token]
    slots = assert_holds_a_prefix(target, cache, inputs, text)
    assert prompt <= slots < prompt + max(token, 1) or slots == token == 0
    if slots == prompt + token or token == TOKENS:
        return  # nothing to run, or nothing left
    seen = torch.ones(len(text), token, dtype=torch.long)
    mask = torch.cat([inputs["attention_mask"], seen], dim=1)
    options = {**options, "max_new_tokens": TOKENS - token}
    rest = target.generate(input_ids=text, attention_mask=mask, past_key_values=cache, **options)
    assert torch.equal(rest, stock)


# ---- the user breaks off ----------------------------------------------------------------------------------

_OURS = str(Path(hf_dart.generation.__file__).parent.parent)


@contextmanager
def interrupted_at(line: int) -> Any:
    """Raise KeyboardInterrupt when the `line`-th line of this package is about to run; yields the count so far."""
    passed = [0]

    def watch(frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        if event == "line":
            passed[0] += 1
            if passed[0] == line:
                raise KeyboardInterrupt
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield passed
    finally:
        sys.settrace(before)


def interrupt(
    family: str, kind: str, lengths: list[int], sampled: bool, cases: int, seed: int, **more: Any
) -> list[int]:
    """Break calls off at that many lines; returns how many tokens had been generated in each."""
    target, head = used(family)
    inputs, options = prompts(lengths), {**(SAMPLED if sampled else GREEDY), **more}
    stock = run(target, inputs, seed, **options).sequences
    states = states_by_token(len(lengths), target.config.vocab_size, seed)
    drafter = replay(target, inputs, misses=[0.1, 0.7, 0.3, 0.5][: len(lengths)], seed=seed, **options)

    def call(line: int, cache: Any, listener: Listener) -> int:
        with interrupted_at(line) as passed:
            same = copy.deepcopy(drafter)  # it draws its misses
            run(target, inputs, seed, past_key_values=cache, streamer=listener, assistant=same, **options)
        return passed[0]

    total = call(-1, KINDS[kind](target), Listener())
    random = Random(seed)
    reached = []
    for line in sorted(random.randrange(1, total + 1) for _ in range(cases)):
        cache, listener = KINDS[kind](target), Listener()
        with pytest.raises(KeyboardInterrupt):
            call(line, cache, listener)
        token = listener.tokens
        if sampled:
            matches = [index for index, state in enumerate(states) if torch.equal(state, torch.get_rng_state())]
            assert len(matches) == 1, "the generator is at no token of stock's"
            assert token <= matches[0] <= token + 1
            token = matches[0]
        assert_goes_on(target, cache, inputs, stock, token, **options, assistant=head)
        reached.append(token)
    assert_identical(target, head, inputs, seed=seed, **options)
    return reached


@pytest.mark.parametrize(
    ("family", "kind", "lengths", "sampled"),
    [
        ("gemma3", "dynamic", RAGGED, True),
        ("gemma3", "static", [7], True),
        ("gemma3", "static", RAGGED, False),
        ("deepseek_v32", "dynamic", RAGGED, True),
    ],
)
def test_interrupted_anywhere(family: str, kind: str, lengths: list[int], sampled: bool) -> None:
    reached = interrupt(family, kind, lengths, sampled, cases=7, seed=1)
    assert len(set(reached)) > 3


def test_interrupted_anywhere_in_stocks_steps() -> None:
    """With a criterion that is not known, tokens are drawn from the default generator as they come."""
    criterion = FailingCriterion(length=1000)
    reached = interrupt("gemma3", "dynamic", RAGGED, True, cases=7, seed=1, stopping_criteria=[criterion])
    assert len(set(reached)) > 3


@pytest.mark.matrix
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("lengths", [[7], RAGGED])
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "dynamic"), ("gemma3", "dynamic"), ("gemma3", "static"), ("deepseek_v32", "dynamic")],
)
@pytest.mark.parametrize("seed", [2, 3])
def test_interrupted_anywhere_often(family: str, kind: str, lengths: list[int], sampled: bool, seed: int) -> None:
    interrupt(family, kind, lengths, sampled, cases=40, seed=seed)


# ---- something fails --------------------------------------------------------------------------------------


class Broken(Exception):
    pass


class FailingProcessor(LogitsProcessor):
    """Fails when it shall choose the token behind `length` slots."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == self.length:
            raise Broken
        return scores


class FailingCriterion(StoppingCriteria):
    """Fails when it is shown more than `length` slots."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if input_ids.shape[1] > self.length:
            raise Broken
        return torch.zeros(len(input_ids), dtype=torch.bool)


class FailingListener(Listener):
    """Fails at the token behind `tokens` others, which it hears."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.limit = tokens

    def put(self, value: Tensor) -> None:
        super().put(value)
        if self.tokens > self.limit:
            raise Broken


def failing(what: str, slots: int, tokens: int) -> dict[str, Any]:
    """Options of a call that fails behind so many tokens."""
    if what == "streamer":
        return {"streamer": FailingListener(tokens)}
    if what == "processor":
        return {
            "logits_processor": LogitsProcessorList([FailingProcessor(slots + tokens)]),
            "streamer": Listener(),
        }
    return {"stopping_criteria": [FailingCriterion(slots + tokens)], "streamer": Listener()}


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("lengths", [[7], RAGGED])
@pytest.mark.parametrize("what", ["processor", "criterion", "streamer"])
def test_what_the_user_passed_fails(pair: tuple[Any, DartHead], what: str, lengths: list[int], tokens: int) -> None:
    """The generator is where stock's is; one row's streamer has heard the same."""
    target, head = pair
    inputs = prompts(lengths)
    slots = inputs["input_ids"].shape[1]
    text = run(target, inputs, 0, **SAMPLED).sequences
    perfect = replay(target, inputs, misses=[0.0, 1.0, 0.0, 0.5][: len(lengths)], **SAMPLED)
    before = snapshot(target), [weight.sum().item() for weight in head.parameters()]
    heard, states = [], []
    for drafting in ({}, {"assistant": head}, {"assistant": perfect}):
        options = failing(what, slots, tokens)
        cache = DynamicCache(config=target.config)
        with pytest.raises(Broken):
            run(target, inputs, 0, past_key_values=cache, **options, **SAMPLED, **drafting)
        states.append(torch.get_rng_state())
        heard.append(options["streamer"].heard)
        if drafting:
            drawn = tokens if what == "processor" else tokens + 1
            assert_goes_on(target, cache, inputs, text, drawn, **SAMPLED, **drafting)
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])
    if len(lengths) == 1 or what == "streamer":
        assert heard[0] == heard[1] == heard[2]
    assert (snapshot(target), [weight.sum().item() for weight in head.parameters()]) == before
    assert_identical(target, head, inputs, **SAMPLED)


@contextmanager
def out_of_memory(where: Any, name: str, call: int) -> Any:
    """The `call`-th call of a function fails."""
    function = getattr(where, name)
    left = [call]

    def fails(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(where, name, fails)
        yield


def decoder_layer(target: Any) -> Any:
    """The class of the second decoder layer's attention: when it fails, the first has written its entries."""
    return type(target.model.layers[1].self_attn)


@pytest.mark.parametrize("call", [2, 8])
@pytest.mark.parametrize("lengths", [[7], RAGGED])
@pytest.mark.parametrize(("family", "kind"), [("gemma3", "dynamic"), ("gemma3", "static"), ("deepseek_v32", "dynamic")])
def test_out_of_memory_in_the_target(family: str, kind: str, lengths: list[int], call: int) -> None:
    """In the prefill (the second layer of two), and in later rounds."""
    target, head = used(family)
    inputs = prompts(lengths)
    text = run(target, inputs, 0, **SAMPLED).sequences
    states = states_by_token(len(lengths), target.config.vocab_size, 0)
    before = snapshot(target)
    cache, listener = KINDS[kind](target), Listener()
    with out_of_memory(decoder_layer(target), "forward", call), pytest.raises(torch.OutOfMemoryError):
        run(target, inputs, 0, past_key_values=cache, streamer=listener, assistant=head, **SAMPLED)
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
    first = run(target, inputs, 0, past_key_values=cache, assistant=head, **GREEDY).sequences
    ids = torch.cat([first, prompts([14, 14], seed=3)["input_ids"]], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, ids.shape[1] - 9, dtype=torch.long)], dim=1)
    more = {"input_ids": ids, "attention_mask": mask}
    held = copy.deepcopy(entries(cache))
    options = {**GREEDY, "past_key_values": cache, "assistant": head, "prefill_chunk_size": 4}
    with out_of_memory(decoder_layer(target), "forward", 4), pytest.raises(torch.OutOfMemoryError):
        run(target, more, 0, **options)
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {first.shape[1] - 1}
    for before, after in zip(held, entries(cache), strict=True):
        assert torch.equal(before[0], after[0])
        assert torch.equal(before[1], after[1])
    assert torch.equal(run(target, more, 0, **options).sequences, run(target, more, 0, **GREEDY).sequences)


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_out_of_memory_where_the_cache_is_handed_back(pair: tuple[Any, DartHead], kind: str, call: int) -> None:
    """Not one layer is ahead of another then; the cache holds the prompt."""
    target, head = pair
    inputs = prompts(RAGGED)
    text = run(target, inputs, 0, **SAMPLED).sequences
    cache = KINDS[kind](target)
    whole = RaggedCache._append

    def fails_from(self: Any, index: int, layer: Any, grown: int) -> None:
        if index + 1 >= call:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        whole(self, index, layer, grown)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RaggedCache, "_append", fails_from)
        with pytest.raises(torch.OutOfMemoryError):
            run(target, inputs, 0, past_key_values=cache, assistant=head, **SAMPLED)
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {inputs["input_ids"].shape[1]}
    assert_goes_on(target, cache, inputs, text, TOKENS, **SAMPLED)
    torch.manual_seed(0)
    assert_identical(target, head, inputs, **SAMPLED)


@pytest.mark.parametrize("call", [3, 4])
def test_out_of_memory_between_the_layers_of_a_commit(call: int) -> None:
    """What a broken commit left is not read: the cache holds the prompt."""
    target, head = used("deepseek_v32")
    inputs = prompts(RAGGED)
    text = run(target, inputs, 0, **SAMPLED).sequences
    cache, listener = DynamicCache(config=target.config), Listener()
    with out_of_memory(RightAlignedCache, "_keep", call), pytest.raises(torch.OutOfMemoryError):
        run(target, inputs, 0, past_key_values=cache, streamer=listener, assistant=head, **SAMPLED)
    assert listener.tokens > 1
    assert cache.get_seq_length() == inputs["input_ids"].shape[1]
    assert_goes_on(target, cache, inputs, text, listener.tokens, **SAMPLED, assistant=head)
    assert_identical(target, head, inputs, **SAMPLED)


def test_a_failing_drafter(pair: tuple[Any, DartHead]) -> None:
    target, head = pair
    inputs = prompts(RAGGED)
    text = run(target, inputs, 0, **SAMPLED).sequences
    for name, call in (("propose", 1), ("propose", 4), ("extend", 1), ("begin", 1)):
        cache, listener = DynamicCache(config=target.config), Listener()
        with out_of_memory(DartHead, name, call), pytest.raises(torch.OutOfMemoryError):
            run(target, inputs, 0, past_key_values=cache, streamer=listener, assistant=head, **SAMPLED)
        assert_goes_on(target, cache, inputs, text, listener.tokens, **SAMPLED, assistant=head)
        assert_identical(target, head, inputs, **SAMPLED)


# ---- taking back what a stock cache was given -------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 3, 6, 9, 14])
@pytest.mark.parametrize(("family", "make"), [
    ("gemma3", lambda config: DynamicCache(config=config)),
    ("gemma3", lambda config: StaticCache(config=config, max_cache_len=24)),
    ("llama", lambda config: DynamicCache()),
    ("deepseek_v32", lambda config: DynamicCache(config=config)),
])  # fmt: skip
def test_updates_are_undone(family: str, make: Callable[[Any], Any], held: int) -> None:
    """With what a cache of every kind held before, its window full or not, it goes on as if nothing had been."""
    target = tiny_target(family)
    tokens = prompts([20, 20])["input_ids"]
    cache = make(target.config)

    def feed(start: int, stop: int) -> Tensor:
        return target(input_ids=tokens[:, start:stop], past_key_values=cache, use_cache=True).logits

    def break_off() -> None:
        with undone_on_failure(cache):
            feed(held, held + 5)
            raise Broken

    with torch.no_grad():
        if held:
            feed(0, held)
        before = copy.deepcopy(cache)
        addresses = [layer.keys.data_ptr() for layer in cache.layers if isinstance(layer, StaticLayer) and held]
        with pytest.raises(Broken):
            break_off()
        assert [layer.keys.data_ptr() for layer in cache.layers if isinstance(layer, StaticLayer) and held] == addresses
        assert cache.get_seq_length() == before.get_seq_length() == held
        assert len(cache.layers) == len(before.layers)
        got = feed(held, 20)
        cache = before
        assert torch.equal(got, feed(held, 20))
