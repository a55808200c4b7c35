"""`hf_dart.compile` when something goes wrong: calls go on in the eager round, and memory is given back."""

from __future__ import annotations

import functools
import gc
import warnings
from typing import Any
from weakref import ref

import pytest
import torch
from support.cases import batch
from support.compare import assert_identical
from support.engines import engine as uncaptured
from support.tiny import tiny_head, tiny_target

from hf_dart import TreeConfig
from hf_dart.engine import engine as module
from hf_dart.engine.graphs import Launch

GREEDY = {"do_sample": False, "max_new_tokens": 8}
engine = functools.partial(uncaptured, first_tier=32)


@pytest.fixture
def pair() -> tuple[Any, Any]:
    target = tiny_target("llama")
    return target, tiny_head(target)


def test_what_cannot_be_made(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = pair

    class OutOfMemory(module.Tier):
        def __init__(self, *args: Any) -> None:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(module, "Tier", OutOfMemory)
    engine(target, head)
    with pytest.warns(UserWarning, match=r"could not be made \(OutOfMemoryError: no room\)"):
        assert_identical(target, head, batch(4, "sdpa"), **GREEDY)


def test_other_tiers_make_room(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory runs out while a tier is made, the ones that are kept go, and it is made."""
    target, head = pair
    made = engine(target, head)
    assert_identical(target, head, batch(1, "sdpa"), **GREEDY)

    class Narrow(module.Tier):
        def __init__(self, *args: Any) -> None:
            if made.tiers:
                raise torch.OutOfMemoryError("no room")
            super().__init__(*args)

    monkeypatch.setattr(module, "Tier", Narrow)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_identical(target, head, batch(4, "sdpa"), **GREEDY)
    assert [tier.shape.batch for tier in made.tiers if tier] == [4]


@pytest.mark.parametrize("ready", [False, True])
def test_a_call_that_cannot_be_loaded(pair: tuple[Any, Any], ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the eager round; of the target that says nothing, and the next call may do."""
    target, head = pair
    made = engine(target, head)
    if ready:
        target.generate(**batch(4, "sdpa"), assistant=head, **GREEDY)

    def too_long(*args: Any) -> None:
        raise RuntimeError("no seat for it")

    with monkeypatch.context() as patch:
        patch.setattr(module.Tier, "load", too_long)
        with pytest.warns(UserWarning, match=r"it could not be loaded \(RuntimeError: no seat"):
            assert_identical(target, head, batch(4, "sdpa"), **GREEDY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_identical(target, head, batch(4, "sdpa"), **GREEDY)
    (tier,) = made.tiers
    assert tier is not None
    assert tier.shape.budget


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_round_that_fails(pair: tuple[Any, Any], lag: int, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a text: the eager round goes on from there, and later calls do not try again."""
    target, head = pair
    made = engine(target, head, lag=lag, first_tier=64)
    options = {"do_sample": sampled, "max_new_tokens": 20, "tree_config": TreeConfig(nodes=8, lookup=0)}
    target.generate(**batch(4, "sdpa"), assistant=head, **options)
    wanted = head.last_stats.tau
    (tier,) = made.tiers
    assert tier is not None
    round_of = tier.round
    launched = []

    def fails(tree: Any) -> Any:
        launched.append(1)
        if len(launched) == 3:
            raise torch.OutOfMemoryError("no room left")
        return type(round_of).verify(round_of, tree)

    monkeypatch.setattr(round_of, "verify", fails)
    with pytest.warns(UserWarning, match=r"it failed \(OutOfMemoryError: no room left\)"):
        assert_identical(target, head, batch(4, "sdpa"), **options)
    assert len(launched) == 3
    # The head's cache is as it should be: what it took in for the draft that failed is not in there twice.
    if not sampled:
        assert head.last_stats.tau == pytest.approx(wanted, rel=0.05)
    assert not any(made.tiers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_identical(target, head, batch(4, "sdpa"), **options)


@pytest.mark.parametrize("tried", [False, True])
def test_a_launch_that_does_nothing(pair: tuple[Any, Any], tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph does whose kernels ran somewhere else while it was captured."""
    target, head = pair
    made = engine(target, head)
    monkeypatch.setattr(Launch, "__call__", lambda launch: None)
    reason = "computes something else"
    if tried:
        monkeypatch.setattr(module.Tier, "differs", lambda *args: iter(()))
        reason = "a round brought no token"
    with pytest.warns(UserWarning, match=reason):
        assert_identical(target, head, batch(1, "sdpa"), **GREEDY)
    assert not any(made.tiers)


def test_what_is_released_is_gone(pair: tuple[Any, Any]) -> None:
    target, head = pair
    made = engine(target, head)
    target.generate(**batch(1, "sdpa"), assistant=head, **GREEDY)
    rounds = [ref(tier.round) for tier in made.tiers if tier]
    assert rounds
    gc.disable()
    try:
        made.release()
        assert [one() for one in rounds] == [None] * len(rounds)
    finally:
        gc.enable()
