"""No graph break: `torch.compile(fullgraph=True)` raises wherever a part would read something back to the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import batch
from support.compare import assert_identical
from support.tiny import tiny_head, tiny_target
from torch._dynamo.utils import counters

import hf_dart
from hf_dart import TreeConfig
from hf_dart.engine.engine import Engine

pytestmark = pytest.mark.filterwarnings("error:This call runs uncompiled")
GREEDY = {"do_sample": False, "max_new_tokens": 24, "tree_config": TreeConfig(nodes=8)}


def compiled(family: str, backend: str, **head: Any) -> tuple[Any, Any, Engine]:
    torch._dynamo.reset()
    counters.clear()
    target = tiny_target(family)
    drafter = tiny_head(target, **head)
    return target, drafter, hf_dart.compile(target, drafter, backend=backend, first_tier=64)


def parts(made: Engine) -> int:
    return sum(len(tier.forwards) + len(tier.drafts) for tier in made.tiers if tier is not None)


def test_one_graph_without_a_break() -> None:
    """One for each size of trees, and one for drafts; whatever the call asks of the host."""
    target, head, made = compiled("qwen3", "eager")
    ends = {"eos_token_id": [3, 11, 19, 27], "pad_token_id": 0}
    sampled = {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.2}
    for options in ({}, ends, sampled, {"no_repeat_ngram_size": 3}):
        assert_identical(target, head, batch(4, "sdpa"), **{**GREEDY, **options})
    assert len(made.tiers) == 1
    assert counters["stats"]["unique_graphs"] == parts(made) == 3, "a root alone, a tree, a draft"
    assert not counters["graph_break"]
    for layer in target.model.layers:  # a constant of the code
        layer.self_attn.scaling *= 0.5
    target.config.rescaled = True  # stock's run is another one
    hf_dart.attach(target)
    assert_identical(target, head, batch(4, "sdpa"), **GREEDY)


@pytest.mark.matrix
def test_tiers_do_not_add_up_to_dynamos_limit() -> None:
    """Each part may be compiled as often as Dynamo allows for one function; here, once."""
    target, head, made = compiled("llama", "eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in (1, 4):
            assert_identical(target, head, batch(size, "sdpa"), **GREEDY)
        with torch.inference_mode():
            assert_identical(target, head, batch(4, "sdpa"), **GREEDY)
    assert len(made.tiers) == 2
    assert all(made.tiers)
    assert counters["stats"]["unique_graphs"] == parts(made)


WIDE = {"block_attention": "bidirectional", "num_layers": 2}


@pytest.mark.matrix
@pytest.mark.parametrize("fields", [{}, {"selector_rank": 4}, WIDE], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt2"])
def test_families_and_heads(family: str, fields: dict[str, Any]) -> None:
    target, head, _ = compiled(family, "aot_eager", **fields)
    for size in (1, 4):
        assert_identical(target, head, batch(size, "sdpa"), **GREEDY)
    if not fields:
        head.reduce_vocabulary(range(2, 40))
        assert_identical(target, head, batch(4, "sdpa"), **GREEDY)
    assert not counters["graph_break"]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own, as it generates code
def test_by_inductor() -> None:
    """Code that is generated, and shapes that change from tier to tier."""
    target, head, _ = compiled("qwen3", "inductor")
    made = hf_dart.compile(target, head, first_tier=16)
    assert_identical(target, head, batch(4, "sdpa"), **GREEDY)
    assert len(made.tiers) == 2
    assert not counters["graph_break"]
