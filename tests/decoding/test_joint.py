"""Drafts that are made together are those that each call gets alone, whoever comes and goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny import prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target

from hf_dart import LanguageModelDrafter, LookupDrafter, TreeConfig
from hf_dart.decoding.api import generate, open_request, requested
from hf_dart.decoding.pace import Pace
from hf_dart.decoding.seats import Seats
from hf_dart.decoding.session import Session

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
    (9, {**SAMPLED, "max_new_tokens": 40}),
    (3, {**SAMPLED, "max_new_tokens": 25, "temperature": 0.6}),
    (14, {"do_sample": False, "max_new_tokens": 30, "repetition_penalty": 1.3}),
    (7, {**SAMPLED, "max_new_tokens": 33, "repetition_penalty": 1.2}),
    (6, {**SAMPLED, "max_new_tokens": 20}),
]


def opened(target: Any, drafter: Any, number: int) -> Session:
    length, options = CALLS[number]
    request = requested(target, assistant=drafter, **prompts([length], seed=number), **options)
    return open_request(request, torch.Generator().manual_seed(number))


@pytest.mark.parametrize("kind", DRAFTERS)
def test_as_alone(kind: str) -> None:
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
            found.append(opened(target, drafter, waiting.pop(0)))
            seats.take(found[-1])
        assert all(failure is None for _, failure in seats.round())
    assert [session.stats.committed for session in found] == [stats.committed for stats in alone]
    if kind in ("head", "selector", "eagle"):
        assert sum(stats.tokens for stats in alone) > 1.3 * sum(stats.rounds for stats in alone)


def test_one_pace_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds cost what they cost with so many calls; each call is told its share of the time."""
    target = tiny_target("llama")
    drafter, paces, own = tiny_head(target, tree={"nodes": None}), list[tuple[int, int]](), Pace.count

    def counted(self: Pace, mode: str, tokens: Any, limits: Any, nodes: int, *rest: Any) -> None:
        paces.append((len(tokens), len(self.cost().verify)))
        own(self, mode, tokens, limits, nodes, *rest)

    monkeypatch.setattr(Pace, "count", counted)
    seats, sessions = Seats(4), []
    for number in (1, 2, 4):
        sessions.append(opened(target, drafter, number))
        seats.take(sessions[-1])
        seats.round()
    assert paces == [(1, 64), (2, 32), (3, 21)]
    one, two, three = (session.stats for session in sessions)
    assert one.rounds == 3 > two.rounds == 2 > three.rounds == 1
    assert one.seconds["verify"] > two.seconds["verify"] > three.seconds["verify"] > 0
