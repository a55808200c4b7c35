"""Texts on the device: copies as `RowLookup` finds them on the host, contexts of n-grams, and rounds that use both."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import batch
from support.compare import assert_identical
from support.tiny import prompts, tiny_head, tiny_target
from test_ngram_scorer import random_table
from torch._dynamo.utils import counters

import hf_dart
from hf_dart import TreeConfig
from hf_dart.engine.text import FixedText
from hf_dart.lookup import RowLookup

pytestmark = pytest.mark.filterwarnings("error::UserWarning")
GREEDY = {"do_sample": False, "max_new_tokens": 40}
ENDS = {"eos_token_id": [3, 11, 19, 27], "pad_token_id": 0}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), vocabulary=st.sampled_from([1, 2, 3, 6]), length=st.integers(1, 12))
def test_copies_are_those_of_the_host(seed: int, vocabulary: int, length: int) -> None:
    """Round by round, with what both have learned of their copies; rows that stand still ask again."""
    numbers = random.Random(seed)
    texts = [[numbers.randrange(vocabulary) for _ in range(numbers.randrange(1, 40))] for _ in range(3)]
    text = FixedText(3, 120, length, torch.device("cpu"))
    text.load(texts)
    lookups = [RowLookup(row) for row in texts]
    for _ in range(6):
        graft = text.copies()
        for row, lookup in enumerate(lookups):
            copied, chance = lookup.suggest(length)
            real = graft.log_chances[row] > -torch.inf
            assert graft.tokens[row][real].tolist() == copied
            assert graft.log_chances[row][real].tolist() == pytest.approx([chance] * len(copied))
            assert real.tolist() == sorted(real.tolist(), reverse=True)
        counts = torch.tensor([numbers.randrange(6) for _ in texts])
        # Now and then what was copied comes true.
        tokens = torch.randint(vocabulary, (3, 5), generator=torch.Generator().manual_seed(numbers.randrange(2**31)))
        if numbers.random() < 0.5:
            tokens[:, : min(length, 5)] = graft.tokens[:, :5]
        text.append(tokens, counts)
        for row, count in enumerate(counts.tolist()):
            texts[row].extend(tokens[row, :count].tolist())
        assert text.last(4).tolist() == [[-1] * (4 - len(row)) + row[-4:] for row in texts]


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("sampled", [False, True])
def test_copied_text(size: int, sampled: bool) -> None:
    """On prompts that repeat themselves; the tokens are stock's, in every tier."""
    target = tiny_target("qwen3")
    head = tiny_head(target, selector_rank=4)
    inputs = {name: part.repeat(1, 3) for name, part in prompts([9] * size).items()}
    hf_dart.compile(target, head, backend=None, first_tier=32, lag=1)
    options = {**GREEDY, "do_sample": sampled, "top_k": 0, "tree_config": TreeConfig(nodes=13, lookup=24), **ENDS}
    assert_identical(target, head, inputs, seed=1, **options)


def test_text_in_a_loop() -> None:
    """A text that goes round and round is copied: nearly as many tokens per round as the eager round's copies bring."""
    target = tiny_target("llama", vocab_size=8)
    head = tiny_head(target)
    options = {**GREEDY, "max_new_tokens": 120}
    inputs = prompts([9], vocabulary=8)
    taus = []
    for lookup in (0, 24):
        made: Any = hf_dart.compile(target, head, backend=None, first_tier=256)
        assert_identical(target, head, inputs, tree_config=TreeConfig(nodes=8, lookup=lookup), **options)
        taus.append(head.last_stats.tau)
        assert made._tiers
    head.engine = None
    target.generate(**inputs, assistant=head, tree_config=TreeConfig(nodes=8, lookup=5), **options)
    assert taus[1] > taus[0] + 0.5
    assert taus[1] == pytest.approx(head.last_stats.tau, rel=0.15)


@pytest.mark.parametrize(
    ("scores", "backend"), [pytest.param("survival", "eager", marks=pytest.mark.matrix), ("paper", None)]
)
def test_an_ngram_table(tmp_path: Path, scores: str, backend: str | None) -> None:
    """Inside the round: one graph without a break, and drafts like the eager round's on the same device."""
    torch._dynamo.reset()
    counters.clear()
    target = tiny_target("llama")
    head = tiny_head(target)
    head.ngram = random_table(tmp_path / "words.ngram")
    tree = TreeConfig(nodes=13, scores=scores, lookup=5)
    made: Any = hf_dart.compile(target, head, backend=backend, first_tier=64)
    assert_identical(target, head, batch(4, "sdpa"), tree_config=tree, **GREEDY)
    assert made._tiers
    assert not made._forwards
    assert not counters["graph_break"]
    before = list(made._tiers.values())
    if backend is None:
        head.ngram = random_table(tmp_path / "others.ngram", seed=1)
        assert_identical(target, head, batch(1, "sdpa"), tree_config=tree, **GREEDY)
        assert not set(before) & set(made._tiers.values())
