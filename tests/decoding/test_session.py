"""Calls that meet, in threads or inside code of the user's own that a drafted call runs; positions that wait."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.compare import assert_identical, run, same
from support.tiny import VOCABULARY, ReplayDrafter, prompts
from torch import Tensor

from hf_dart import DartHead, attach
from hf_dart.decoding.api import requested
from hf_dart.decoding.feed import begun, read_prompt
from hf_dart.decoding.rows import Rows
from hf_dart.decoding.session import joined
from hf_dart.drafters.base import Verified

SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 16}
INPUTS = prompts([7])


def test_processors_that_sample_texts_themselves(target: Any, head: DartHead) -> None:
    def nests(**drafting: Any) -> Any:
        texts = {**INPUTS, "do_sample": True, "max_new_tokens": 2, **drafting}
        return lambda ids, scores: scores.index_fill(-1, target.generate(**texts)[0, -1:], 3.0)

    runs = []
    for inner, outer in (({}, {}), ({}, {"assistant": head}), ({"assistant": head}, {"assistant": head})):
        runs.append(run(target, INPUTS, 0, **SAMPLED, logits_processor=[nests(**inner)], **outer))
    for ours in runs[1:]:
        same(ours, runs[0])


def streamer(what: Any) -> Any:
    """One that does something at every token."""
    return SimpleNamespace(put=lambda value: what(), end=lambda: None)


def test_streamers_that_draw(target: Any, head: DartHead) -> None:
    """From the generator that tokens are drawn from, between two tokens: as stock's are."""
    texts, sampled = {"do_sample": True, "max_new_tokens": 2}, {**SAMPLED, "max_new_tokens": 4}
    own = torch.Generator().manual_seed(0)
    for what in (
        lambda: torch.rand(3),
        lambda: target.generate(**INPUTS, **texts),
        lambda: target.generate(**INPUTS, **texts, assistant=head),
        lambda: torch.rand(3, generator=own),
        lambda: target.generate(**INPUTS, do_sample=False, max_new_tokens=2, assistant=head),
    ):
        assert_identical(target, head, INPUTS, **sampled, streamer=streamer(what))


class DrawnDrafts(ReplayDrafter):
    """Takes from the default generator at every turn."""

    def extend(self, *given: Any) -> None:
        torch.rand(2)
        super().extend(*given)

    def propose(self, *given: Any, **more: Any) -> Any:
        torch.rand(3)
        return super().propose(*given, **more)


@pytest.mark.parametrize("more", [{}, {"return_dict_in_generate": True, "output_scores": True}], ids=["", "scores"])
def test_drafters_that_draw(target: Any, more: dict[str, Any]) -> None:
    """With scores, tokens are drawn from the default generator itself."""
    inputs = prompts([7, 4])
    text = run(target, inputs, 0, **SAMPLED).sequences
    attach(target)
    drafter = DrawnDrafts(text, [0, 3], VOCABULARY, misses=[0.3, 0.1])
    assert_identical(target, drafter, inputs, **SAMPLED, **more)
    assert drafter.last_stats.tau > 1.3


class Listens:
    """An observer that keeps what it is told of a call."""

    def __init__(self, session: Any) -> None:
        self.rows: list[list[tuple[Tensor, int, Tensor | None]]] = [[] for _ in session.rows.tokens]
        self.ends: list[bool] = []

    def verified(self, seen: Verified, logits: Any) -> None:
        there = None if logits is None else logits()
        for row, many in enumerate(seen.counts.tolist()):
            for at in range(many):
                one = seen.features[row, at], int(seen.next_tokens[row, at]), None if there is None else there[row, at]
                self.rows[row].append(one)

    def ended(self, finished: bool) -> None:
        self.ends.append(finished)


