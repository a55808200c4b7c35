"""The target's cache against the plain forward, and what a caller finds in the cache afterwards."""

from __future__ import annotations

from collections.abc import Callable
from operator import ne
from random import Random
from typing import Any

import pytest
import torch
from support.caches import CLOSE, assert_same_cache, prefill
from support.cases import FAMILIES, replay
from support.compare import assert_identical, run
from support.memory import TensorPeak
from support.tiny import VOCABULARY, WINDOW, prompts, tiny_head, tiny_target
from support.turns import next_turn_of
from support.users import TOKENIZER, Listener, OwnError
from transformers import DynamicCache

from hf_dart.cache import slot_cache
from hf_dart.cache.slot_cache import SlotStore
from hf_dart.cache.stock_layers import attention_layers, held_by, window_of
from hf_dart.cache.target_cache import TargetCache
from hf_dart.decoding import feed, session
from hf_dart.decoding.api import attach
from hf_dart.drafters.lookup import LookupDrafter
from hf_dart.models.stock_steps import CACHE
from hf_dart.models.verify import Verifier, mask_kinds
from hf_dart.trees.tree import MAX_DRAFT_LENGTH, DraftTree

SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 26}
# These families compute their expert weights in fp32, whatever their dtype.
ROUTED_IN_FP32 = {"rtol": 1e-5, "atol": 3e-6}


def whole(prefilled: Any, pads: list[int], capacity: int, keep: bool, most: int | None = None, *_: Any) -> TargetCache:
    return TargetCache(prefilled, pads, capacity, keep, most)


def windowed(
    prefilled: Any, pads: list[int], capacity: int, keep: bool, most: int | None = None, *_: Any
) -> TargetCache:
    """Sliding layers that keep their window and next to nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_cache, "SPARE", 0)
        windows = [window_of(layer) for layer in attention_layers(prefilled)]
        return TargetCache(prefilled, pads, capacity, keep, most, windows)


@pytest.fixture(autouse=True)
def _tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slack: short texts move windows, and what is dropped too soon is missed."""
    monkeypatch.setattr(slot_cache, "SLACK", 0)


# Mixed layers stand for all; the others belong to the matrix.
CASES = [
    pytest.param(family, make, marks=() if family == "gemma3" else pytest.mark.matrix)
    for family in FAMILIES
    for make in (whole, windowed)[: 2 if family in ("gemma3", "mistral") else 1]
]


def random_tree(batch: int, nodes: int, random: Random) -> DraftTree:
    parents = [[-1, *(random.randrange(max(0, i - 4), i) for i in range(1, nodes))] for _ in range(batch)]
    tokens = [[random.randrange(2, VOCABULARY) for _ in range(nodes)] for _ in range(batch)]
    return DraftTree.from_parents(torch.tensor(tokens), torch.tensor(parents))


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[12], [9, 3, 12, 7], [2, 2]])
@pytest.mark.parametrize(("family", "make"), CASES)
def test_trees_over_ragged_rounds(family: str, make: Callable[..., TargetCache], lengths: list[int]) -> None:
    """Every node's logits equal those of its path as plain text, round after round of ragged commits."""
    target = tiny_target(family)
    inputs = prompts(lengths)
    width, batch = max(lengths), len(lengths)
    pads = [width - length for length in lengths]
    texts = [inputs["input_ids"][b, pads[b] :].tolist() for b in range(batch)]
    prefilled = prefill(target, inputs)
    kinds = mask_kinds(target, prefilled)
    # A capacity of almost nothing, so that the buffers have to grow.
    cache = make(prefilled, pads, 4, False)
    verify = Verifier(target, cache, kinds, [1])
    random = Random(len(texts))
    close = ROUTED_IN_FP32 if family.startswith("deepseek") else CLOSE
    for _ in range(6):
        tree = random_tree(batch, 11, random)
        logits, features = verify(tree)
        paths = []
        for row in range(batch):
            all_paths = [above.nonzero().flatten().tolist() for above in tree.ancestors[row]]
            inner = tree.parents[row].tolist()
            for path in (path for path in all_paths if path[-1] not in inner):  # those of leaves, each checked whole
                text = torch.tensor([texts[row] + tree.tokens[row, path].tolist()])
                plain = target(text, use_cache=False, output_hidden_states=True)
                seen = len(texts[row])
                torch.testing.assert_close(logits[row, path], plain.logits[0, seen:], **close)
                torch.testing.assert_close(features[row, path], plain.hidden_states[1][0, seen:], **close)
            path = max(all_paths, key=len)
            paths.append(path[: random.choice([0, 1, len(path), random.randrange(len(path) + 1)])])
        if not any(paths):
            paths[0] = [0]
        longest = max(map(len, paths))
        cache.commit(
            torch.tensor([path + [0] * (longest - len(path)) for path in paths]), [len(path) for path in paths]
        )
        for row, path in enumerate(paths):
            texts[row] += tree.tokens[row, path].tolist()
        assert cache.lengths.tolist() == [len(text) for text in texts]


