"""Captured rounds, uncaptured: the round on fixed shapes gives stock's tokens, whatever ends or grows meanwhile.

All in float64 without tolerance. Warnings are errors here: a call that took the eager round would prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.cases import batch
from support.compare import assert_identical, run, tally
from support.engines import engine
from support.tiny import VOCABULARY, prompts, tiny_head, tiny_target
from support.users import TOKENIZER
from transformers import DynamicCache, TextStreamer

from hf_dart import TreeConfig
from hf_dart.engine.engine import Engine
from hf_dart.engine.state import Shape

pytestmark = pytest.mark.filterwarnings("error::UserWarning")
FIXED = tally("float64, rounds on fixed shapes")
GREEDY = {"do_sample": False, "max_new_tokens": 30}
ENDS = {"eos_token_id": [3, 11, 19, 27], "pad_token_id": 0}
TREE = TreeConfig(nodes=13)


def sizes(made: Engine) -> set[int]:
    """The tiers that were used."""
    return {tier.shape.slots for tier in made.tiers if tier is not None}


@pytest.fixture(scope="module")
def qwen() -> tuple[Any, Any]:
    target = tiny_target("qwen3")
    return target, tiny_head(target)


@pytest.fixture
def pair(qwen: tuple[Any, Any]) -> Iterator[tuple[Any, Any]]:
    yield qwen
    qwen[1].engine = None


def families(family: str, attention: str = "sdpa") -> None:
    target = tiny_target(family, attention)
    head = tiny_head(target)
    made = engine(target, head, lag=1)
    for size in (1, 4):
        inputs = batch(size, attention)
        assert_identical(target, head, inputs, into=FIXED, tree_config=TREE, **GREEDY)
        assert_identical(target, head, inputs, into=FIXED, tree_config=TREE, **GREEDY, **ENDS)
    # Texts of 7 to 13 tokens and 30 more: they cross from tier to tier.
    assert sizes(made) >= {32, 64}


def test_layers_of_two_kinds() -> None:
    families("gemma3")


@pytest.mark.matrix
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "mistral", "gpt2", "gemma2", "gpt_oss", "gemma4_shared", "cohere2", "qwen3_moe", "deepseek_v3"],
)
def test_more_families(family: str, attention: str) -> None:
    if family in ("gemma2", "gpt_oss") and attention == "sdpa":
        pytest.skip("stock has no SDPA for it")
    families(family, attention)


@pytest.mark.parametrize("lag", [0, 2])
def test_the_host_may_read_late(pair: tuple[Any, Any], lag: int) -> None:
    target, head = pair
    engine(target, head, lag=lag, first_tier=64)
    assert_identical(target, head, batch(4, "sdpa"), into=FIXED, tree_config=TREE, **GREEDY, **ENDS)


@pytest.mark.parametrize("nodes", [1, 2, 40])
def test_trees_of_every_size(pair: tuple[Any, Any], nodes: int) -> None:
    target, head = pair
    engine(target, head, first_tier=64)
    assert_identical(target, head, batch(4, "sdpa"), tree_config=TreeConfig(nodes=nodes), into=FIXED, **GREEDY)
    assert head.last_stats.rounds


def test_short_lengths(pair: tuple[Any, Any]) -> None:
    """Every place that a length limit can cut a tree, with rows of different lengths."""
    target, head = pair
    engine(target, head, first_tier=64, lag=1)
    for length in range(1, 8):
        assert_identical(target, head, batch(4, "sdpa"), do_sample=False, max_new_tokens=length, tree_config=TREE)


def test_an_end_inside_the_tree(pair: tuple[Any, Any]) -> None:
    """Every token of the text ends it once: also those that lie inside an accepted path."""
    target, head = pair
    engine(target, head, first_tier=64)
    inputs = batch(1, "sdpa")
    text = run(target, inputs, 0, **GREEDY).sequences[0, inputs["input_ids"].shape[1] :].tolist()
    run(target, inputs, 0, assistant=head, tree_config=TREE, **GREEDY)
    inside, place = set(), 0
    for (count,) in head.last_stats.committed:
        inside |= set(text[place + 1 : place + count])  # drafted; text[0] is the prefill's
        place += count
    assert inside
    for token in inside:
        assert_identical(target, head, inputs, tree_config=TREE, eos_token_id=token, pad_token_id=0, **GREEDY)


@pytest.mark.parametrize("length", [pytest.param(31, marks=pytest.mark.matrix), 32, 33])
def test_up_to_the_end_of_the_position_table(length: int) -> None:
    target = tiny_target("gpt2", n_positions=32)
    head = tiny_head(target)
    made = engine(target, head, lag=1)
    options = {"do_sample": False, "max_length": length, "tree_config": TREE}
    assert_identical(target, head, batch(4, "sdpa"), **options)
    assert_identical(target, head, batch(4, "sdpa"), **options, **ENDS)
    assert sizes(made)


@pytest.mark.parametrize("seed", range(2))
def test_rows_without_room_in_another_tier(seed: int) -> None:
    """A row stands at the end of the position table, and the others go on in the next tier."""
    target = tiny_target("gpt2", n_positions=32)
    head = tiny_head(target)
    engine(target, head, first_tier=32, lag=0)
    tree = TreeConfig(nodes=40, depth=1, top_k=60)
    inputs = prompts([24 - seed % 2, 3, 5], seed=seed)
    assert_identical(target, head, inputs, into=FIXED, do_sample=False, max_length=33, tree_config=tree)


@pytest.mark.parametrize(
    "fields",
    [
        {"selector_rank": 4, "inject_features": True, "num_layers": 2},
        {"block_attention": "bidirectional", "num_layers": 2},
        pytest.param({"mask_mode": "peagle", "mask_token_id": VOCABULARY - 1}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_heads_of_every_kind(fields: dict[str, Any]) -> None:
    target = tiny_target("llama")
    head = tiny_head(target, **fields)
    if head.selector is not None:
        torch.nn.init.normal_(head.selector.context.weight)
    eager = assert_identical(target, head, batch(4, "sdpa"), tree_config=TreeConfig(nodes=13, lookup=0), **GREEDY)
    taus = [head.last_stats.tau]
    engine(target, head, first_tier=64)
    assert_identical(target, head, batch(4, "sdpa"), tree_config=TreeConfig(nodes=13, lookup=0), **GREEDY)
    taus.append(head.last_stats.tau)
    assert eager
    assert taus[1] == pytest.approx(taus[0], rel=0.1), "the same head drafts about as well on fixed shapes"


def test_a_draft_vocabulary(pair: tuple[Any, Any]) -> None:
    target = pair[0]
    head = tiny_head(target).reduce_vocabulary(range(2, 40))
    engine(target, head, first_tier=64)
    assert_identical(target, head, batch(4, "sdpa"), tree_config=TREE, **GREEDY)
    assert head.last_stats.tau > 1


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    "warpers",
    [
        {"top_k": 0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, **ENDS},
        {"top_k": 0, "repetition_penalty": 1.3, "min_new_tokens": 9, "suppress_tokens": [4, 5], **ENDS},
        pytest.param({"top_k": 0, "min_p": 0.05, "renormalize_logits": True}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_sampled(pair: tuple[Any, Any], warpers: dict[str, Any], size: int) -> None:
    """Stock's tokens with stock's seed, and the generator where stock leaves it, across tiers."""
    target, head = pair
    made = engine(target, head, lag=1)
    options = {"do_sample": True, "max_new_tokens": 30, "tree_config": TREE, **warpers}
    for seed in range(2):
        assert_identical(target, head, batch(size, "sdpa"), seed=seed, into=FIXED, **options)
    assert len(sizes(made)) > 1 or "eos_token_id" in warpers


def test_rows_that_wait_for_slower_ones(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With little noise ahead the faster rows stand still, and draft the same again after that."""
    target, head = pair
    monkeypatch.setattr(Shape, "noise_rows", property(lambda shape: 2))
    made = engine(target, head, first_tier=128, lag=2)
    options = {"do_sample": True, "top_k": 0, "temperature": 0.3, "max_new_tokens": 40, "tree_config": TREE}
    waits = 0
    for seed in range(2):
        assert_identical(target, head, batch(4, "sdpa"), seed=seed, into=FIXED, **options, **ENDS)
        for counts in zip(*head.last_stats.committed, strict=True):
            running = max(number for number, count in enumerate(counts) if count)
            waits += counts[:running].count(0)
    assert waits
    assert sizes(made) == {128}


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.matrix), 4])
def test_processors_of_greedy_calls(pair: tuple[Any, Any], size: int) -> None:
    """What they read of the text is on the device: tokens of the prompt and its padding, and how long it has grown."""
    target, head = pair
    engine(target, head, first_tier=64, lag=1)
    ends = {"eos_token_id": list(range(2, VOCABULARY, 2)), "pad_token_id": 0}
    for processors in (
        {"repetition_penalty": 1.5},
        {"min_length": 20, **ends},
        {"min_new_tokens": 11, "repetition_penalty": 0.8, **ends},
        {"suppress_tokens": list(range(5, 40))},
    ):
        assert_identical(target, head, batch(size, "sdpa"), into=FIXED, tree_config=TREE, **GREEDY, **processors)
    assert_identical(target, head, prompts([12]), tree_config=TREE, min_length=14, **GREEDY, **ends)


