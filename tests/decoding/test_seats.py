"""Calls in seats: each writes what it writes alone, whatever comes, goes or fails in the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support.caches import assert_same_cache
from support.families import needs_running_states
from support.tiny import prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target
from support.turns import first_draft, next_turn_of
from support.users import fail
from transformers import DynamicCache

from hf_dart import DartHead, LanguageModelDrafter, LookupDrafter, TreeConfig
from hf_dart.cache.slot_cache import SlotStore
from hf_dart.cache.target_cache import TargetCache
from hf_dart.decoding import stats, walk
from hf_dart.decoding.api import close_call, generate, open_request, requested
from hf_dart.decoding.pace import Pace
from hf_dart.decoding.seats import Seats
from hf_dart.decoding.session import Observer, Session
from hf_dart.models.stock_steps import CACHE

Request = tuple[dict[str, torch.Tensor], dict[str, Any]]


def opened(target: Any, generator: torch.Generator | None = None, **options: Any) -> Session:
    return open_request(requested(target, **options), generator)


def stocks(target: Any, request: Request, seed: int, **more: Any) -> Any:
    inputs, options = request
    torch.manual_seed(seed)
    return type(target).generate(target, **inputs, **options, **more)


def assert_stocks(target: Any, seats: Seats, sessions: list[Session], requests: list[Request]) -> None:
    """Run all calls to their ends, of which none fails: each of these has written what stock writes alone."""
    while seats.taken:
        assert all(failure is None for _, failure in seats.round())
    for session, request in zip(sessions, requests, strict=True):
        assert torch.equal(close_call(session), stocks(target, request, 0))


GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40}


def test_a_drafter_that_fails(target: Any, head: DartHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls end, and nothing is emitted any more where there was no draft."""
    seats, inputs = Seats(3), prompts([5], seed=1)
    sessions = [opened(target, assistant=head, **inputs, **GREEDY) for _ in range(2)]
    for session in sessions:
        seats.take(session)
    assert [seats.round() for _ in range(3)] == [[]] * 3
    monkeypatch.setattr(sessions[0], "propose_with", None)
    assert [type(failure) for _, failure in seats.round()] == [TypeError] * 2
    assert not seats.taken
    stock = stocks(target, (inputs, GREEDY), 0)
    for session in sessions:
        assert session.rows.tokens[0] == stock[0, : len(session.rows.tokens[0])].tolist()


