"""What is known of stock's processors: what may run on all nodes, and draws through filters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_dart.decoding.processors import AdditivePenaltyLogitsProcessor, Filters, needs_stocks_steps, scores_alone

FILTERS: dict[str, list[LogitsProcessor]] = {
    "top-k": [TopKLogitsWarper(5)],
    "top-p": [TopPLogitsWarper(0.8)],
    "top-k, top-p": [TopKLogitsWarper(20), TopPLogitsWarper(0.9)],
    "few are left": [TopKLogitsWarper(9), TopPLogitsWarper(0.2)],
    "one is left": [TopPLogitsWarper(0.001)],
}


@pytest.mark.parametrize("mode", FILTERS)
@pytest.mark.parametrize("size", [4, 64, 5000])
def test_a_draw_through_filters_is_stocks(size: int, mode: str) -> None:
    """Of scores as they come, of equal ones, as those of 16 bits often are, and where many tokens are impossible."""
    generator = torch.Generator().manual_seed(size)
    _, filters = Filters.split(LogitsProcessorList([TemperatureLogitsWarper(0.5), *FILTERS[mode]]))
    assert filters is not None
    undecided = 0
    for number in range(240):
        scores = torch.randn(1, size, generator=generator) * (1, 3)[number // 3 % 2]
        if number % 3:
            scores = scores.bfloat16().float() if number % 3 == 1 else scores.round()
        if number % 4 == 0:
            scores[0, torch.rand(size, generator=generator) < 0.5] = -torch.inf
        noise = torch.empty(1, size).exponential_(generator=generator)
        filtered = scores
        for processor in FILTERS[mode]:
            filtered = processor(torch.empty(1, 0, dtype=torch.long), filtered)
        token = filters.draw(scores, noise)
        undecided += token is None
        assert token in (None, int((filtered.softmax(-1) / noise).argmax()))
    assert undecided < 120


def test_where_roundings_decide_nothing_is_drawn() -> None:
    scores, noise = torch.zeros(1, 6), torch.ones(1, 6)
    assert Filters([], top_k=3).draw(scores, noise) is None, "which of equal races wins"
    noise[0, 2] = 0.5
    assert Filters([], top_k=3).draw(scores, noise) == 2
    assert Filters([], top_p=0.5).draw(scores, noise) is None, "which of equal tokens are kept"
    assert Filters([], top_k=3).draw(scores.fill_(torch.nan), noise) is None
    assert Filters([], top_k=3).draw(torch.randn(1, 6), noise.fill_(0)) is None


def test_filters_are_those_of_stock_at_the_end() -> None:
    def split(*processors: LogitsProcessor) -> tuple[list[LogitsProcessor], list[LogitsProcessor]]:
        before, filters = Filters.split(LogitsProcessorList(processors))
        return [*before], [*filters.processors] if filters else []

    class Other(TopPLogitsWarper):
        pass

    t, k, p = TemperatureLogitsWarper(2.0), TopKLogitsWarper(5), TopPLogitsWarper(0.8)
    assert [split(), split(t), split(t, k), split(t, p)] == [([], []), ([t], []), ([t], [k]), ([t], [p])]
    assert [split(k, p), split(t, k, p), split(k, t, p)] == [([], [k, p]), ([t], [k, p]), ([k, t], [p])]
    assert split(t, k, p, MinPLogitsWarper(0.0)) == ([t], [k, p]), "as it removes nothing"
    assert [split(p, k), split(p, p), split(p, t)] == [([p], [k]), ([p], [p]), ([p, t], [])]
    for other in (Other(0.5), TopKLogitsWarper(5, filter_value=-1e4), TopPLogitsWarper(0.5, min_tokens_to_keep=2)):
        assert split(t, other) == ([t, other], [])


def test_what_may_run_on_all_nodes() -> None:
    alone = LogitsProcessorList([TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)])
    assert scores_alone(alone)
    assert not scores_alone(LogitsProcessorList([*alone, RepetitionPenaltyLogitsProcessor(1.2)]))

    class Warmer(TemperatureLogitsWarper):
        def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
            return super().__call__(input_ids, scores) * input_ids.shape[1]

    assert not scores_alone(LogitsProcessorList([Warmer(0.5)]))


def test_additive_penalties_count_what_was_written() -> None:
    """Tokens of the text count, none of the prompt: presence once, frequency as often as it is there."""
    text = torch.tensor([[1, 1, 2, 3, 3, 3], [4, 4, 4, 4, 0, 1]])
    scores, processor = torch.randn(2, 5, dtype=torch.float64), AdditivePenaltyLogitsProcessor(2, 0.5, 0.25)
    found = processor(text, scores)
    expected = scores.clone()
    for row, counts in enumerate(({2: 1, 3: 3}, {4: 2, 0: 1, 1: 1})):
        for token, count in counts.items():
            expected[row, token] -= 0.5 + 0.25 * count
    assert torch.equal(found, expected)
    assert not needs_stocks_steps(LogitsProcessorList([processor]), [], None, GenerationConfig())