@pytest.mark.parametrize(
    "vocabulary", [pytest.param(None, marks=pytest.mark.matrix), range(2, 40)], ids=["all", "some"]
)
def test_a_penalty_is_seen_by_the_draft(vocabulary: range | None) -> None:
    """Ranked under the penalty, as the eager round's drafts are, about as many come true."""
    target = tiny_target("llama")
    head = tiny_head(target).reduce_vocabulary(vocabulary)
    options = {**GREEDY, "max_new_tokens": 40, "repetition_penalty": 1.5, "tree_config": TreeConfig(nodes=13, lookup=0)}
    assert_identical(target, head, batch(4, "sdpa"), **options)
    eager = head.last_stats.tau
    engine(target, head, first_tier=128)
    assert_identical(target, head, batch(4, "sdpa"), **options)
    assert head.last_stats.tau == pytest.approx(eager, rel=0.1)


def test_scores_that_are_no_probabilities(pair: tuple[Any, Any]) -> None:
    """As stock says it, though it shows in the middle of a text; the next call is as if nothing had been."""
    target, head = pair
    made = engine(target, head, first_tier=64, lag=1)
    before = target.lm_head.weight.detach().clone()

    class Poison(TextStreamer):
        told = 0

        def put(self, value: Any) -> None:
            self.told += 1
            if self.told == 6:
                with torch.no_grad():
                    target.lm_head.weight[5] = torch.nan

        def end(self) -> None: ...

    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 20}
    try:
        with pytest.raises(RuntimeError, match="no token can be drawn"):
            target.generate(**batch(1, "sdpa"), streamer=Poison(TOKENIZER), assistant=head, **options)
    finally:
        with torch.no_grad():
            target.lm_head.weight.copy_(before)
    for tier in made.tiers:  # no round was launched over what is no token, which a device does not survive
        assert int(tier.state.roots.min()) >= 0
        assert int(tier.state.next_tokens.min()) >= 0
    assert_identical(target, head, batch(1, "sdpa"), **options)


