"""Rows of a batch: the room of their ids, what fills up those that have ended, and drafts as each has them alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases import replay
from support.compare import assert_identical
from support.tiny import prompts, tiny_eagle_drafter, tiny_head, tiny_target
from support.users import TOKENIZER, Criterion
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList

from hf_dart import DartHead, TreeConfig, attach
from hf_dart.decoding import rows as module
from hf_dart.decoding.api import generate
from hf_dart.decoding.rows import Rows


@pytest.mark.parametrize("options", [
    {},
    {"return_dict_in_generate": True, "output_scores": True},
    {"eos_token_id": [3, 11], "pad_token_id": 5},
    {"eos_token_id": [3, 11], "pad_token_id": 5, "return_dict_in_generate": True, "output_scores": True},
], ids=["", "in step", "padded", "padded in step"])  # fmt: skip
def test_ids_outgrow_their_room(
    target: Any, head: DartHead, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again; all are kept, and seen by what reads them."""
    monkeypatch.setattr(module, "_ROOM", 3)
    given = {"do_sample": False, "max_new_tokens": 40, "no_repeat_ngram_size": 2, **options}
    stock, _ = assert_identical(target, head, prompts([7, 3]), **given)
    if "eos_token_id" in options:
        written = (stock.sequences[:, 7:] != 5).sum(1)
        assert written.min() < 20 < written.max(), "one row was to end early, and the other to outgrow its room"
        assert head.last_stats.tokens == written.sum() - 2, "pads are none"


def test_rows_that_have_ended_hold_nobody_back() -> None:
    """Neither what others may run ahead of the slowest nor what a streamer is shown."""
    config = GenerationConfig(max_length=30)
    config._pad_token_tensor = torch.tensor(0)
    criteria = StoppingCriteriaList([MaxLengthCriteria(30), EosTokenCriteria(3)])
    ids = torch.ones(3, 4, dtype=torch.long)
    more = {"pads": [0] * 3, "first_slot": 0, "max_length": 30, "streamer": None}
    request: Any = SimpleNamespace(input_ids=ids, criteria=criteria, generation_config=config, in_step=False, **more)
    rows = Rows(request)
    for row, tokens in enumerate([[5, 3], [6] * 9, [7] * 12]):
        assert [rows.append(row, token) for token in tokens] == [token != 3 for token in tokens]
    assert (rows.slowest(), rows.common, rows.rooms) == (9, 9, [0, 17, 14])
    assert [rows.append(row, 3) for row in (1, 2)] == [False, False]
    assert (rows.steps, rows.common, rows.rooms) == (13, 13, [0, 0, 0])


def test_a_row_ends_inside_a_path_that_is_accepted() -> None:
    """By a string, which no tree knows of; what the path holds after it is none of the text."""
    target, inputs = attach(tiny_target("llama")), prompts([7, 7, 7])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": 1, "pad_token_id": 0}
    drafter = replay(target, inputs, misses=[0.0, 0.0, 0.0], **options)
    text = drafter.sequences
    for row, place in ((0, 11), (2, 18)):
        letter = TOKENIZER.decode(text[row, place])
        stock, _ = assert_identical(target, drafter, inputs, stop_strings=[letter], tokenizer=TOKENIZER, **options)
        ended = (stock.sequences[row] == 0).nonzero()[:1, 0]
        assert len(ended), "it was to end before the others"


def test_rows_that_are_filled_up_need_a_pad(target: Any, head: DartHead) -> None:
    """As in stock, which fails at its first step."""
    target.generation_config.pad_token_id = None
    options = {**prompts([7]), "do_sample": False, "max_new_tokens": 8, "stopping_criteria": [EosTokenCriteria(3)]}
    for drafting, words in (({}, "NoneType"), ({"assistant": head}, "give pad_token_id")):
        with pytest.raises(TypeError, match=words):
            target.generate(**options, **drafting)


