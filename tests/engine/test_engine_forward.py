"""Eager rounds around a captured forward: calls that ask the host for something, token for token as stock's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.cases import batch
from support.compare import assert_identical, run, tally
from support.engines import engine
from support.tiny import prompts, tiny_diffusion_drafter, tiny_head, tiny_target
from torch._dynamo.utils import counters
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from hf_dart import LookupDrafter, TreeConfig
from hf_dart.decoding.drafter_runner import DrafterRunner
from hf_dart.decoding.pace import PAUSE
from hf_dart.engine.draft_pass import CapturedDraftPass
from hf_dart.engine.engine import Engine
from hf_dart.engine.forward import Forward, SizedForward

FORWARDS = tally("float64, captured forwards")
GREEDY = {"do_sample": False, "max_new_tokens": 24}
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 24}
ENDS = {"eos_token_id": [3, 11, 19, 27], "pad_token_id": 0}


def identical(target: Any, drafter: Any, made: Engine, inputs: dict[str, Any], reason: str, **options: Any) -> None:
    with pytest.warns(UserWarning, match=f"the target's forward alone is captured.*{reason}"):
        assert_identical(target, drafter, inputs, into=FORWARDS, **options)
    assert made.forwards
    assert all(made.forwards)
    assert not made.tiers
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        assert_identical(target, drafter, inputs, seed=1, into=FORWARDS, **{**options, "max_new_tokens": 8})


class Every(LogitsProcessor):
    """Nobody knows what it will do."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - 0.3 * (torch.arange(scores.shape[1]) % (1 + input_ids.shape[1] % 5) == 0)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.matrix), 4])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({**GREEDY, "no_repeat_ngram_size": 2, **ENDS}, "NoRepeatNGram"),
        ({**SAMPLED, "typical_p": 0.9}, "TypicalLogitsWarper"),
        ({**SAMPLED, "logits_processor": LogitsProcessorList([Every()]), **ENDS}, "Every"),
        ({**GREEDY, "return_dict_in_generate": True, "output_scores": True}, "collects every step"),
        ({**GREEDY, "remove_invalid_values": True}, "InfNanRemoveLogitsProcessor"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_calls_that_ask_the_host(options: dict[str, Any], reason: str, size: int) -> None:
    target = tiny_target("qwen3")
    head = tiny_head(target)
    identical(target, head, engine(target, head), batch(size, "sdpa"), reason, **options)


def test_layers_of_two_kinds_and_a_refined_draft() -> None:
    target = tiny_target("gemma3")
    head = tiny_head(target, editor=True)
    tree = TreeConfig(nodes=8, refine=1)
    identical(target, head, engine(target, head), batch(4, "sdpa"), "refined", tree_config=tree, **GREEDY, **ENDS)


def test_other_drafters() -> None:
    target = tiny_target("llama")
    for drafter in (tiny_diffusion_drafter(target), LookupDrafter(TreeConfig(nodes=6, draft_cost=0.0))):
        made = engine(target, drafter)
        identical(target, drafter, made, batch(4, "sdpa"), type(drafter).__name__, **GREEDY)


@pytest.mark.filterwarnings("ignore:Of this call")
def test_a_cache_that_is_kept() -> None:
    """Two turns over one cache, and what lies in it."""
    target = tiny_target("llama")
    head = tiny_head(target)
    engine(target, head)
    kept = []
    for drafting in ({}, {"assistant": head, "remove_invalid_values": True}):
        cache = DynamicCache(config=target.config)
        first = run(target, prompts([9]), 0, past_key_values=cache, **GREEDY, **drafting).sequences
        longer = torch.cat([first, torch.tensor([[5, 9, 4]])], dim=1)
        inputs = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
        second = run(target, inputs, 0, past_key_values=cache, **GREEDY, **drafting).sequences
        kept.append((first.tolist(), second.tolist(), cache))
    assert kept[0][:2] == kept[1][:2]
    for left, right in zip(kept[0][2].layers, kept[1][2].layers, strict=True):
        torch.testing.assert_close(left.keys, right.keys)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_forward_that_fails(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a text: that very round is verified by the eager forward, and later calls do not try again."""
    target = tiny_target("llama")
    head = tiny_head(target)
    made = engine(target, head, first_tier=64)
    options = {**(SAMPLED if sampled else GREEDY), "no_repeat_ngram_size": 3}
    launches = []
    launch = SizedForward.__call__

    def fails(self: Any, *args: Any) -> Any:
        launches.append(1)
        if len(launches) == 5:
            raise torch.OutOfMemoryError("no room left")
        return launch(self, *args)

    monkeypatch.setattr(SizedForward, "__call__", fails)
    with pytest.warns(UserWarning, match=r"it failed \(OutOfMemoryError: no room left\)"):
        assert_identical(target, head, batch(4, "sdpa"), **options)
    assert len(launches) == 5
    assert made.forwards == [None]
    assert_identical(target, head, batch(4, "sdpa"), **options)


@pytest.mark.filterwarnings("ignore:Of this call")
@pytest.mark.parametrize("size", [1, 4])
def test_the_heads_pass(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On buffers of its own, from tier to tier: as good as the eager round's, and as many."""
    target = tiny_target("llama")
    head = tiny_head(target)
    options = {**GREEDY, "tree_config": TreeConfig(nodes=8, lookup=0), "no_repeat_ngram_size": 9}
    assert_identical(target, head, batch(size, "sdpa"), **options)
    eager, rounds = head.last_stats.committed, head.last_stats.rounds
    made = engine(target, head)
    drafts = []
    draft = CapturedDraftPass.__call__
    monkeypatch.setattr(CapturedDraftPass, "__call__", lambda *args: (drafts.append(1), draft(*args))[1])
    assert_identical(target, head, batch(size, "sdpa"), into=FORWARDS, **options)
    assert len(made.forwards) > 1
    assert head.last_stats.committed == eager
    assert len(drafts) == rounds


@pytest.mark.filterwarnings("ignore:Of this call")
@pytest.mark.parametrize("fails", [True, False])
def test_drafts_that_the_head_makes_itself(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its pass fails in the middle of a text, or there are more positions than it has room for.

    It looks at those drafts again with what it has taken in itself.
    """
    target = tiny_target("llama")
    head = tiny_head(target, editor=True)
    options = {**GREEDY, "tree_config": TreeConfig(nodes=8, lookup=0, refine=1), "no_repeat_ngram_size": 9}
    assert_identical(target, head, batch(4, "sdpa"), **options)
    eager = head.last_stats.committed
    made = engine(target, head, first_tier=64)
    drafts = []
    draft = CapturedDraftPass.__call__

    def third(self: Any, *args: Any) -> Any:
        drafts.append(1)
        if len(drafts) == 2 and not fails:
            self.most = 0
        if len(drafts) == 3:
            raise torch.OutOfMemoryError("no room left")
        return draft(self, *args)

    monkeypatch.setattr(CapturedDraftPass, "__call__", third)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert_identical(target, head, batch(4, "sdpa"), **options)
    assert any("it failed (OutOfMemoryError" in str(one.message) for one in told) == fails
    assert head.last_stats.committed == eager
    assert len(drafts) == 2 + fails
    assert all(made.forwards) != fails


@pytest.mark.filterwarnings("ignore:Of this call")
def test_what_is_kept_while_drafting_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head takes in the features of every token, though each launch of a graph writes in the place of the last."""
    step, propose = SizedForward.step, DrafterRunner.propose
    taken: list[torch.Tensor] = []

    def in_place(self: Any, run: Any) -> None:
        before = getattr(self, "_found", None)
        step(self, run)
        if before is not None:
            for place, found in zip(before, self._found, strict=True):
                place.copy_(found)
            self._found = before

    def watched(self: DrafterRunner, seen: Any, level: str) -> Any:
        if len(self.pending) > 1 and level != PAUSE:
            taken.append(torch.cat([features[0, :1] for features, _, _ in self.pending]))
        return propose(self, seen, level)

    monkeypatch.setattr(SizedForward, "step", in_place)
    monkeypatch.setattr(DrafterRunner, "propose", watched)
    target = tiny_target("llama")
    head = tiny_head(target, tree={"nodes": None})
    engine(target, head, first_tier=128)
    options = {"max_new_tokens": 60, "no_repeat_ngram_size": 2, "tree_config": TreeConfig(lookup=0, draft_cost=3.0)}
    assert_identical(target, head, prompts([7]), **{**GREEDY, **options})
    assert len(taken) == 1
    assert len(taken[0].unique(dim=0)) == len(taken[0]) > 40


@pytest.mark.filterwarnings("ignore:Of this call")
def test_interrupted() -> None:
    """What was committed in the forward's own cache is in the one that was passed in."""
    target = tiny_target("llama")
    head = tiny_head(target)
    engine(target, head, first_tier=64)

    class Impatient(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == 20:
                raise KeyboardInterrupt
            return scores

    kept = []
    for drafting in ({}, {"assistant": head}):
        cache = DynamicCache(config=target.config)
        options = {**GREEDY, **drafting, "logits_processor": LogitsProcessorList([Impatient()])}
        with pytest.raises(KeyboardInterrupt):
            target.generate(**prompts([9]), past_key_values=cache, **options)
        kept.append(cache.layers[0].keys)
    width = kept[1].shape[2]
    assert 9 < width <= kept[0].shape[2]
    torch.testing.assert_close(kept[1], kept[0][:, :, :width])


def test_without_a_break() -> None:
    """One graph per size of trees, and per number of positions to draft after."""
    torch._dynamo.reset()
    counters.clear()
    target = tiny_target("llama")
    head = tiny_head(target)
    made = engine(target, head, backend="eager", first_tier=64)
    identical(target, head, made, batch(4, "sdpa"), "NoRepeat", no_repeat_ngram_size=3, **GREEDY)
    (forward,) = made.forwards
    assert isinstance(forward, Forward)
    assert forward.draft_pass is not None
    assert counters["stats"]["unique_graphs"] == len(forward.sizes) + len(forward.draft_pass.sizes)
    assert not counters["graph_break"]
