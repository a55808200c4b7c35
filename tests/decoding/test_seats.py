"""Calls in seats: each writes what it writes alone, whatever comes, goes or fails in the others."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from support.caches import assert_same_cache
from support.families import needs_running_states
from support.tiny import prompts, tiny_head, tiny_target
from support.turns import first_draft, next_turn_of
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from hf_dart import TreeConfig
from hf_dart.decoding.api import close_call, open_request, requested
from hf_dart.decoding.seats import Seats
from hf_dart.decoding.session import Session
from hf_dart.models.stock_steps import CACHE

ENDS = {"eos_token_id": [3, 11], "pad_token_id": 0}
Request = tuple[dict[str, torch.Tensor], dict[str, Any]]


def opened(target: Any, generator: torch.Generator | None = None, **options: Any) -> Session:
    return open_request(requested(target, **options), generator)


def stocks(target: Any, request: Request, seed: int, **more: Any) -> Any:
    inputs, options = request
    torch.manual_seed(seed)
    return type(target).generate(target, **inputs, **options, **more)


def requests(count: int, seed: int) -> list[Request]:
    """Prompts of many lengths, greedy and sampled, some of them short, some penalised, some ending early."""
    random = Random(seed)
    drawn = []
    for number in range(count):
        options: dict[str, Any] = {"do_sample": random.random() < 0.9, "max_new_tokens": random.choice([1, 6, 14, 30])}
        if options["do_sample"]:
            options |= random.choice([*[{"top_k": 0}] * 3, {"temperature": 0.7, "top_p": 0.9}])
        options |= random.choice([{}, ENDS, {"repetition_penalty": 1.3}])
        drawn.append((prompts([random.choice([3, 7, 12, 20])], seed=100 * seed + number), options))
    return drawn


def run(target: Any, head: Any, todo: list[Request], size: int, seed: int) -> list[Any]:
    """All requests in so many seats; they come when there is room, and now and then later."""
    random, seats = Random(seed), Seats(size)
    outputs: list[Any] = [None] * len(todo)
    numbers: dict[int, int] = {}
    waiting = [*range(len(todo))]
    rounds = committed = 0
    while waiting or seats.taken:
        while waiting and seats.free and random.random() < 0.7:
            number = waiting.pop(0)
            inputs, options = todo[number]
            generator = torch.Generator().manual_seed(number)
            session = opened(target, generator, assistant=head, **inputs, **options)
            numbers[id(session)] = number
            if session.rows.finished:
                outputs[number] = close_call(session)
            else:
                seats.take(session)
        for session, failure in seats.round():
            assert failure is None
            outputs[numbers[id(session)]] = close_call(session)
            rounds, committed = rounds + session.stats.rounds, committed + session.stats.tokens
    assert committed / rounds > 1.3
    return outputs


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(2, 12))])
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma3",
        pytest.param("gpt2", marks=pytest.mark.matrix),
        pytest.param("qwen3_5", marks=needs_running_states),
        pytest.param("lfm2", marks=[pytest.mark.matrix, needs_running_states]),
    ],
)
def test_each_writes_what_it_writes_alone(family: str, seed: int) -> None:
    target = tiny_target(family)
    todo = requests(9, seed)
    found = run(target, tiny_head(target), todo, 3, seed)
    for number, (request, output) in enumerate(zip(todo, found, strict=True)):
        assert torch.equal(output, stocks(target, request, number)), number


class Fails(LogitsProcessor):
    """Raises at a length."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 14:
            raise OSError("gone")
        return scores


def test_a_call_that_fails_leaves_alone() -> None:
    target = tiny_target("llama")
    head, seats = tiny_head(target), Seats(3)
    good = [(prompts([5], seed=1), {"do_sample": False, "max_new_tokens": 40}) for _ in range(2)]
    bad = (prompts([9], seed=2), {"do_sample": False, "max_new_tokens": 40})
    sessions = [
        opened(target, assistant=head, **good[0][0], **good[0][1]),
        opened(target, assistant=head, **bad[0], **bad[1], logits_processor=LogitsProcessorList([Fails()])),
        opened(target, assistant=head, **good[1][0], **good[1][1]),
    ]
    for session in sessions:
        seats.take(session)
    with pytest.raises(ValueError, match="All 3 seats are taken"):
        seats.take(sessions[0])
    gone = []
    while seats.taken:
        gone += seats.round()
    failures = {id(session): failure for session, failure in gone}
    assert [type(failures[id(session)]) for session in sessions] == [type(None), OSError, type(None)]
    assert torch.equal(close_call(sessions[0]), stocks(target, good[0], 0))
    assert torch.equal(close_call(sessions[2]), stocks(target, good[1], 0))


