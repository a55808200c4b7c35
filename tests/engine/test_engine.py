"""`hf_dart.compile`: which calls run captured parts, what the others are told, and what is kept between calls."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from support.cases import batch
from support.compare import assert_identical
from support.engines import compiled_pair, engine
from support.tiny import prompts, tiny_target
from torch import Tensor, nn

import hf_dart
from hf_dart import TreeConfig
from hf_dart.cache.slot_cache import SlotCache
from hf_dart.cache.target_cache import TargetCache
from hf_dart.engine import engine as module
from hf_dart.engine.graphs import Capture
from hf_dart.models.devices import matmul_precision
from hf_dart.models.trial import check_verification

GREEDY = {"do_sample": False, "max_new_tokens": 8}
Trio = tuple[Any, Any, module.Engine]


@pytest.fixture
def pair() -> Trio:
    return compiled_pair("llama", first_tier=32)


def test_what_asks_the_host_while_a_part_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may, the part may not."""
    for name in ("Stream", "graph_pool_handle", "get_sync_debug_mode", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: "default")
    monkeypatch.setattr(Capture, "_captured", lambda self, step, stream: SimpleNamespace(replay=step))
    capture = Capture(module.EngineConfig(backend=None), torch.device("cuda"))

    def asks(run: Any = None) -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    capture.launched(lambda run: ThreadPoolExecutor(1).submit(asks).result(), lambda: None)
    with pytest.raises(RuntimeError, match="asks the host"):
        capture.launched(asks, lambda: None)


def test_collected_hidden_states(pair: Trio) -> None:
    target, head, made = pair
    options = {**GREEDY, "return_dict_in_generate": True, "output_hidden_states": True}
    with pytest.warns(UserWarning, match="it collects hidden states"):
        assert_identical(target, head, batch(1, "sdpa"), **options)
    assert not made.tiers
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        assert_identical(target, head, batch(1, "sdpa"), **options)


def test_another_target(pair: Trio) -> None:
    """A head that was compiled with one target serves a copy of it as before."""
    target, head, made = pair
    assert_identical(copy.deepcopy(target), head, batch(1, "sdpa"), **GREEDY)
    assert not any(made.tiers)


def test_the_prompt_is_held_once(pair: Trio, noted: Any) -> None:
    """While rounds run in a tier, the call's own cache holds nothing."""
    target, head, _ = pair
    caches = noted(SlotCache, "release", lambda cache: cache)
    held = noted(module, "one_round", lambda _: caches[-1].store.storage.numel())
    assert_identical(target, head, prompts([20, 9]), do_sample=False, max_new_tokens=30)
    assert len(held) > 1
    assert set(held) == {0}


