"""A call that is broken off, wherever: target, head, cache and generator stay usable and at one and the same token.

What is promised of a cache that was passed in: after a failure in the prefill it is as it was; later it holds the
prompt and a beginning of what has been generated, never as much as the generator has drawn tokens for. So the text
up to that token, the cache and the generator together go on exactly where the call was broken off.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import replay
from support.compare import assert_identical, run
from support.engines import engine
from support.interruptions import (
    GREEDY,
    SAMPLED,
    Broken,
    FailingCriterion,
    Listener,
    assert_goes_on,
    assert_holds_a_prefix,
    interrupt,
    used,
)
from support.outcome import snapshot
from support.tiny import prompts
from support.turns import RAGGED
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from hf_dart import DartHead, TreeConfig
from hf_dart.decoding import feed, session


@pytest.fixture(scope="module")
def pair() -> tuple[Any, DartHead]:
    return used("gemma3")  # full and sliding layers


# ---- the user breaks off ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kind", "lengths", "sampled"),
    [
        ("gemma3", "dynamic", RAGGED, True),
        ("gemma3", "static", [7], True),
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
    ("where", "part"), [(feed, "mask_kinds"), (session, "Verifier"), (session, "Walker"), (session, "row_weights")]
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
    [
        ("llama", "dynamic"),
        ("gemma3", "dynamic"),
        ("gemma3", "static"),
    ],
)
@pytest.mark.parametrize("seed", [2, 3])
def test_interrupted_anywhere_often(family: str, kind: str, lengths: list[int], sampled: bool, seed: int) -> None:
    interrupt(family, kind, lengths, sampled, cases=40, seed=seed)


# ---- something fails --------------------------------------------------------------------------------------


class FailingProcessor(LogitsProcessor):
    """Fails when it shall choose the token after `length` slots."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == self.length:
            raise Broken
        return scores


class FailingListener(Listener):
    """Fails at the token after `tokens` others, which it hears."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.limit = tokens

    def put(self, value: Tensor) -> None:
        super().put(value)
        if self.tokens > self.limit:
            raise Broken


def failing(what: str, slots: int, tokens: int) -> dict[str, Any]:
    """Options of a call that fails after so many tokens."""
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


def test_a_row_has_ended_before(pair: tuple[Any, DartHead]) -> None:
    """The cache holds as much as that row has committed, though the others are further."""
    target, head = pair
    inputs = prompts(RAGGED)
    slots = inputs["input_ids"].shape[1]
    text = run(target, inputs, 0, **GREEDY).sequences
    options = {**GREEDY, "eos_token_id": int(text[0, slots + 4]), "pad_token_id": 0}
    text = run(target, inputs, 0, **options).sequences
    cache = DynamicCache(config=target.config)
    with pytest.raises(Broken):
        run(target, inputs, 0, past_key_values=cache, streamer=FailingListener(9), assistant=head, **options)
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
        cache, listener = DynamicCache(config=target.config), FailingListener(tokens)
        with pytest.raises(Broken):
            run(target, inputs, 0, past_key_values=cache, streamer=listener, assistant=head, **options)
        assert_goes_on(target, cache, inputs, text, tokens + 1, **options, assistant=head)
    assert all(made.tiers)
