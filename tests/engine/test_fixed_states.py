"""Targets with running states on fixed shapes: states of rows in buffers, written after what each round accepts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import MODES, batch
from support.compare import assert_identical, assert_identical_up_to_near_ties, same, tally
from support.engines import compiled_pair
from support.families import needs_running_states
from support.simulated_gpu import needs_a_driver
from support.tiny import tiny_head, tiny_target
from support.turns import KINDS, RAGGED, two_turns
from transformers import DynamicCache

import hf_dart
from hf_dart import TreeConfig
from hf_dart.cache.states import FixedStates, states_of
from hf_dart.models.running_states import families, tree_forward
from hf_dart.models.stock_steps import CACHE

pytestmark = [needs_running_states, pytest.mark.filterwarnings("error:This call runs uncompiled")]
EXACT = tally("float64, running states on fixed shapes")
TREE = TreeConfig(nodes=13)
MORE = ["qwen3_next", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "lfm2_moe", "lfm3"]
FAMILIES = ["qwen3_5", "lfm2", *(pytest.param(name, marks=pytest.mark.matrix) for name in MORE)]


@pytest.fixture(autouse=True)
def rounds_as_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules run at once in float64, too, although they round to float32 inside."""
    monkeypatch.setattr(families, "WIDEST_RULE", torch.float64)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_rounds(family: str) -> None:
    """Texts of several lengths cross tiers; rows end at different times, and trees of one node are taken too."""
    target, head, made = compiled_pair(family)
    ends = {"eos_token_id": [3, 11], "pad_token_id": 0}
    for size, mode, options in ((4, "T=1", {}), (1, "T=1", {}), (4, "greedy", ends), (4, "greedy", {})):
        options = {**MODES[mode], "max_new_tokens": 24, **options}
        assert_identical(target, head, batch(size, "sdpa"), into=EXACT, tree_config=TREE, **options)
        assert mode == "greedy" or head.last_stats.tau > 1.3
    assert_identical(target, head, batch(4, "sdpa"), tree_config=TreeConfig(nodes=1), **MODES["T=1"], max_new_tokens=6)
    assert all(made.tiers)
    assert {tier.slots for tier in made.tiers if tier is not None} >= {32, 64}


@pytest.mark.parametrize("lengths", [[7], pytest.param(RAGGED, marks=pytest.mark.matrix)], ids=str)
def test_a_cache_that_is_handed_back(lengths: list[int]) -> None:
    """Its states are stock's, and another call goes on from it."""
    target, head, made = compiled_pair("qwen3_5")
    mode = {"do_sample": True, "max_new_tokens": 9, "tree_config": TREE}
    (stock, *plain), (ours, *drafted) = (
        two_turns(target, KINDS["dynamic"], lengths, (drafter, drafter), mode) for drafter in (None, head)
    )
    for turn, wanted in zip(drafted, plain, strict=True):
        same(turn, wanted)
    states = (cache.layers[0].recurrent_states[0] for cache in (ours, stock))
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-5)
    assert made.tiers


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("qwen3_5", "eager"),
        *(pytest.param(family, "aot_eager", marks=pytest.mark.matrix) for family in ("qwen3_5", "lfm2")),
    ],
)
def test_compiled(family: str, backend: str) -> None:
    """The parts of a round, each as one graph."""
    target, head, made = compiled_pair(family, backend=backend, first_tier=64)
    options = {**MODES["T=1"], "max_new_tokens": 20}
    assert_identical(target, head, batch(4, "sdpa"), into=EXACT, tree_config=TREE, **options)
    assert head.last_stats.tau > 1.3
    assert made.tiers
    assert all(made.tiers)


@needs_a_driver
@pytest.mark.gpu
@pytest.mark.usefixtures("full_fp32")
def test_captured_forwards_of_several_sizes() -> None:
    """A commit takes the states of the nodes of the forward that was launched, not of the one that was made last."""
    target: Any = tiny_target("lfm2", "sdpa", torch.float32).to("cuda")
    head = tiny_head(target)
    made = hf_dart.compile(target, head, backend=None, first_tier=64)
    inputs = {name: ids.to("cuda") for name, ids in batch(1, "sdpa").items()}
    into = tally("fp32, running states captured")
    small = TreeConfig(nodes=16, depth=1, top_k=3, lookup=0)
    for tree in (TreeConfig(nodes=16), small, TreeConfig(nodes=16)):
        options = {**MODES["T=1"], "max_new_tokens": 16, "no_repeat_ngram_size": 20, "tree_config": tree}
        assert_identical_up_to_near_ties(target, head, inputs, into=into, label="sizes", **options)
        assert head.last_stats.tau > 1.3
    (tier,) = made.tiers
    assert len(tier.forwards) > 2


def test_broken_off_amid_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache that was passed in holds the prompt: what some layers have taken in since cannot be read.

    Later calls run on the same tier.
    """
    target, head, made = compiled_pair("lfm2", first_tier=64)
    inputs, options = batch(1, "sdpa"), {**MODES["greedy"], "max_new_tokens": 20}
    whole = target.generate(**inputs, assistant=head, **options)
    before, cache = (DynamicCache(config=target.config) for _ in range(2))
    with torch.no_grad():
        target(**inputs, **{CACHE: before})
    commits: list[None] = []
    commit = FixedStates.commit

    def interrupted(self: FixedStates, path: Any, counts: list[int]) -> None:
        commits.append(None)
        if len(commits) < 4:
            return commit(self, path, counts)
        slot, state = next(iter(self.after(path, counts).items()))
        self.committed[slot].copy_(state)
        raise KeyboardInterrupt

    monkeypatch.setattr(FixedStates, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        target.generate(**inputs, **{CACHE: cache}, assistant=head, **options)
    assert cache.get_seq_length() == inputs["input_ids"].shape[1]
    for slot, state in states_of(before).items():
        torch.testing.assert_close(states_of(cache)[slot], state)
    monkeypatch.undo()
    tiers = [*made.tiers]
    assert torch.equal(target.generate(**inputs, assistant=head, **options), whole)
    assert [*made.tiers] == tiers


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
def test_trees_that_go_by_levels_run_uncompiled(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are too large, and all of Mamba."""
    monkeypatch.setattr(tree_forward, "MOST", 9)
    target, head, made = compiled_pair(family)
    with pytest.warns(UserWarning, match="This call runs uncompiled: .*level by level"):
        assert_identical(target, head, batch(1, "sdpa"), tree_config=TREE, **MODES["greedy"], max_new_tokens=8)
    assert not any(made.tiers)