@pytest.mark.parametrize("where", ["resize", "take_rows"])
def test_a_call_that_does_not_fit(target: Any, head: DartHead, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run go on."""
    seats, request, own = Seats(3), (prompts([5], seed=1), GREEDY), getattr(SlotStore, where)
    sessions = [opened(target, assistant=head, **request[0], **GREEDY) for _ in range(3)]

    def grow(store: SlotStore, *given: Any) -> None:
        if given[0] == 3 or given[-1] == [(2, 0)]:
            raise RuntimeError("out of memory")
        own(store, *given)

    monkeypatch.setattr(SlotStore, where, grow)
    for session in sessions[:2]:
        seats.take(session)
    with pytest.raises(RuntimeError, match="out of memory"):
        seats.take(sessions[2])
    assert_stocks(target, seats, sessions[:2], [request] * 2)


def test_a_cache_that_cannot_be_handed_back(target: Any, head: DartHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory has run out; the call beside it goes on."""
    seats, inputs, own = Seats(2), prompts([5], seed=1), SlotStore.take_rows
    stays = opened(target, assistant=head, **inputs, **GREEDY)
    goes = opened(target, assistant=head, **inputs, **{**GREEDY, "max_new_tokens": 8}, return_dict_in_generate=True)
    for session in (stays, goes):
        seats.take(session)
    back = [(0, 1)]
    monkeypatch.setattr(SlotStore, "take_rows", lambda *given: fail(RuntimeError) if given[-1] == back else own(*given))
    gone = next(filter(None, (seats.round() for _ in range(9))))
    assert [(session, type(failure)) for session, failure in gone] == [(goes, RuntimeError)]
    assert_stocks(target, seats, [stays], [(inputs, GREEDY)])


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5", marks=needs_running_states)])
def test_generators_and_caches_that_are_handed_back(family: str, first: bool) -> None:
    target = tiny_target(family)
    head, seats = tiny_head(target), Seats(2)
    request = (prompts([9]), {"do_sample": True, "top_k": 0, "max_new_tokens": 24})
    cache, generator = DynamicCache(config=target.config), torch.Generator().manual_seed(5)
    session = opened(target, generator, assistant=head, **{CACHE: cache}, **request[0], **request[1])
    other = (prompts([4]), {"do_sample": False, "max_new_tokens": 60})
    beside = opened(target, assistant=head, **other[0], **other[1])
    for one in (session, beside) if first else (beside, session):
        seats.take(one)
        seats.round()
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
    assert_stocks(target, seats, [beside], [other])  # a call that goes takes nothing of another one


@pytest.mark.parametrize("shape", [TreeConfig(draft_cost=9.0, node_cost=1e-4), TreeConfig(nodes=1)])
def test_calls_whose_drafts_pause_alone(shape: TreeConfig) -> None:
    """In seats they may draft, so that the drafter is handed what they have verified; where none may, none is kept."""
    target = tiny_target("llama")
    head = tiny_head(target)
    options = {**prompts([9]), "do_sample": False, "max_new_tokens": 20, "assistant": head, "tree_config": shape}
    generate(target, **options)
    seats, sessions = Seats(2), [opened(target, **options) for _ in range(2)]
    for session in sessions:
        seats.take(session)
    while seats.taken:
        assert all(failure is None for _, failure in seats.round())
    assert shape.nodes != 1 or not any(session.pending for session in sessions)


def test_room_of_a_long_call_that_has_left(target: Any, head: DartHead) -> None:
    """Those that come later take what they need, and not as much each as the longest text that ever came."""
    lengths, seats = [(900, 4), (5, 300), (5, 40), (350, 40), (7, 40)], Seats(4)
    requests = [(prompts([length]), {"do_sample": False, "max_new_tokens": most}) for length, most in lengths]
    sessions = [opened(target, assistant=head, **inputs, **options) for inputs, options in requests]
    for number, session in enumerate(sessions):
        while number > 1 and sessions[0] in [seat.session for seat in seats.taken]:
            seats.round()
        seats.take(session)
    of_their_own = [store for seat in seats.taken for store in (seat.own[1].entries.store, seat.own[3].store)]
    assert not any(store.capacity for store in of_their_own)
    assert max(own.store.capacity for own in (seats._verify.cache.entries, seats._state)) < 600
    assert_stocks(target, seats, sessions, requests)


def test_calls_that_no_seat_takes(target: Any, head: DartHead, monkeypatch: pytest.MonkeyPatch) -> None:
    for inputs, options, words in (
        (prompts([5, 3]), {"do_sample": False}, "has 2 rows"),
        (prompts([5]), {"return_dict_in_generate": True, "output_hidden_states": True}, "Hidden states are not"),
    ):
        with pytest.raises(ValueError, match=words):
            opened(target, assistant=head, **inputs, **{"max_new_tokens": 5, **options})
    seats = Seats(2)
    seats.take(opened(target, assistant=head, **prompts([5]), do_sample=False, max_new_tokens=9))
    other = tiny_target("qwen3")
    for model, drafter, shape in ((other, tiny_head(other), None), (target, head, TreeConfig(nodes=3))):
        options = {"do_sample": False, "max_new_tokens": 9, "tree_config": shape}
        with pytest.raises(ValueError, match="share one target"):
            seats.take(opened(model, assistant=drafter, **prompts([5]), **options))
    seats.take(second := opened(target, assistant=head, **prompts([5]), do_sample=False, max_new_tokens=9))
    with pytest.raises(ValueError, match="All 2 seats are taken"):
        seats.take(second)
    target.add_adapter(LoraConfig(target_modules=["q_proj"]))
    monkeypatch.setattr(type(target), "generate", lambda *given, **options: None)
    with pytest.raises(ValueError, match="may switch adapters"):
        opened(target, assistant=head, **prompts([5]))


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
    assert_stocks(target, seats, [session], [short])


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("drafter", [tiny_head, tiny_eagle_drafter, None])
def test_noise_is_no_cost_of_a_draft(drafter: Any, calls: int, noted: Any) -> None:
    """In drafted rounds all of it is drawn in a phase of its own, without a draft that of a round's first token."""
    target, seats = tiny_target("llama"), Seats(2)
    assistant, inputs = drafter(target, tree={"nodes": 6}) if drafter else LookupDrafter(), prompts([5])
    sampled = {"do_sample": True, "top_k": 0, "max_new_tokens": 24}
    for seed in range(calls):
        generator = torch.Generator().manual_seed(seed)
        seats.take(opened(target, generator, assistant=assistant, **inputs, **sampled))
    names, drawn = [""], list[str]()
    plain = stats.DraftStats.phase

    @contextmanager
    def phase(its: stats.DraftStats, name: str) -> Iterator[None]:
        names.append(name)
        with plain(its, name):
            yield
        names.pop()

    noted(walk, "draw_exponential", lambda *_, **__: drawn.append(names[-1]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stats.DraftStats, "phase", phase)
        while seats.taken:
            seats.round()
    if drafter:
        assert {*drawn} == {"noise"}
    else:
        assert drawn.count("noise") > drawn.count("walk")


@pytest.mark.parametrize("calls", [1, 2])
def test_drafts_take_the_time_of_a_selector(target: Any, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves on in a commit and an observer, too, and in nothing else; trees grow around it."""
    head, clock, seats = tiny_head(target, selector_rank=4), [0.0], Seats(calls)
    own, commit, learns = head.transitions, TargetCache.commit, Observer()
    monkeypatch.setattr(learns, "verified", lambda _, logits: clock.append(clock.pop() + bool(logits)))
    head.observers = (lambda _: learns,)

    def scored(*given: Any) -> torch.Tensor | None:
        clock[0] += 1
        return own(*given)

    def committed(*given: Any) -> None:
        clock[0] += 1
        commit(*given)

    monkeypatch.setattr(head, "transitions", scored)
    monkeypatch.setattr(TargetCache, "commit", committed)
    monkeypatch.setattr(stats, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(stats, "processor_time", lambda: 2 * clock[0])
    options: dict[str, Any] = {"assistant": head, "tree_config": TreeConfig(nodes=8), "max_new_tokens": 20}
    sessions = [opened(target, **prompts([5], seed=1), **options) for _ in range(calls)]
    for session in sessions:
        seats.take(session)
    for _ in range(3):
        assert not seats.round()
    for session in sessions:
        nothing = dict.fromkeys(stats.PHASES, 0.0)
        assert session.stats.seconds == nothing | {"draft": 3 / calls, "commit": 3 / calls}
        assert session.stats.processor_seconds == nothing | {"draft": 6 / calls, "commit": 6 / calls}
    assert seats._stats.seconds["walk"] == 0


# ---- drafts that are made together --------------------------------------------------------------------------

DRAFTERS = {
    "head": tiny_head,
    "selector": lambda target: tiny_head(target, selector_rank=4),
    "editor": lambda target: tiny_head(target, editor=True, tree={"nodes": 8, "refine": 1}),
    "diffusion": tiny_diffusion_drafter,
    "eagle": tiny_eagle_drafter,
    "language model": lambda target: LanguageModelDrafter(
        tiny_target("qwen3", num_hidden_layers=1), target, tree_config=TreeConfig(nodes=8)
    ),
    "lookup": lambda _: LookupDrafter(TreeConfig(nodes=8)),
}
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0}
CALLS: list[tuple[int, dict[str, Any]]] = [
    (5, {"do_sample": False, "max_new_tokens": 12}),
    (9, {**SAMPLED, "max_new_tokens": 24}),
    (3, {**SAMPLED, "max_new_tokens": 16, "temperature": 0.6}),
    (14, {"do_sample": False, "max_new_tokens": 18, "repetition_penalty": 1.3}),
    (7, {**SAMPLED, "max_new_tokens": 20, "repetition_penalty": 1.2}),
    (6, {**SAMPLED, "max_new_tokens": 14}),
]


def call(target: Any, drafter: Any, number: int) -> Session:
    length, options = CALLS[number]
    generator = torch.Generator().manual_seed(number)
    return opened(target, generator, assistant=drafter, **prompts([length], seed=number), **options)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafts_are_those_of_calls_alone(kind: str) -> None:
    target = tiny_target("llama")
    drafter = DRAFTERS[kind](target)
    alone = []
    for number, (length, options) in enumerate(CALLS):
        torch.manual_seed(number)
        generate(target, assistant=drafter, **prompts([length], seed=number), **options)
        alone.append(drafter.last_stats)
    seats, waiting, found = Seats(4), [*range(len(CALLS))], []
    while waiting or seats.taken:
        if waiting and seats.free:  # one joins at a time
            found.append(call(target, drafter, waiting.pop(0)))
            seats.take(found[-1])
        assert all(failure is None for _, failure in seats.round())
    for part in ("committed", "drafted", "plain_rounds"):
        assert [getattr(one.stats, part) for one in found] == [getattr(one, part) for one in alone]
    if kind in ("head", "selector", "eagle"):
        assert sum(one.tokens for one in alone) > 1.3 * sum(one.rounds for one in alone)


def test_a_text_longer_than_a_drafters_positions() -> None:
    """It ends the drafts of all calls, and no call."""
    target, seats = tiny_target("llama"), Seats(2)
    short = tiny_target("gpt2", num_hidden_layers=1, n_positions=24)
    drafter, sessions = LanguageModelDrafter(short, target), []
    for length in (5, 22):
        sessions.append(opened(target, assistant=drafter, **prompts([length]), **GREEDY))
        seats.take(sessions[-1])
    assert_stocks(target, seats, sessions, [(prompts([length]), GREEDY) for length in (5, 22)])


def test_a_text_that_ends_near_the_end_of_the_targets_positions() -> None:
    """No tree goes beyond them, whatever room another call has."""
    target, seats = tiny_target("gpt2"), Seats(2)  # which has 256
    head = tiny_head(target)
    ends = [lambda ids, scores, **_: torch.full((len(ids),), ids.shape[1] > 254)]
    options = {"do_sample": False, "max_new_tokens": 40, "stopping_criteria": ends}
    requests = [(prompts([length]), options) for length in (5, 240)]
    sessions = [opened(target, assistant=head, **inputs, **options) for inputs, _ in requests]
    for session in sessions:
        seats.take(session)
    assert_stocks(target, seats, sessions, requests)


def test_one_pace_for_all(noted: Any) -> None:
    """Rounds cost what they cost with so many calls; each call is told its share of the time."""
    target = tiny_target("llama")
    drafter = tiny_head(target, tree={"nodes": None})
    paces = noted(Pace, "count", lambda pace, mode, tokens, *_: (len(tokens), len(pace.cost().verify)))
    seats, sessions = Seats(4), []
    for number in (1, 2, 4):
        sessions.append(call(target, drafter, number))
        seats.take(sessions[-1])
        seats.round()
    assert paces == [(1, 64), (2, 32), (3, 21)]
    assert [known[-1] for (known, *_), _ in drafter.pace_records] == [2], "what two have shown is kept"
    one, two, three = (session.stats for session in sessions)
    assert one.rounds == 3 > two.rounds == 2 > three.rounds == 1
    assert one.seconds["verify"] > two.seconds["verify"] > three.seconds["verify"] > 0
    while seats.taken:
        seats.round()
    assert {known[-1] for (known, *_), _ in drafter.pace_records} >= {2, 3}
