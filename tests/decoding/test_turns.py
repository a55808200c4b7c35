"""Several turns over one cache: all equal stock's, and the head goes on with the draft it left there, if it fits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from support.compare import run
from support.families import HYBRIDS, WITHOUT_ATTENTION, needs_running_states
from support.tiny import VOCABULARY, WINDOW, ReplayDrafter, ReplayState, prompts, tiny_head, tiny_target
from support.turns import (
    KINDS,
    MODES,
    RAGGED,
    assert_drafts_as_if_it_had_read_all,
    assert_turns_are_stocks,
    first_draft,
    next_turn_of,
)
from support.users import TOKENIZER
from torch import Tensor
from transformers import CompileConfig, DynamicCache, StaticCache

from hf_dart import DartHead
from hf_dart.decoding.api import attach
from hf_dart.drafters.base import Verified
from hf_dart.models.stock_steps import CACHE
from hf_dart.models.trial import check_verification


@pytest.fixture(scope="module")
def pair() -> tuple[Any, DartHead]:
    target = tiny_target("gemma3")  # full and sliding layers
    return target, tiny_head(target)


def conversation(target: Any, *drafters: DartHead | None) -> Tensor:
    """The text after as many sampled turns over one cache, each with its drafter; None is stock's own turn."""
    cache, inputs = DynamicCache(config=target.config), prompts(RAGGED)
    for seed, drafter in enumerate(drafters):
        drafting = {} if drafter is None else {"assistant": drafter}
        text = run(target, inputs, seed, **{CACHE: cache}, **MODES["sampled"], **drafting).sequences
        inputs = next_turn_of(inputs, text)
    return text


STATES = product(HYBRIDS, KINDS, ([7], RAGGED), ("greedy", "eos"))
TURNS = [
    ("gemma3", "dynamic", RAGGED, "sampled"),
    ("mistral", "dynamic", [WINDOW - 3], "greedy"),
    pytest.param("falcon_h1", "dynamic", RAGGED, "eos", marks=needs_running_states),
    pytest.param("qwen3_5", "static", [7], "sampled", marks=needs_running_states),
    pytest.param("lfm3", "dynamic", [7], "eos", marks=needs_running_states),
    pytest.param("mamba2", "dynamic", RAGGED, "sampled", marks=needs_running_states),
    *(
        pytest.param(family, kind, *case, marks=[pytest.mark.matrix, needs_running_states])
        for family, kind, *case in STATES
        if kind == "dynamic" or family not in WITHOUT_ATTENTION
    ),
]


@pytest.mark.parametrize(("family", "kind", "lengths", "mode"), TURNS)
def test_turns_equal_stocks(family: str, kind: str, lengths: list[int], mode: str) -> None:
    assert_turns_are_stocks(family, kind, lengths, mode)


def test_chunks_into_a_static_cache_are_read_where_stock_would_compile(pair: tuple[Any, DartHead]) -> None:
    target, head = pair
    options = {**MODES["greedy"], "cache_implementation": "static", "prefill_chunk_size": 4}
    stock = run(target, prompts(RAGGED), 0, **options).sequences
    compiling = CompileConfig()
    compiling._compile_all_devices = True  # as on an accelerator
    ours = run(target, prompts(RAGGED), 0, **options, compile_config=compiling, assistant=head).sequences
    assert torch.equal(ours, stock)


def test_caches_that_do_not_fit_the_call(pair: tuple[Any, DartHead]) -> None:
    (target, head), inputs = pair, prompts([9])
    options = {**MODES["greedy"], "assistant": head}
    short = StaticCache(config=target.config, max_cache_len=9 + 17 - 2)
    with pytest.raises(ValueError, match=r"room for 24 tokens and this call may need 25; .*\.$"):
        target.generate(**inputs, **options, **{CACHE: short})
    assert int(short.get_seq_length()) == 0
    enough = StaticCache(config=target.config, max_cache_len=9 + 17 - 1)
    first = target.generate(**inputs, **options, **{CACHE: enough})
    assert torch.equal(first, target.generate(**inputs, **MODES["greedy"]))
    whole = DynamicCache(config=target.config)
    run(target, inputs, 0, **options, **{CACHE: whole})
    with pytest.raises(ValueError, match="pass the whole text with an empty cache"):
        target.generate(**inputs, **options, **{CACHE: whole})
    tail = {"input_ids": first[:, -2:], "attention_mask": torch.ones_like(first)}
    shorter = DynamicCache(config=target.config)
    run(target, prompts([7]), 0, **options, **{CACHE: shorter})
    with pytest.raises(ValueError, match=r"begin at token 24; pass the whole text"):
        target.generate(**tail, **options, **{CACHE: shorter})


