"""Rounds on fixed shapes whose trees follow the text: copies of it, and n-grams after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import batch
from support.compare import assert_identical
from support.ngrams import random_table
from support.tiny import prompts, tiny_head, tiny_target
from torch._dynamo.utils import counters

import hf_dart
from hf_dart import TreeConfig

pytestmark = pytest.mark.filterwarnings("error::UserWarning")
GREEDY = {"do_sample": False, "max_new_tokens": 40}
ENDS = {"eos_token_id": [3, 11, 19, 27], "pad_token_id": 0}


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
        assert made.tiers
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
    assert made.tiers
    assert not made.forwards
    assert not counters["graph_break"]
    before = made.tiers
    if backend is None:
        head.ngram = random_table(tmp_path / "others.ngram", seed=1)
        assert_identical(target, head, batch(1, "sdpa"), tree_config=tree, **GREEDY)
        assert not set(before) & set(made.tiers)
