"""Tokens are chosen as stock chooses them, node by node or at all at once, with the noise of `torch.multinomial`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import SAMPLERS, replay
from support.compare import assert_identical
from support.memory import TensorPeak
from support.tiny import VOCABULARY, prompts, tiny_target
from support.trees import choose_everywhere
from torch import Tensor

from hf_dart import DartHead, TreeConfig
from hf_dart.decoding.api import attach
from hf_dart.decoding.processors import AdditivePenaltyLogitsProcessor
from hf_dart.decoding.rows import Rows
from hf_dart.decoding.walk import MAX_LEAD, NoiseStream, by_uniform, draw_exponential, largest

OPTIONS: dict[str, dict[str, Any]] = {
    **SAMPLERS,
    "T=1e-5": {"do_sample": True, "top_k": 0, "temperature": 1e-5},
    "suppressed": {"do_sample": True, "top_k": 0, "suppress_tokens": [4, 9]},
    "presence": {"do_sample": True, "top_k": 0, "logits_processor": [AdditivePenaltyLogitsProcessor(7, 0.8, 0.3)]},
}


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("mode", OPTIONS)
def test_both_walks_give_stocks_tokens(
    target: Any, head: DartHead, mode: str, size: int, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if everywhere:
        choose_everywhere(monkeypatch)
    assert_identical(target, head, prompts([7, 3, 9, 5][:size]), max_new_tokens=24, **OPTIONS[mode])
    assert head.last_stats.drafted > 0


@pytest.mark.parametrize("part", ["logits_processor", "stopping_criteria"])
def test_what_may_do_anything_is_called_as_stock_calls_it(target: Any, head: DartHead, part: str) -> None:
    """Once per position, on the whole batch; it writes into the text, of which the target reads what stands there."""

    def writes(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        ids[:, -1] = (ids[:, -1] + ids.shape[1] % 3) % VOCABULARY
        return scores if part == "logits_processor" else torch.zeros(len(ids), dtype=torch.bool)

    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 24, part: [writes]}
    assert_identical(target, head, prompts([7, 3, 9, 5]), **options)


@pytest.mark.parametrize("way", ["everywhere", "by token", "in step"])
def test_tokens_that_float32_cannot_tell_apart(
    target: Any, head: DartHead, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock compares scores as float32, where the first of equal ones is chosen."""
    with torch.no_grad():
        weight = target.lm_head.weight
        weight[1::2] = weight[::2] * (1 + 1e-12)
    inputs, options = prompts([7, 3]), {"do_sample": False, "max_new_tokens": 24}
    if way == "everywhere":
        choose_everywhere(monkeypatch)
    if way == "in step":
        options |= {"return_dict_in_generate": True, "output_scores": True}
    stock, _ = assert_identical(target, head, inputs, **options)
    assert not (stock.sequences[:, 7:] % 2).any(), "of each pair, the first was to be chosen"


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 40_000])
def test_the_largest_is_the_one_of_stocks_argmax(size: int) -> None:
    """Also of equal scores, of infinite ones, and where some are nan."""
    generator = torch.Generator().manual_seed(size)
    for number in range(60):
        scores = torch.randint(3 if number % 2 else 10**6, (1, size), generator=generator).float()
        for value in (torch.inf, -torch.inf, torch.nan)[: number % 4]:
            scores[0, torch.randint(size, (3,), generator=generator)] = value
        assert largest(scores) == int(torch.argmax(scores, dim=-1))
    assert largest(torch.full((1, size), -torch.inf)) == 0


@pytest.mark.parametrize("everywhere", [True, False])
def test_no_token_is_drawn_from_nan(
    target: Any, head: DartHead, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = prompts([7, 3])
    target.generate(**inputs, max_new_tokens=2, do_sample=True, assistant=head)  # tried while it was sound
    with torch.no_grad():
        target.lm_head.weight[5] = torch.nan
    if everywhere:
        choose_everywhere(monkeypatch)
    for options in ({}, {"assistant": head}):
        with pytest.raises(RuntimeError, match=r"inf.*nan"):
            target.generate(**inputs, max_new_tokens=8, do_sample=True, top_k=0, **options)


# ---- the noise ---------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


def test_rows_start_where_they_are_whatever_was_forgotten() -> None:
    """Also a row that has ended, which may lie behind what is kept; what is skipped is not kept."""
    torch.manual_seed(5)
    blocks = torch.stack([torch.empty(3, 9).exponential_(1) for _ in range(310)])  # [position, row, V]
    torch.manual_seed(5)
    stream = NoiseStream(3, 9, CPU).begin()
    for position in [*range(0, 30, 3), 300]:
        stream.forget_before(position)
        assert len(stream._blocks) <= 3 + 9
        starts = [position + 2, position, position + 5]
        window, gumbel = stream.exponentials(starts, 4), stream.gumbel(starts, 4)
        some = torch.tensor([7, 0, 3])
        assert torch.equal(stream.gumbel(starts, 4, some), gumbel[:, :, some])
        for row, start in enumerate(starts):
            assert torch.equal(window[row], blocks[start : start + 4, row])
            assert torch.equal(gumbel[row], -blocks[start : start + 4, row].log())
    assert [*stream._states] == [36, *range(300, 310)]
    with TensorPeak([], stream._blocks[300].nbytes + 1) as measured:
        window = stream.exponentials([302, 300, 305], 4)
    assert measured.peak == window.nbytes, "no row is held twice"
    window = stream.exponentials([2, 302, 301], 3)
    assert window.shape == (3, 3, 9)
    assert torch.equal(window[1], blocks[302:305, 1])
    torch.manual_seed(5)
    for _ in range(312):
        torch.empty(3, 9).exponential_(1)
    state = torch.get_rng_state()
    stream.leave_as_stock(312)  # three positions on
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(1, 9), (3, 5000), (1, 300_000), (2, 200_000)])
def test_numbers_are_those_of_stocks_draws(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, and so is the generator's state, in whichever way they are drawn."""
    generator, stocks = (torch.Generator().manual_seed(7) for _ in range(2))
    assert by_uniform(), "this torch draws otherwise, and its own way takes longer"
    for known in (False, True):
        monkeypatch.setattr("hf_dart.decoding.walk.by_uniform", lambda known=known: known)
        drawn = draw_exponential(*shape, CPU, generator)
        assert drawn.dtype == torch.float32
        assert torch.equal(drawn, torch.empty(shape).exponential_(1, generator=stocks))
        assert torch.equal(generator.get_state(), stocks.get_state())
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, generator: self.zero_())
    assert not draw_exponential(*shape, CPU, generator).signbit().any(), "a token of no noise wins, as with stock"


