"""Parts of a DART head: edit passes and selectors."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from support.cases import GREEDY, MODES
from support.compare import assert_identical, run
from support.heads import text
from support.sentences import refused
from support.tiny import VOCABULARY, ReplayDrafter, prompts, tiny_head, tiny_target
from torch import Tensor

from hf_dart import DartHead, TreeConfig
from hf_dart.cache.slot_cache import SlotCache
from hf_dart.decoding.api import attach
from hf_dart.drafters.base import Proposal, Verified
from hf_dart.drafters.layers import rotation_at
from hf_dart.trees.tree import after_draft, best_chain

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
SHAPES = [
    {},
    {"num_layers": 2},
    {"mask_mode": "peagle", "mask_token_id": 1, "num_layers": 2},
    {"input_form": "stream"},
    {"block_attention": "bidirectional"},
]


def editing_head(target: Any, **config: Any) -> DartHead:
    """A head whose editor changes drafts."""
    head = tiny_head(target, editor=True, **config)
    generator = torch.Generator().manual_seed(2)
    weight = head.editor.correction.weight
    weight.data = torch.randn(weight.shape, generator=generator, dtype=weight.dtype) / weight.shape[0] ** 0.5
    return head


def begun(head: DartHead, seen: Verified) -> tuple[SlotCache, Proposal]:
    state = head.begin(len(seen.counts), 4)
    return state, head.propose(state, *seen)


def from_scratch(head: DartHead, features: Tensor, tokens: Tensor, draft: Tensor, first: Tensor) -> Tensor:
    """Logits [d - 1, V] of one pass over T positions and the slots that hold `draft` [d - 1], in the open.

    `first`: [d - 1, H] hidden states of the first pass.
    """
    config, real, slots = head.config, len(tokens), len(draft)
    known = head.inputs(features[None], head.embed(tokens)[None])
    token = head.embedding_norm(head.embed(draft))
    fused = head.editor.fc(torch.cat([token, first], dim=-1))
    if config.input_form == "stream":
        fused = held = fused + head.embedding_projection(token)
    else:
        held = torch.cat([token, head.feature_norm(fused)], dim=-1)
    x = torch.cat([known.x, held[None]], dim=1)
    residual = torch.cat([known.residual, fused[None]], dim=1)
    positions = torch.arange(real + slots)[None]
    mask = torch.ones(real + slots, real + slots, dtype=torch.bool).tril()
    if config.block_attention == "bidirectional":
        mask[real:] = True
    rotation = rotation_at(positions, config, torch.float64)
    for layer in head.layers:
        x = residual = layer(x, residual, rotation, mask[None, None], None)
    return head.logits(first + head.editor.correction(head.norm(x)[0, real:]))


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("counts", [[6], [6, 3, 1]], ids=["row", "batch"])
def test_pass_equals_one_in_the_open(target: Any, shape: dict[str, Any], counts: list[int]) -> None:
    """Also later passes, and rounds that follow: a pass leaves nothing in the cache that anyone looks at."""
    head = editing_head(target, **shape)
    seen = features, tokens, _ = text(head, counts, 1)
    state, first = begun(head, seen)
    for seed in (3, 4):
        draft = torch.randint(VOCABULARY, first.logits.shape[:2], generator=torch.Generator().manual_seed(seed))
        again = head.refine(state, first, draft)
        assert torch.equal(again.logits[:, 0], first.logits[:, 0])
        for row, count in enumerate(counts):
            plain = from_scratch(
                head, features[row, :count], tokens[row, :count], draft[row, :-1], first.hidden[row, 1:]
            )
            torch.testing.assert_close(again.logits[row, 1:], plain, **CLOSE)
            assert not torch.allclose(again.logits[row, 1:], first.logits[row, 1:], atol=0.1)
    more = text(head, [2] * len(counts), 5)
    later = head.propose(state, *more)
    other = head.begin(len(counts), 4)
    head.extend(other, *seen)
    untouched = head.propose(other, *more)
    torch.testing.assert_close(later.logits, untouched.logits, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_untrained_editor_changes_nothing(target: Any, shape: dict[str, Any]) -> None:
    head = tiny_head(target, **shape).add_editor()
    state, first = begun(head, text(head, [5], 1))
    again = head.refine(state, first, first.logits.argmax(-1))
    assert torch.equal(again.hidden, first.hidden)
    torch.testing.assert_close(again.logits, first.logits, **CLOSE)  # a product of fewer rows may round otherwise


@torch.no_grad()
@pytest.mark.parametrize("slots", [{}, {"mask_mode": "peagle", "mask_token_id": 1}], ids=["learned", "peagle"])
def test_slots_without_a_token_stay_masked(target: Any, slots: dict[str, Any]) -> None:
    head = editing_head(target, **slots)
    state, first = begun(head, text(head, [5], 1))
    again = head.refine(state, first, torch.full((1, head.draft_length), -1))
    states = head.editor(first.hidden[:, 1:], first.hidden[:, 1:])  # the pass over mask slots is the first one
    torch.testing.assert_close(again.hidden[:, 1:], states, **CLOSE)


def test_shorter_drafts(target: Any) -> None:
    """Causal: the first tokens of the longer draft. Bidirectional: the slots after stay masked."""
    for attention in ("causal", "bidirectional"):
        head = editing_head(target, block_attention=attention)
        seen = text(head, [6], 1)
        with torch.no_grad():
            state, whole = begun(head, seen)
            draft = whole.logits.argmax(-1)
            if attention == "bidirectional":
                draft[:, 2:] = -1
            longer = head.refine(state, whole, draft)
            short = head.begin(1, 4)
            first = head.propose(short, *seen, 3)
            shorter = head.refine(short, first, draft[:, :3])
        torch.testing.assert_close(shorter.logits, longer.logits[:, :3], **CLOSE)


# ---- the tree ---------------------------------------------------------------------------------------------


def test_best_chain() -> None:
    candidates = torch.tensor([[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]])
    first = [[[0.0, 1]] * 2, [[9, 8], [1, 2]], [[3, 4], [6, 5]]]
    second = [[[1.0, 0]] * 2, [[2, 1], [0, 3]], [[4, 5], [0, 1]]]
    table = torch.tensor([first, second])
    assert best_chain(candidates, table).tolist() == [[2, 4, 5], [7, 9, 12]]
    alone = torch.tensor([[[[0.0, 1]], [[1, 0]], [[1, 0]]], [[[1.0, 0]], [[0, 1]], [[1, 0]]]])
    assert best_chain(candidates, alone).tolist() == [[2, 3, 5], [7, 10, 11]]


def test_refined_scores_stand_after_the_draft_only() -> None:
    tokens = torch.tensor([[1, 4, 5]])
    candidates = torch.tensor([[[1, 2, 1], [3, 4, 9], [5, 6, -1]]])  # copied ones at the end
    table = torch.full((1, 3, 3, 3), -1.0)
    scores = -2.0 - torch.arange(6.0).view(1, 3, 2)
    changed = after_draft(tokens, scores, candidates, table)
    expected = table.clone()
    expected[0, 1, 0] = torch.tensor([-4.0, -5, -inf])
    expected[0, 1, 2] = expected[0, 1, 0]  # that token as a copied one
    expected[0, 2, 1] = torch.tensor([-6.0, -7, -inf])
    assert torch.equal(changed, expected)


# ---- exactness --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "passes"), [("greedy", (1,)), ("T=1", (1, 3)), ("top-p, penalty", (2,))])
def test_exact(target: Any, mode: str, passes: tuple[int, ...]) -> None:
    model = attach(target)
    head = editing_head(model, selector_rank=4)
    head.selector.context.weight.data.normal_(generator=torch.Generator().manual_seed(3))
    for number in passes:
        assert_identical(model, head, prompts([9, 3, 7]), seed=1, refine=number, max_new_tokens=14, **MODES[mode])
        assert head.last_stats.accepted


def test_refine_may_stand_in_the_heads_tree(target: Any, noted: Any) -> None:
    model = attach(target)
    head = editing_head(model, tree={"nodes": 8, "refine": 1})
    assert head.tree_config.refine == 1
    inputs = prompts([7])
    seen = noted(DartHead, "refine", lambda *_: None)
    # A draft of one token has nothing to look at.
    for options, passes in (({}, 1), ({"refine": 0}, 0), ({"tree_config": replace(head.tree_config, depth=1)}, 0)):
        seen.clear()
        run(model, inputs, 1, assistant=head, do_sample=False, max_new_tokens=8, **options)
        assert bool(seen) == bool(passes)


def test_refusals(target: Any) -> None:
    model = attach(target)
    call = {**prompts([5]), **GREEDY, "refine": 1}
    words = "does not refine its drafts; give refine=0"
    refused(lambda: model.generate(**call, assistant=tiny_head(model)), ValueError, words)
    replay = ReplayDrafter(torch.zeros(1, 9, dtype=torch.long), [0], VOCABULARY, misses=[0.0])
    refused(lambda: model.generate(**call, assistant=replay), ValueError, "does not refine")
    refused(lambda: TreeConfig(refine=-1), ValueError, r"TreeConfig.refine is -1; give 0 or more")


# ---- selectors --------------------------------------------------------------------------------------------


@torch.no_grad()
def test_markov_scores_pairs_whatever_the_context(target: Any) -> None:
    """An untrained selector of either kind changes no score."""
    head = tiny_head(target)
    seen = _, tokens, _ = text(head, [5], 1)
    _, first = begun(head, seen)
    candidates = first.logits.topk(3).indices
    scores = first.logits.log_softmax(-1).gather(-1, candidates)
    for kind in ("bigram", "markov"):
        selector = head.add_selector(4, kind=kind).selector
        untrained = head.transitions(first, tokens[:, -1], candidates, scores)
        torch.testing.assert_close(untrained, scores[:, :, None].expand_as(untrained), **CLOSE)
    for weight in selector.parameters():
        weight.normal_(generator=torch.Generator().manual_seed(1))
    table = head.transitions(first, tokens[:, -1], candidates, scores)
    embeddings = target.get_input_embeddings().weight
    together = scores.logsumexp(-1)
    for depth in range(head.draft_length):
        before = tokens[:, -1:].expand(-1, 3) if depth == 0 else candidates[:, depth - 1]
        pairs = selector.previous(embeddings[before[0]]) @ selector.candidate(embeddings[candidates[0, depth]]).T
        weight, scale = selector.log_weight.weight[depth].exp(), selector.log_scale.weight[depth].exp()
        scored = weight * first.logits[0, depth, candidates[0, depth]] + scale * pairs
        torch.testing.assert_close(table[0, depth], scored.log_softmax(-1) + together[0, depth], rtol=1e-6, atol=0)
    refused(lambda: tiny_head(target, selector_kind="gru"), ValueError, "selector_kind is 'gru'; give one of bigram")


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "fields"), [("qwen3", {}), ("qwen3", {"embeddings": "own"}), ("gemma3", {"embeddings": "table"})]
)
def test_tables_of_the_vocabulary_are_the_pairs(family: str, fields: dict[str, Any], noted: Any) -> None:
    """Each token is projected once, as the selector's own pass does it; again after its weights change."""
    head = tiny_head(tiny_target(family), **fields).add_selector(4)
    hidden = torch.randn(2, 3, head.config.hidden_size, dtype=torch.float64)
    previous, candidates = torch.randint(48, (2, 3, 5)), torch.randint(48, (2, 3, 6))
    logits = torch.randn(2, 3, 6, dtype=torch.float64)
    projected = noted(type(head.selector.previous), "forward", lambda *_: None)
    for _ in range(2):
        with torch.inference_mode():  # of some of the calls
            head.selector.lookup(hidden[:1], logits[:1], head, previous[:1], candidates[:1])
        fast = head.selector.lookup(hidden, logits, head, previous, candidates)
        passes = len(projected)
        assert torch.equal(head.selector.lookup(hidden, logits, head, previous, candidates), fast)
        assert len(projected) == passes
        plain = head.selector(hidden, logits, head.embed(torch.arange(48)), previous, candidates)
        assert fast.shape == (2, 3, 5, 6)
        torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)
        for weight in head.selector.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, dtype=weight.dtype))