# ---- the draft goes on ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "lengths", "mode"),
    [("dynamic", [7], "eos"), ("dynamic", RAGGED, "sampled"), ("static", RAGGED, "greedy"), ("static", RAGGED, "eos")],
)
def test_the_next_turn_drafts_as_if_it_had_read_all(
    pair: tuple[Any, DartHead], kind: str, lengths: list[int], mode: str, taken_up: list[bool]
) -> None:
    assert_drafts_as_if_it_had_read_all(*pair, kind, lengths, mode, taken_up)


def test_only_new_tokens_are_run(pair: tuple[Any, DartHead], noted: Any) -> None:
    """Neither a draft that goes on nor one that starts again reads the cached prefix again."""
    target, head = pair
    read = noted(type(target), "forward", lambda *_, **given: given["input_ids"].shape[1])
    for first in (head, None):
        cache, inputs = DynamicCache(config=target.config), prompts(RAGGED)
        options = MODES["greedy"] if first is None else {**MODES["greedy"], "assistant": first}
        inputs = next_turn_of(inputs, run(target, inputs, 0, **{CACHE: cache}, **options).sequences)
        check_verification(target, rows=len(RAGGED), padded=True)
        read.clear()
        run(target, inputs, 0, **{CACHE: cache}, assistant=head, **MODES["greedy"])
        assert read[0] == 5  # the last token of the first turn and four new ones
        assert len(read) == 1 + head.last_stats.rounds


def test_a_draft_that_began_amid_the_text_goes_on(pair: tuple[Any, DartHead], taken_up: list[bool]) -> None:
    """After a turn of stock's the head has not read the prefix; the turn after that finds what it has read since."""
    target, head = pair
    assert torch.equal(conversation(target, None, head, head), conversation(target, None, None, None))
    assert taken_up == [False, True]


@pytest.mark.parametrize("lengths", [[7], RAGGED])
def test_only_the_new_tokens_are_passed(pair: tuple[Any, DartHead], lengths: list[int], taken_up: list[bool]) -> None:
    """With a mask over the whole text, `input_ids` may begin where the cache ends."""
    target, head = pair
    texts = []
    for drafting in ({}, {"assistant": head}):
        cache, inputs = DynamicCache(config=target.config), prompts(lengths)
        for seed in range(3):
            tail = {**inputs, "input_ids": inputs["input_ids"][:, cache.get_seq_length() :]}
            new = run(target, tail, seed, **{CACHE: cache}, **MODES["sampled"], **drafting).sequences
            text = torch.cat([inputs["input_ids"], new[:, tail["input_ids"].shape[1] :]], dim=1)
            inputs = next_turn_of(inputs, text)
        texts.append(text)
    assert torch.equal(*texts)
    assert taken_up == [False, True, True]


class RecordingDrafter(ReplayDrafter):
    """Goes on with any state, and keeps how many positions of each row that has been given."""

    def resume(self, state: ReplayState, pending: Verified, lengths: Tensor) -> bool:
        self.extend(state, *pending)
        self.taken = state.lengths.tolist()
        return True


@pytest.mark.parametrize("family", ["llama", pytest.param("lfm2", marks=needs_running_states)])
def test_every_position_is_handed_over_once(family: str) -> None:
    """Also of a row that ran on beyond the end of the text, whose running states are computed again from its prompt."""
    target = attach(tiny_target(family))
    inputs, options = prompts([7, 7]), {**MODES["sampled"], "max_new_tokens": 30}
    drafter = RecordingDrafter(run(target, inputs, 0, **options).sequences, [0, 0], VOCABULARY, misses=[1.0, 0.0])
    words = {"stop_strings": TOKENIZER.batch_decode([[41], [4]]), "tokenizer": TOKENIZER}
    texts = []
    for drafting in ({}, {"assistant": drafter}):
        cache = DynamicCache(config=target.config)
        texts.append(run(target, inputs, 0, **{CACHE: cache}, **options, **words, **drafting).sequences)
    assert torch.equal(*texts)
    slow, ahead = (1 + sum(counts) for counts in zip(*drafter.last_stats.committed, strict=True))
    assert slow == texts[0].shape[1] - 7 < ahead
    run(target, next_turn_of(inputs, texts[0]), 0, **{CACHE: cache}, assistant=drafter, **MODES["greedy"])
    assert drafter.taken == [7 + slow - 1, 7 + ahead - 1]


# ---- and does not where it does not fit -------------------------------------------------------------------


def run_plainly(target: Any, cache: Any, ids: Tensor) -> Any:
    with torch.no_grad():
        target(input_ids=ids, **{CACHE: cache}, use_cache=True)
    return cache


def cropped_and_continued(target: Any, cache: Any, ids: Tensor) -> Any:
    """The same length again, but other tokens at the end."""
    cache.crop(-6)
    ids[:, -7:-1] = (ids[:, -7:-1] + 1) % VOCABULARY
    return run_plainly(target, cache, ids[:, -7:-1])


def of_rows(target: Any, cache: Any, ids: Tensor, rows: list[int]) -> Any:
    cache.batch_select_indices(torch.tensor(rows))
    ids.set_(ids[rows].clone())
    return cache