def test_streams_side_by_side_draw_noise_of_their_own() -> None:
    torch.manual_seed(5)
    alone = NoiseStream(1, 9, CPU).begin().exponentials([0], 4)
    state = torch.get_rng_state()
    first, *others = [NoiseStream(1, 9, CPU).begin() for _ in range(3)]
    drawn = [stream.exponentials([0], 4) for stream in (first, *others)]
    assert torch.equal(drawn[0], alone)
    assert not any(torch.equal(drawn[left], drawn[right]) for left in range(3) for right in range(left))
    first.leave_as_stock(4)
    after = torch.get_rng_state()
    for other in others:
        other.leave_as_stock(2)  # it does not rewind what others have drawn
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(after, state)
    # Nothing runs any more.
    assert torch.equal(NoiseStream(1, 9, CPU).begin().exponentials([0], 1)[:, 0], torch.empty(1, 9).exponential_(1))


def test_a_stream_that_was_not_begun_leaves_the_generator_to_the_others() -> None:
    torch.manual_seed(5)
    first, second = NoiseStream(1, 9, CPU).begin(), NoiseStream(1, 9, CPU).begin()
    after = torch.get_rng_state()
    first.leave_as_stock(0)
    assert torch.equal(torch.get_rng_state(), after), "the next stream would be seeded as the second was"
    assert not torch.equal(second.exponentials([0], 1), NoiseStream(1, 9, CPU).begin().exponentials([0], 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_noise_is_float32_whatever_the_default(dtype: torch.dtype) -> None:
    target = attach(tiny_target("llama"))
    inputs = prompts([7, 4])
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 40}
    drafter = replay(target, inputs, misses=[0.1, 0.3], **options)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert NoiseStream(1, 9, CPU).begin().exponential(0, 0).dtype == torch.float32
        for seed in range(3):
            assert_identical(target, drafter, inputs, seed=seed, **options)
    finally:
        torch.set_default_dtype(default)


DEPTH = 9
LEFT_BEHIND = [0.0, 1.0, 0.0, 0.3]


@pytest.mark.parametrize("misses", [LEFT_BEHIND, [1.0, 0.0, 0.0, 0.0]])
@pytest.mark.parametrize("shared", [True, False], ids=["", "noise not shared"])
@pytest.mark.parametrize("eos", [None, [3]], ids=["to the end", "some end early"])
def test_what_is_held_stays_bounded(misses: list[float], eos: Any, shared: bool, noted: Any) -> None:
    """One row has every draft accepted, another none; some end early, and no longer count then."""
    rows = noted(Rows, "__init__", lambda self, *_: self)

    def held(_: None, stream: NoiseStream, end: int) -> tuple[int, ...]:
        running = rows[-1]
        if running.finished:
            return 0, 0, 0, 0
        lead = max(running.emitted) - running.slowest()
        return lead, len(stream._blocks), max(map(len, stream._gumbels)), len(stream._states)

    told = noted(NoiseStream, "draw_to", held, result=True)
    target = attach(tiny_target("llama"))
    inputs = prompts([9, 3, 7, 13])
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 90, "eos_token_id": eos, "pad_token_id": 0}
    drafter = replay(target, inputs, misses=misses, draft_length=DEPTH, **options)
    drafter.tree_config = TreeConfig(shared_noise=shared, lookup=0, nodes=24)
    assert_identical(target, drafter, inputs, **options)
    leads, blocks, gumbels, states = (max(counts) for counts in zip(*told, strict=True))
    assert leads <= MAX_LEAD
    # From the slowest row to where the fastest one's draft ends; and the state after that.
    assert max(blocks, gumbels, states - 1) <= MAX_LEAD + DEPTH
    if eos is None:
        assert leads >= MAX_LEAD - 1, "no row was held back"
    else:
        assert len({*rows[-1].emitted}) > 1, "no row ended early"
