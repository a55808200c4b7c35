"""What the drafter is told: the target's hidden states of every committed position, each with the token after it."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from support.compare import run
from support.tiny import VOCABULARY, ReplayDrafter, ReplayState, prompts, tiny_target
from torch import Tensor
from transformers import DynamicCache

from hf_dart.decoding.api import attach
from hf_dart.models.stock_steps import CACHE
from hf_dart.models.verify import gather_features

LAYERS = (0, 1, 2)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 30}
GREEDY = {"do_sample": False, "max_new_tokens": 30}


class Listener(ReplayDrafter):
    """Keeps everything that it is told, row by row."""

    def begin(self, batch_size: int, capacity: int) -> ReplayState:
        self.features: list[list[Tensor]] = [[] for _ in range(batch_size)]
        self.next_tokens: list[list[int]] = [[] for _ in range(batch_size)]
        return super().begin(batch_size, capacity)

    def extend(self, state: ReplayState, features: Tensor, next_tokens: Tensor, counts: Tensor) -> None:
        assert features.shape[:2] == next_tokens.shape
        for row, count in enumerate(counts.tolist()):
            self.features[row] += features[row, :count].unbind(0)
            self.next_tokens[row] += next_tokens[row, :count].tolist()
        super().extend(state, features, next_tokens, counts)


def listener(target: Any, inputs: dict[str, Tensor], misses: list[float], **options: Any) -> Listener:
    pads = (inputs["attention_mask"] == 0).sum(-1).tolist()
    sequences = run(target, inputs, 0, **options).sequences
    return Listener(sequences, pads, VOCABULARY, misses=misses, hidden_layers=LAYERS)


def assert_told_the_truth(target: Any, drafter: Listener, first: int = 0) -> None:
    """Each row was told its positions from `first` on, in order, up to where its last round began."""
    for row, pad in enumerate(drafter.pads.tolist()):
        text = drafter.sequences[row, pad:]
        told = torch.stack(drafter.features[row])
        end = first + len(told)
        assert drafter.next_tokens[row] == text[first + 1 : end + 1].tolist()
        with torch.no_grad():
            states = target(text[None, :end], use_cache=False, output_hidden_states=True).hidden_states
        wanted = torch.cat([states[layer][0, first:] for layer in LAYERS], dim=-1)
        torch.testing.assert_close(told, wanted, **CLOSE)


@pytest.mark.parametrize(
    ("family", "lengths", "options"),
    [
        (*one, (GREEDY, SAMPLED)[number % 2])
        for number, one in enumerate(product(["llama", "gemma3", "gpt2", "mistral"], [[1], [13], [9, 3, 1, 13]]))
    ],
)
def test_over_a_whole_call(family: str, lengths: list[int], options: dict[str, Any]) -> None:
    target = attach(tiny_target(family))
    inputs = prompts(lengths)
    drafter = listener(target, inputs, [0.1, 0.7, 0.3, 1.0][: len(lengths)], **options)
    run(target, inputs, 0, assistant=drafter, **options)
    assert_told_the_truth(target, drafter)
    assert len(drafter.features[0]) >= lengths[0] + 30 - 8, "a row stopped being told"


@pytest.mark.parametrize("lengths", [[13], [9, 3, 1, 13]])
@pytest.mark.parametrize("chunk", [1, 2, 5, 12, 13, 50])
def test_prefill_in_chunks(lengths: list[int], chunk: int) -> None:
    target, inputs = attach(tiny_target("gemma3")), prompts(lengths)
    options = {**GREEDY, "max_new_tokens": 5, "prefill_chunk_size": chunk}
    drafter = listener(target, inputs, [0.3] * len(lengths), **options)
    run(target, inputs, 0, assistant=drafter, **options)
    assert_told_the_truth(target, drafter)


@pytest.mark.parametrize("chunk", [None, 3])
def test_behind_a_cached_prefix(chunk: int | None) -> None:
    """The drafter begins where the cache that was passed in ends."""
    target = attach(tiny_target("llama"))
    inputs = prompts([20])
    options = {**GREEDY, "max_new_tokens": 12, "prefill_chunk_size": chunk}
    drafter = listener(target, inputs, [0.3], **options)
    # What the drafter counts are positions after the prefix.
    drafter.sequences, whole = drafter.sequences[:, 11:], drafter.sequences
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(inputs["input_ids"][:, :11], **{CACHE: cache}, use_cache=True)
    again = copy.deepcopy(cache)
    run(target, inputs, 0, **{CACHE: again}, **options)
    if again.get_seq_length() > whole.shape[1]:  # the prefix was read again
        with pytest.raises(ValueError, match="leave prefill_chunk_size out"):
            run(target, inputs, 0, assistant=drafter, **{CACHE: cache}, **options)
        assert cache.get_seq_length() == 11
        return
    ours = run(target, inputs, 0, assistant=drafter, **{CACHE: cache}, **options)
    assert torch.equal(ours.sequences, whole)
    assert drafter.last_stats.tau > 2
    drafter.sequences = whole
    assert_told_the_truth(target, drafter, first=11)


@torch.no_grad()
def test_as_many_rows_and_positions_as_streams() -> None:
    """Two of each: sizes do not tell which is which."""
    target = tiny_target("gemma3n")
    ids = torch.tensor([[5, 9], [7, 3]])
    layers = list(LAYERS)
    told = gather_features(target(ids, output_hidden_states=True), layers, ids)
    for row, text in zip(told, ids[:, None], strict=True):
        alone = gather_features(target(text, output_hidden_states=True), layers, text)
        torch.testing.assert_close(row[None], alone, **CLOSE)


def test_statistics_add_up() -> None:
    target = attach(tiny_target("llama"))
    inputs = prompts([9, 3, 7, 13])
    drafter = listener(target, inputs, [0.0, 0.4, 0.8, 1.0], **GREEDY)
    run(target, inputs, 0, assistant=drafter, **GREEDY)
    stats = drafter.last_stats
    assert stats.tokens == 4 * 29, "all but the token of the prefill"
    assert stats.accepted == stats.tokens - stats.row_rounds
    assert stats.tau == stats.tokens / stats.row_rounds
    assert stats.acceptance_rate == stats.accepted / stats.drafted
    assert stats.rounds <= stats.row_rounds <= 4 * stats.rounds
    assert sorted(stats.accepted_per_depth, reverse=True) == stats.accepted_per_depth
    assert len(stats.accepted_per_depth) == drafter.draft_length, "the first row's drafts are all right"
    assert sum(map(sum, stats.committed)) == stats.tokens
    assert len(stats.committed) == stats.rounds
    assert min(stats.seconds.values()) >= 0 < sum(stats.seconds.values())