# ---- what is handed back -------------------------------------------------------------------------------------------


def test_a_cache_that_is_kept(pair: tuple[Any, Any]) -> None:
    """Two turns over one cache: what the captured round leaves there is what stock leaves."""
    target, head = pair
    engine(target, head, lag=1)
    texts = []
    for drafting in ({}, {"assistant": head, "tree_config": TREE}):
        cache = DynamicCache(config=target.config)
        first = target.generate(**prompts([9]), past_key_values=cache, **GREEDY, **drafting)
        longer = torch.cat([first, torch.tensor([[5, 9, 4]])], dim=1)
        inputs = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
        second = target.generate(**inputs, past_key_values=cache, **GREEDY, **drafting)
        texts.append((first.tolist(), second.tolist(), cache.get_seq_length()))
    assert texts[0] == texts[1]


def test_returned_caches_of_ragged_rows(pair: tuple[Any, Any]) -> None:
    target, head = pair
    engine(target, head, lag=1)
    options = {"return_dict_in_generate": True, **GREEDY, **ENDS}
    stock, ours = assert_identical(target, head, batch(4, "sdpa"), tree_config=TREE, **options)
    for left, right in zip(ours.output.past_key_values.layers, stock.output.past_key_values.layers, strict=True):
        torch.testing.assert_close(left.keys, right.keys)
        torch.testing.assert_close(left.values, right.values)


def test_interrupted(pair: tuple[Any, Any]) -> None:
    """A cache that was passed in holds what the streamer was told of, no matter how far ahead the device was."""
    target, head = pair
    engine(target, head, lag=1)

    class Impatient(TextStreamer):
        told = 0

        def put(self, value: Any) -> None:
            self.told += 1
            if self.told == 12:
                raise KeyboardInterrupt

        def end(self) -> None: ...

    lengths = []
    for drafting in ({}, {"assistant": head, "tree_config": TREE}):
        cache = DynamicCache(config=target.config)
        with pytest.raises(KeyboardInterrupt):
            target.generate(**prompts([9]), past_key_values=cache, streamer=Impatient(TOKENIZER), **GREEDY, **drafting)
        lengths.append(cache.get_seq_length())
    assert lengths[0] == lengths[1]
    assert_identical(target, head, batch(1, "sdpa"), tree_config=TREE, **GREEDY)


def test_streamed(pair: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    target, head = pair
    engine(target, head, lag=1)
    texts = []
    for drafting in ({}, {"assistant": head}):
        target.generate(**prompts([9]), streamer=TextStreamer(TOKENIZER), **GREEDY, **drafting)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].strip()