@torch.no_grad()
def test_truncated_rows_go_on_from_their_end() -> None:
    target = tiny_target("llama")
    inputs = prompts([9, 5, 12])
    pads = [3, 7, 0]
    prefilled = prefill(target, inputs)
    kinds = mask_kinds(target, prefilled)
    cache = TargetCache(prefilled, pads, 64, False)
    verify = Verifier(target, cache, kinds, [])
    chain = DraftTree.chain(torch.randint(2, VOCABULARY, (3, 6)))
    verify(chain)
    cache.commit(torch.arange(6).expand(3, -1), [6, 2, 4])
    cache.truncate(torch.tensor([11, 7, 14]))
    after = torch.randint(2, VOCABULARY, (3, 1))
    logits, _ = verify(DraftTree.chain(after))
    for row, kept in enumerate([2, 2, 2]):
        text = torch.cat([inputs["input_ids"][row, pads[row] :], chain.tokens[row, :kept], after[row]])
        torch.testing.assert_close(logits[row, 0], target(text[None], use_cache=False).logits[0, -1], **CLOSE)


@pytest.mark.parametrize("make", [whole, windowed])
def test_layers_show_what_they_hold(make: Callable[..., TargetCache]) -> None:
    """Some targets look into them."""
    target = tiny_target("gemma3")
    prefilled = prefill(target, prompts([12]))
    shown = attention_layers(make(prefilled, [0], 64, True).cache)
    for layer, stock in zip(shown, attention_layers(prefilled), strict=True):
        for got, want in ((layer.keys, stock.keys), (layer.values, stock.values)):
            assert torch.equal(got[:, :, -want.shape[2] :], want)


# ---- end to end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "eos"),
    [([WINDOW + 5], None), ([9, 3, 7, 13], None), ([9, 3, 7, 13], [3, 11, 19, 27, 35])],
    ids=["one", "four", "ended-early"],
)
@pytest.mark.parametrize(("family", "make"), CASES)
def test_the_returned_cache_is_stocks(
    family: str, make: Callable[..., TargetCache], lengths: list[int], eos: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "TargetCache", make)
    monkeypatch.setattr(session, "FILL", 3)  # rows that ended early are brought to the end in several steps
    target = attach(tiny_target(family))
    inputs = prompts(lengths)
    pads = [max(lengths) - length for length in lengths]
    options = {**SAMPLED, "eos_token_id": eos, "pad_token_id": 0, "return_dict_in_generate": True}
    misses = [0.3, 0.9, 0.0, 0.5][: len(lengths)]
    drafter = replay(target, inputs, misses=misses, **options) if eos is None else tiny_head(target)
    stock, ours = assert_identical(target, drafter, inputs, **options)
    assert_same_cache(ours.output[CACHE], stock.output[CACHE], pads, stock.output.sequences)
    told = {"do_sample": False, "max_new_tokens": 8}
    turns = [
        run(target, next_turn_of(inputs, done.sequences), 1, **{CACHE: done.output[CACHE]}, **told).sequences
        for done in (stock, ours)
    ]
    assert torch.equal(*turns)