class Counts(nn.Sequential):
    """A module that counts its calls: it does not change by them."""

    seen = 0

    def forward(self, states: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(states)


@torch.no_grad()
def write(weight: Tensor) -> None:
    weight.mul_(1.5)


def scale(part: Any) -> None:
    forward = part.forward
    part.forward = lambda states: 2 * forward(states)


# What happens to a target and a head, and whether everything is made again. What the head has made of its own weights
# and of those that it borrows, graphs hold as it was.
CHANGES: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "a weight in place": (lambda target, head: write(target.model.norm.weight), False),
    "another weight": (
        lambda target, head: setattr(target.lm_head, "weight", nn.Parameter(target.lm_head.weight.detach().flip(0))),
        True,
    ),
    "a weight that the head borrows": (lambda target, head: write(target.lm_head.weight), True),
    "a weight of the head": (lambda target, head: write(next(head.parameters())), True),
    "a function": (lambda target, head: setattr(target.model.layers[0].mlp, "act_fn", nn.Tanh()), True),
    "code": (lambda target, head: scale(target.model.layers[0].mlp), True),
    "another thing, as the user says": (lambda target, head: hf_dart.attach(target), True),
    "a module": (lambda target, head: setattr(target.model, "norm", Counts(target.model.norm).eval()), True),
    # transformers' own hooks stay from here on
    "hidden states": (lambda target, head: target(**prompts([7]), output_hidden_states=True), False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_makes_parts_again(pair: Trio, change: str) -> None:
    target, head, made = pair
    act, again = CHANGES[change]
    assert_identical(target, head, batch(1, "sdpa"), **GREEDY)
    before = made.tiers
    act(target, head)
    for _ in range(2):
        assert_identical(target, head, batch(1, "sdpa"), **GREEDY)
        assert (made.tiers != before) == again
        before, again = made.tiers, False


def test_what_is_kept(pair: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields that shapes do not depend on make no tiers again, and old tiers go."""
    target, head, made = pair
    monkeypatch.setattr(module, "_KEPT", 2)
    # The second is as the first; 20 is the one that was not used for longest when 30 comes.
    for nodes, cost in ((8, 0.03), (8, 0.04), (20, 0.04), (8, 0.05), (30, 0.04)):
        tree = TreeConfig(nodes=nodes, node_cost=cost, draft_cost=cost, ngram_weight=cost)
        target.generate(**prompts([7]), assistant=head, tree_config=tree, **GREEDY)
    assert [tier.nodes for tier in made.tiers if tier] == [8, 32]


def test_hooks_and_autocast(pair: Trio) -> None:
    target, head, made = pair
    target.generate(**prompts([7]), assistant=head, **GREEDY)
    before = made.tiers
    handle = target.model.layers[0].register_forward_hook(lambda layer, inputs, output: output * 2)
    with pytest.warns(UserWarning, match="forward hooks"):
        assert_identical(target, head, prompts([7]), **GREEDY)
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        target.generate(**prompts([7]), assistant=head, **GREEDY)
    assert made.tiers != before


def test_switches_of_precision(pair: Trio) -> None:
    """Those of each backend, with which the one of all raises; other graphs after them."""
    target, head, made = pair
    target.generate(**prompts([7]), assistant=head, **GREEDY)
    before = made.tiers
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert matmul_precision()[0] == "tf32"
        check_verification(tiny_target("qwen3"))
        assert_identical(target, head, prompts([7]), **GREEDY)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert made.tiers != before


def test_copies_have_none(pair: Trio) -> None:
    target, head, made = pair
    assert copy.deepcopy(head).engine is None
    assert pickle.loads(pickle.dumps(made)) is None
    made.release()
    head.engine = None
    assert_identical(target, head, batch(1, "sdpa"), **GREEDY)


def test_progress_and_mistakes(pair: Trio) -> None:
    target, head, _ = pair
    told: list[str] = []
    engine(target, head, first_tier=32, progress=told.append)
    assert_identical(target, head, batch(1, "sdpa"), tree_config=TreeConfig(nodes=9), **GREEDY)
    begun, done = told
    assert begun == "hf_dart: preparing forwards of 16 nodes for 1 row(s) of up to 32 tokens"
    assert re.fullmatch(r"hf_dart: prepared in \d+ s, for all such calls of this process", done)
    with pytest.raises(TypeError, match="not Linear"):
        hf_dart.compile(target, nn.Linear(1, 1))
    with pytest.raises(ValueError, match="first_tier is 3"):
        engine(target, head, first_tier=3)
    with pytest.raises(ValueError, match="made for"):
        engine(tiny_target("llama", hidden_size=16), head)


def failing(*args: Any) -> None:
    raise torch.OutOfMemoryError("no room")


def test_what_cannot_be_made_or_loaded(pair: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs uncompiled; of the target, a call that cannot be loaded says nothing, and the next one may do."""
    target, head, made = pair
    for owner, name, sentence in ((TargetCache, "take_rows", "loaded"), (module.Tier, "__init__", "made")):
        target.generate(**batch(4, "sdpa"), assistant=head, **GREEDY)
        if owner is module.Tier:
            made.release()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            with pytest.warns(UserWarning, match=rf"it could not be {sentence} \(OutOfMemoryError: no room\)"):
                assert_identical(target, head, batch(4, "sdpa"), **GREEDY)
        assert all(made.tiers) == (owner is TargetCache)
        assert not any(tier and tier._session for tier in made.tiers), "the call's caches are freed"


def test_other_tiers_make_room(pair: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory runs out while a tier is made, the ones that are kept go, and it is made."""
    target, head, made = pair
    assert_identical(target, head, batch(1, "sdpa"), **GREEDY)
    make = module.Tier.__init__
    monkeypatch.setattr(module.Tier, "__init__", lambda *args: failing() if made.tiers else make(*args))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_identical(target, head, batch(4, "sdpa"), **GREEDY)
    assert len(made.tiers) == 1


def test_a_launch_that_does_nothing(pair: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph does whose kernels ran somewhere else while it was captured."""
    target, head, made = pair
    monkeypatch.setattr(Capture, "launched", lambda _, step, run: step(run) or (lambda: None))
    with pytest.warns(UserWarning, match="computes something else"):
        assert_identical(target, head, batch(1, "sdpa"), **GREEDY)
    assert made.tiers == [None]


def test_what_is_released_is_gone(pair: Trio) -> None:
    target, head, made = pair
    target.generate(**batch(1, "sdpa"), assistant=head, **GREEDY)
    rounds = [ref(part) for tier in made.tiers if tier for part in tier.forwards.values()]
    assert rounds
    gc.disable()
    try:
        made.release()
        assert [one() for one in rounds] == [None] * len(rounds)
    finally:
        gc.enable()
