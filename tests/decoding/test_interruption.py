"""A call that is broken off, wherever: target, head, cache and generator stay usable and at one and the same token.

What is promised of a cache that was passed in: after a failure in the prefill it is as it was; later it holds the
prompt and a beginning of what has been generated, never as much as the generator has drawn tokens for. So the text
up to that token, the cache and the generator together go on exactly where the call was broken off.
"""

from __future__ import annotations

import copy
import sys
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.cases import replay
from support.compare import assert_identical, run
from support.outcome import snapshot
from support.tiny import prompts, tiny_head, tiny_target
from test_tree_caches import CLOSE
from test_turns import KINDS, RAGGED
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_dart.decoding
from hf_dart import DartHead
from hf_dart.cache.stock_layers import attention_layers, held_by
from hf_dart.decoding import prefill, session
from hf_dart.decoding.api import attach

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
    """RoundCache what it is given; the first put is the prompt."""

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

_OURS = str(Path(hf_dart.decoding.__file__).parent.parent)


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
    for line in (1 + int(total * (case + random.random()) / cases) for case in range(cases)):  # spread over all
        cache, listener = KINDS[kind](target), Listener()
        with pytest.raises(KeyboardInterrupt) as kept:  # as notebooks keep it, with all that the call held
            call(line, cache, listener)
        token = listener.tokens
        if sampled:
            left = torch.get_rng_state()
            assert torch.equal(run(target, inputs, seed, **options, assistant=head).sequences, stock), "it still leads"
            torch.set_rng_state(left)
            matches = [index for index, state in enumerate(states) if torch.equal(state, torch.get_rng_state())]
            assert len(matches) == 1, "the generator is at no token of stock's"
            assert token <= matches[0] <= token + 1
            token = matches[0]
        assert_goes_on(target, cache, inputs, stock, token, **options, assistant=head)
        reached.append(token)
        del kept
    assert_identical(target, head, inputs, seed=seed, **options)
    return reached


@pytest.mark.parametrize(
    ("family", "kind", "lengths", "sampled"),
    [
        ("gemma3", "dynamic", RAGGED, True),
        ("gemma3", "static", [7], True),
        ("deepseek_v32", "dynamic", RAGGED, True),
    ],
)
def test_interrupted_anywhere(family: str, kind: str, lengths: list[int], sampled: bool) -> None:
    reached = interrupt(family, kind, lengths, sampled, cases=9, seed=1)
    assert len(set(reached)) > 3


def test_interrupted_anywhere_in_stocks_steps() -> None:
    """With a criterion that is not known, tokens are drawn from the default generator as they come."""
    criterion = FailingCriterion(length=1000)
    reached = interrupt("gemma3", "dynamic", RAGGED, True, cases=7, seed=1, stopping_criteria=[criterion])
    assert len(set(reached)) > 3


@pytest.mark.parametrize(
    ("where", "part"), [(prefill, "mask_kinds"), (prefill, "Verifier"), (prefill, "Walker"), (session, "shares")]
)
def test_a_kept_interruption_holds_no_noise(
    pair: tuple[Any, DartHead], where: Any, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first round; notebooks keep the last exception, and with it all that the call held."""
    target, head = pair

    def interrupts(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    whole = getattr(where, part)
    monkeypatch.setattr(where, part, interrupts)
    with pytest.raises(KeyboardInterrupt) as kept:
        run(target, prompts(RAGGED), 0, **SAMPLED, assistant=head)
    monkeypatch.setattr(where, part, whole)
    assert_identical(target, head, prompts(RAGGED), **SAMPLED)
    del kept


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