@pytest.mark.parametrize("tokens", [30, 600])
def test_buffers_grow_no_larger_than_the_call(tokens: int, noted: Any) -> None:
    """Text and one tree; no more, however the last rounds fall."""
    target = attach(tiny_target("llama", max_position_embeddings=1024))
    inputs = prompts([60])
    options = {"do_sample": False, "max_new_tokens": tokens}
    drafter = replay(target, inputs, misses=[0.0], draft_length=12, **options)
    before = noted(SlotStore, "reserve", lambda store, _: store.capacity)
    after = noted(SlotStore, "reserve", lambda _, store, end: store.capacity, result=True)
    assert_identical(target, drafter, inputs, **options)
    assert max(after) <= 60 + tokens + drafter.tree_config.nodes
    assert sum(map(ne, before, after)) == (tokens > 512)


@pytest.mark.parametrize("keep", [False, True])
def test_the_prefill_is_freed_layer_by_layer(keep: bool, noted: Any) -> None:
    """Without a caller who wants the cache, keys and values are held once, and those of one layer twice at a time."""
    cache = prefill(tiny_target("gemma3"), prompts([12]))

    def held() -> list[int]:
        return [layer.keys.numel() + layer.values.numel() for layer in cache.layers]

    before, left = held(), noted(SlotStore, "take_over", lambda *_: sum(held()))
    TargetCache(cache, [0], 20, keep)
    assert left[::2] == [sum(before if keep else before[place:]) for place in range(len(before))]
    assert held() == (before if keep else [0] * len(before))


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "headroom", "new", "rows", "fails"),
    [("llama", 8, 120, 2, False), ("llama", 512, 30, 1, True), ("mistral", 512, 30, 1, False)],
    ids=["buffers grow", "the call fails", "within a window"],
)
def test_a_cache_that_is_passed_in_is_held_once(
    family: str, headroom: int, new: int, rows: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for one layer of twelve, in the call and after it."""
    monkeypatch.setattr(feed, "_HEADROOM", headroom)
    window = {"sliding_window": 450} if family == "mistral" else {}
    target = attach(tiny_target(family, num_hidden_layers=12, max_position_embeddings=1024, **window))
    options, drafting = {"do_sample": False, "max_new_tokens": new}, {"assistant": LookupDrafter()}
    start, inputs = prompts([400] * rows), prompts([410] * rows)
    inputs["input_ids"][:, :400] = start["input_ids"]
    stock, ours, other = (prefill(target, start) for _ in range(3))
    text = run(target, inputs, 0, **{CACHE: stock}, **options).sequences
    run(target, inputs, 0, **{CACHE: other}, **options, **drafting)  # has the target tried
    whole = sum(states.nbytes for layer in stock.layers for states in held_by(layer))
    with TensorPeak([states for layer in ours.layers for states in held_by(layer)], whole // 60) as measured:
        if fails:
            with pytest.raises(OwnError):
                target.generate(**inputs, **options, **drafting, **{CACHE: ours}, streamer=Listener(20))
        else:
            assert torch.equal(run(target, inputs, 0, **{CACHE: ours}, **options, **drafting).sequences, text)
    if not fails:
        assert_same_cache(ours, stock, [0] * rows, text)
    assert measured.peak < 1.35 * whole
    assert sum(states.untyped_storage().nbytes() for layer in ours.layers for states in held_by(layer)) <= whole


@pytest.mark.parametrize("spare", [0, 256], ids=["a store of its own", "lent"])
def test_sliding_layers_that_record_the_past(spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep the whole text, which may be cropped to what has left their window."""
    monkeypatch.setattr(slot_cache, "SPARE", spare)
    target = attach(tiny_target("mistral"))
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    for cache, drafting in zip(caches, ({}, {"assistant": LookupDrafter()}), strict=True):
        cache.activate_past_recording()
        run(target, prompts([7]), 0, **{CACHE: cache}, do_sample=False, max_new_tokens=30, **drafting)
    assert_same_cache(caches[1], caches[0], [0])
    for cache in caches:
        cache.crop(-6)
    assert_same_cache(caches[1], caches[0], [0])


@pytest.mark.parametrize("lengths", [[7], [9, 3, 60]])
@pytest.mark.parametrize("family", ["gemma3", pytest.param("mistral", marks=pytest.mark.matrix)])
def test_sliding_layers_keep_their_window(
    family: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch, noted: Any
) -> None:
    """Long texts, whole and broken off; the cache that comes back is stock's."""
    monkeypatch.setattr(slot_cache, "SLACK", 2 * (MAX_DRAFT_LENGTH + 1))
    monkeypatch.setattr(slot_cache, "SPARE", 24)
    made = noted(feed, "TargetCache", lambda cache, *_, **__: cache, result=True)
    target = attach(tiny_target(family))
    inputs = prompts(lengths)
    options = {"do_sample": False, "max_new_tokens": 220}
    drafter = replay(target, inputs, misses=[0.1, 0.2, 0.15][: len(lengths)], **options)
    caches, texts = [], []
    for drafting in ({}, {"assistant": drafter}):
        caches.append(DynamicCache(config=target.config))
        texts.append(run(target, inputs, 0, **{CACHE: caches[-1]}, **options, **drafting).sequences)
    assert torch.equal(*texts)
    assert_same_cache(caches[1], caches[0], [max(lengths) - length for length in lengths], texts[0])
    assert drafter.last_stats.accepted > 50
    check_windows(made[-1])
    if len(lengths) > 1:
        return  # streamers take one row
    cache = DynamicCache(config=target.config)
    with pytest.raises(OwnError):
        target.generate(**inputs, **options, assistant=drafter, streamer=Listener(150), **{CACHE: cache})
    check_windows(made[-1])
    held = cache.get_seq_length()
    assert 100 < held <= 7 + 150
    stock = DynamicCache(config=target.config)
    text = target.generate(**inputs, **{**options, "max_new_tokens": held + 1 - 7}, **{CACHE: stock})
    assert_same_cache(cache, stock, [0], text)


@pytest.mark.parametrize("ends", [(1, 110), (180, 220)], ids=str)
def test_a_row_that_runs_on_stays_near_the_others(ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Far ahead, it would have left the window that stock's cache ends with."""
    monkeypatch.setattr(slot_cache, "SLACK", 2 * (MAX_DRAFT_LENGTH + 1))
    monkeypatch.setattr(slot_cache, "SPARE", 24)
    target, inputs = attach(tiny_target("mistral", max_position_embeddings=1024)), prompts([5, 150])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 420}
    known = replay(target, inputs, misses=[0.0, 1.0], **options)
    rows = zip(known.sequences[:, 150:], ends, strict=True)
    stops = ["".join(TOKENIZER.convert_ids_to_tokens(text[start : start + 5])) for text, start in rows]
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    given = zip(caches, ({}, {"assistant": known}), strict=True)
    options |= {"stop_strings": stops, "tokenizer": TOKENIZER}
    stock, ours = (target.generate(**inputs, **options, **{CACHE: cache}, **drafting) for cache, drafting in given)
    assert torch.equal(ours, stock)
    assert_same_cache(caches[1], caches[0], [145, 0], stock)


def check_windows(cache: TargetCache) -> None:
    """The buffers of sliding layers are of their window's size, and have moved on as far as that takes."""
    windowed = next(one for one in cache.entries.stores if one.window == WINDOW)
    spread = int(cache.lengths.max() - cache.lengths.min())
    assert windowed.first >= cache.longest - windowed.capacity > 0
    assert windowed.capacity <= (2 if spread else 1) * (WINDOW + slot_cache.SLACK + slot_cache.SPARE + spread)