CHANGES: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "cropped and continued": cropped_and_continued,
    "continued plainly": lambda target, cache, ids: run_plainly(target, cache, ids[:, -1:]),
    "reordered": lambda target, cache, ids: of_rows(target, cache, ids, [1, 0]),
    "fewer rows": lambda target, cache, ids: of_rows(target, cache, ids, [1]),
    "deep copy": lambda target, cache, ids: copy.deepcopy(cache),
    "pickle": lambda target, cache, ids: pickle.loads(pickle.dumps(cache)),
}


@pytest.mark.parametrize("tail", [False, True], ids=["whole", "tail"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_draft_that_does_not_fit_is_not_used(
    target: Any, head: DartHead, change: str, tail: bool, taken_up: list[bool]
) -> None:
    texts = []
    for drafting in ({}, {"assistant": head}):
        cache = DynamicCache(config=target.config)
        ids = run(target, prompts([9, 9]), 0, **{CACHE: cache}, **MODES["greedy"], **drafting).sequences.clone()
        cache = CHANGES[change](target, cache, ids)
        ids = torch.cat([ids, prompts([4, 4], seed=9)["input_ids"][: len(ids)]], dim=1)
        passed = ids[:, cache.get_seq_length() :] if tail else ids
        inputs = {"input_ids": passed, "attention_mask": torch.ones_like(ids)}
        texts.append(run(target, inputs, 1, **{CACHE: cache}, **MODES["sampled"], **drafting).sequences)
    assert torch.equal(*texts)
    assert taken_up == [False, False]


def test_a_draft_under_another_mask_is_not_used(target: Any, head: DartHead, taken_up: list[bool]) -> None:
    """The padding of the first turn is text in the second: the tokens are the same, and what they say is not."""
    texts = []
    for drafting in ({}, {"assistant": head}):
        cache, inputs = DynamicCache(config=target.config), prompts([9, 4])
        text = run(target, inputs, 0, **{CACHE: cache}, **MODES["greedy"], **drafting).sequences
        inputs = next_turn_of({"attention_mask": torch.ones(2, 9, dtype=torch.long)}, text)
        texts.append(run(target, inputs, 1, **{CACHE: cache}, **MODES["greedy"], **drafting).sequences)
    assert torch.equal(*texts)
    assert taken_up == [False, False]


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("lengths", [[9], RAGGED])
def test_a_cropped_cache(target: Any, head: DartHead, lengths: list[int], same: bool, taken_up: list[bool]) -> None:
    """The draft is cropped with the cache, if the text after it begins with the same token."""
    inputs = prompts(lengths)

    def cropped(**drafting: Any) -> tuple[Any, dict[str, Tensor]]:
        cache = DynamicCache(config=target.config)
        text = run(target, inputs, 0, **{CACHE: cache}, **MODES["greedy"], **drafting).sequences
        cache.crop(-10)
        text = text[:, : cache.get_seq_length() + 1].clone()
        if not same:
            text[:, -1] = (text[:, -1] + 1) % VOCABULARY
        return cache, next_turn_of(inputs, text)

    cache, again = cropped()
    stock = run(target, again, 1, **{CACHE: cache}, **MODES["sampled"])
    cache, again = cropped(assistant=head)
    ours = run(target, again, 1, **{CACHE: cache}, assistant=head, **MODES["sampled"])
    assert torch.equal(ours.sequences, stock.sequences)
    assert taken_up == [False, same]
    cache, again = cropped(assistant=head)
    draft = first_draft(target, head, again, cache)
    fresh = first_draft(target, head, again, DynamicCache(config=target.config))
    assert torch.allclose(draft, fresh, rtol=1e-9, atol=1e-9) == same


def test_another_head_starts_anew(pair: tuple[Any, DartHead], taken_up: list[bool]) -> None:
    target, head = pair
    other = tiny_head(target, draft_length=3, feature_layers=[1])
    stock = conversation(target, None, None, None)
    for drafters in ((head, other, head), (head, copy.deepcopy(head), other)):
        assert torch.equal(conversation(target, *drafters), stock)
    assert not any(taken_up)


@pytest.mark.parametrize("change", ["inference mode", "dtype"])
def test_a_state_that_cannot_be_written_any_more(
    target: Any, head: DartHead, change: str, taken_up: list[bool]
) -> None:
    cache, inputs = DynamicCache(config=target.config), prompts(RAGGED)
    with torch.inference_mode(change == "inference mode"):
        text = run(target, inputs, 0, **{CACHE: cache}, assistant=head, **MODES["greedy"]).sequences.clone()
    if change == "dtype":
        head.float()
    inputs = next_turn_of(inputs, text.clone())
    ours = run(target, inputs, 1, **{CACHE: cache}, assistant=head, **MODES["greedy"]).sequences
    assert torch.equal(ours, run(target, inputs, 1, **MODES["greedy"]).sequences)
    assert taken_up == [False, False]