@pytest.fixture
def listened(target: Any) -> tuple[ReplayDrafter, Tensor, list[Listens]]:
    """A drafter with an observer, the text [2, T] that it drafts, and what the observer is told of each call."""
    attach(target)
    text, calls = run(target, prompts([7, 4]), 0, **SAMPLED).sequences, list[Listens]()
    drafter = ReplayDrafter(text, [0, 3], VOCABULARY, misses=[0.3, 0.1], hidden_layers=(1, 2))
    drafter.observers = (lambda session: calls.append(Listens(session)) or calls[-1],)
    return drafter, text, calls


def test_observers_are_told_every_position(target: Any, listened: Any) -> None:
    """Prompts and ragged rounds tell features, the token after them, and the logits it was chosen from."""
    drafter, text, calls = listened
    assert_identical(target, drafter, prompts([7, 4]), **SAMPLED)
    assert drafter.last_stats.tau > 1.3
    (call,) = calls
    assert call.ends == [True]
    for row, (told, length) in enumerate(zip(call.rows, (7, 4), strict=True)):
        ids = text[row : row + 1, 7 - length :]
        plain = target(ids, output_hidden_states=True)
        features = torch.cat([plain.hidden_states[1], plain.hidden_states[2]], dim=-1)[0]
        assert [token for _, token, _ in told] == ids[0, 1:].tolist()
        assert all(logits is None for _, _, logits in told[: length - 1])
        for place, (found, _, logits) in enumerate(told):
            torch.testing.assert_close(found, features[place])
            if place >= length - 1:
                torch.testing.assert_close(logits, plain.logits[0, place])


def test_observers_are_told_of_calls_that_fail(target: Any, listened: Any) -> None:
    drafter, _, calls = listened

    def fails() -> None:
        if calls and len(calls[-1].rows[0]) > 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        target.generate(**prompts([7, 4]), **SAMPLED, assistant=drafter, streamer=streamer(fails))
    assert calls[-1].ends == [False]


# ---- in threads ------------------------------------------------------------------------------------------


def test_sampled_calls_side_by_side_draw_noise_of_their_own(target: Any, head: DartHead) -> None:
    """As stock's do. Afterwards a seed gives stock's text again."""
    options = {**SAMPLED, "max_new_tokens": 40, "temperature": 2.0}
    begin = Barrier(4)

    def work(_: int) -> tuple[int, ...]:
        begin.wait()
        return tuple(target.generate(**INPUTS, **options, assistant=head)[0].tolist())

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(work, range(4)))) == 4
    assert_identical(target, head, INPUTS, **options)


def test_positions_that_waited_are_taken_in_as_they_came() -> None:
    """Those of several rounds, of which each row has some, none or all; features and tokens stay together."""
    came: list[list[int]] = [[], [], []]
    chunks, numbers = [], count(1)
    for counts in ([2, 0, 3], [1, 1, 1], [0, 2, 1]):
        tokens = torch.full((3, 3), -1)
        for row, many in enumerate(counts):
            new = list(islice(numbers, many))
            tokens[row, :many] = torch.tensor(new)
            came[row] += new
        chunks.append(Verified(tokens[..., None] * torch.tensor([1.0, 0.5]), tokens, torch.tensor(counts)))
    features, tokens, counts = joined(chunks)
    assert counts.tolist() == [len(row) for row in came]
    assert tokens.shape[1] == features.shape[1] == 5, "the longest row's"
    for row, wanted in enumerate(came):
        assert tokens[row, : len(wanted)].tolist() == wanted
        assert features[row, : len(wanted), 1].tolist() == [0.5 * token for token in wanted]


@torch.no_grad()
def test_of_a_prompt_the_last_features_are_held(target: Any, head: DartHead) -> None:
    """Those of a long one, and the hidden states that they are made of, take gigabytes."""
    request = requested(target, **INPUTS, assistant=head)
    rows = Rows(request)
    reader, *_ = read_prompt(request, rows, begun(request, rows))
    assert reader.last.untyped_storage().nbytes() == reader.last.nbytes
    assert reader.outputs.get("hidden_states") is None