def test_rows_that_run_on_are_not_taken_for_ended() -> None:
    """Without an end token stock lets a row that has met a criterion run on; so does its draft."""
    target = attach(tiny_target("llama"))
    inputs, options = prompts([7, 7]), {"do_sample": False, "max_new_tokens": 40}
    drafter = replay(target, inputs, misses=[0.0, 0.0], **options)
    stock, _ = assert_identical(target, drafter, inputs, stopping_criteria=[Criterion("ends rows")], **options)
    ends = torch.isin(stock.sequences[:, 7:], torch.tensor([3, 4, 5, 6]))
    assert ends[:, :-12].any(), "a row was to run on for a while"
    assert drafter.last_stats.tau > 5


@pytest.mark.parametrize("lengths", [[7], [7, 7]], ids=["one row", "two"])
def test_criteria_that_return_a_column(lengths: list[int]) -> None:
    """The shape that transformers documents; stock writes on with it, but for a step after one that filled rows up."""
    target, inputs = tiny_target("llama"), prompts(lengths, seed=2)
    head, options = tiny_head(target), {"do_sample": False, "stopping_criteria": [Criterion("a column")]}
    stock, _ = assert_identical(target, head, inputs, max_new_tokens=40, **options)
    assert stock.sequences.shape[1] == 7 + 36
    words = {"stop_strings": list("lmnop"), "tokenizer": TOKENIZER}
    stock, _ = assert_identical(target, head, inputs, max_new_tokens=40, **words, **options)
    assert stock.sequences.shape[1] == 7 + (15 if len(lengths) > 1 else 1)
    options |= {"eos_token_id": 1, "pad_token_id": 0}
    assert_identical(target, head, inputs, max_new_tokens=1, **options)
    with pytest.raises(ValueError, match="take no end token beside them; return"):
        generate(target, **inputs, assistant=head, max_new_tokens=2, **options)


@pytest.mark.parametrize("misses", [[0.0, 1.0], [1.0, 0.0]], ids=["late row ahead", "early row ahead"])
def test_rows_that_run_on_end_with_the_last(misses: list[float]) -> None:
    """Without an end token a row that has met a stop string runs on to where the last row meets one, and no farther.

    The row that stops late may be far ahead of the other one, or far behind it.
    """
    target = attach(tiny_target("llama"))
    inputs, options = prompts([7, 7]), {"do_sample": False, "max_new_tokens": 40}
    drafter = replay(target, inputs, misses=misses, **options)
    words = {"stop_strings": TOKENIZER.batch_decode([[3], [4], [5], [6]]), "tokenizer": TOKENIZER}
    stock, _ = assert_identical(target, drafter, inputs, **words, **options)
    stops = torch.isin(stock.sequences[:, 7:], torch.tensor([3, 4, 5, 6])).long().argmax(-1).tolist()
    assert stops == [26, 14]
    assert stock.sequences.shape[1] == 7 + 27
    assert drafter.last_stats.tau > 1.3


ENDS = {"eos_token_id": [3, 11, 19, 27], "pad_token_id": 0}


@pytest.mark.parametrize(
    ("make", "lengths", "options"),
    [
        (tiny_head, [7, 7, 7], {}),
        (tiny_head, [9, 3, 7], {"prefill_chunk_size": 3, "repetition_penalty": 1.2}),
        (tiny_eagle_drafter, [3, 9, 7], ENDS),
    ],
    ids=["of one length", "padded, in chunks", "EAGLE"],
)
def test_as_much_is_accepted_as_alone(make: Callable[..., Any], lengths: list[int], options: dict[str, Any]) -> None:
    """Round by round, by rows that accept differently much and end at different times; of as many drafted tokens."""
    target = tiny_target("llama")
    drafter, inputs = make(target), prompts(lengths, seed=1)
    options = {"do_sample": False, "max_new_tokens": 24, "tree_config": TreeConfig(nodes=24, lookup=0), **options}
    assert_identical(target, drafter, inputs, **options)
    together, drafted = drafter.last_stats.committed, drafter.last_stats.drafted
    assert drafter.last_stats.tau > 1.3
    for row, length in enumerate(lengths):
        target.generate(inputs["input_ids"][row : row + 1, -length:], assistant=drafter, **options)
        alone = [count for (count,) in drafter.last_stats.committed]
        assert [counts[row] for counts in together if counts[row]] == alone
        drafted -= drafter.last_stats.drafted
    assert drafted == 0