def test_a_drafter_that_fails_ends_its_own_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another drafter go on, and nothing is emitted any more where there was no draft."""
    target, seats = tiny_target("llama"), Seats(3)
    good, bad = tiny_head(target), tiny_head(target)
    request: Request = (prompts([5], seed=1), {"do_sample": False, "max_new_tokens": 40})
    sessions = [opened(target, assistant=head, **request[0], **request[1]) for head in (bad, good, bad)]
    for session in sessions:
        seats.take(session)
    assert [seats.round() for _ in range(3)] == [[]] * 3
    monkeypatch.setattr(bad, "propose_ranked", None)
    assert [type(failure) for _, failure in seats.round()] == [TypeError] * 2
    while seats.taken:
        seats.round()
    stock = stocks(target, request, 0)
    assert torch.equal(close_call(sessions[1]), stock)
    for session in (sessions[0], sessions[2]):
        assert session.rows.tokens[0] == stock[0, : len(session.rows.tokens[0])].tolist()


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5", marks=needs_running_states)])
def test_generators_and_caches_that_are_handed_back(family: str) -> None:
    target = tiny_target(family)
    head, seats = tiny_head(target), Seats(2)
    request = (prompts([9]), {"do_sample": True, "top_k": 0, "max_new_tokens": 24})
    beside = opened(target, assistant=head, **prompts([4]), do_sample=False, max_new_tokens=60)
    seats.take(beside)
    seats.round()
    cache, generator = DynamicCache(config=target.config), torch.Generator().manual_seed(5)
    session = opened(target, generator, assistant=head, **{CACHE: cache}, **request[0], **request[1])
    seats.take(session)
    while session in [seat.session for seat in seats.taken]:
        seats.round()
    text = close_call(session)
    kept = DynamicCache(config=target.config)
    assert torch.equal(text, stocks(target, request, 5, **{CACHE: kept}))
    assert torch.equal(generator.get_state(), torch.get_rng_state())
    assert_same_cache(cache, kept, [0], text, {"rtol": 1e-5, "atol": 1e-5})
    inputs = next_turn_of(request[0], text)
    drafts = [first_draft(target, head, inputs, one) for one in (cache, DynamicCache(config=target.config))]
    torch.testing.assert_close(*drafts, rtol=1e-5, atol=1e-5)  # the drafter's state is the call's own, too


def test_calls_that_no_seat_takes() -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    for inputs, options, words in (
        (prompts([5, 3]), {"do_sample": False}, "has 2 rows"),
        (prompts([5]), {"return_dict_in_generate": True, "output_hidden_states": True}, "Hidden states are not"),
    ):
        with pytest.raises(ValueError, match=words):
            opened(target, assistant=head, **inputs, **{"max_new_tokens": 5, **options})
    seats = Seats(2)
    seats.take(opened(target, assistant=head, **prompts([5]), do_sample=False, max_new_tokens=9))
    other = tiny_target("llama")
    with pytest.raises(ValueError, match="share one target"):
        seats.take(opened(other, assistant=tiny_head(other), **prompts([5]), do_sample=False, max_new_tokens=9))


def test_trees_of_several_sizes() -> None:
    """Each call has a tree of its own; smaller ones are filled up."""
    target = tiny_target("llama")
    head, seats = tiny_head(target), Seats(3)
    calls = []
    for number, nodes in enumerate((1, 6, 20)):
        request = (prompts([6], seed=number), {"do_sample": False, "max_new_tokens": 30})
        config = TreeConfig(nodes=nodes)
        calls.append((request, opened(target, assistant=head, tree_config=config, **request[0], **request[1])))
        seats.take(calls[-1][1])
    while seats.taken:
        seats.round()
    for request, session in calls:
        assert torch.equal(close_call(session), stocks(target, request, 0))


def test_texts_of_other_rotary_frequencies_share_no_forward() -> None:
    """The longest row decides for all of them: a text beyond the trained length would change those within it."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 20}
    target = tiny_target("llama", rope_parameters={**rope, "short_factor": [1.0] * 4, "long_factor": [2.0, 3, 4, 5]})
    head, seats = tiny_head(target), Seats(2)
    short: Request = (prompts([7]), {"do_sample": False, "max_length": 21})
    with pytest.raises(ValueError, match="of up to 20 tokens"):
        seats.take(opened(target, assistant=head, **prompts([25]), do_sample=False, max_length=40))
    session = opened(target, assistant=head, **short[0], **short[1])
    seats.take(session)
    while seats.taken:
        seats.round()
    assert torch.equal(close_call(session), stocks(target, short, 0))
