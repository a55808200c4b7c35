"""Drafted against stock `generate`: the same tokens, and the generator left in the same state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_dart.decoding.stats import DraftStats

NEAR_TIE = 1e-5


@dataclass
class Tally:
    """What the runs of one test file add up to; printed at the end of the session."""

    title: str
    taus: list[float] = field(default_factory=list)
    near_ties: list[str] = field(default_factory=list)

    def add(self, stats: DraftStats) -> None:
        if stats.rounds:
            self.taus.append(stats.tau)

    @property
    def mean_tau(self) -> float:
        return sum(self.taus) / len(self.taus)

    def __str__(self) -> str:
        lines = [f"{self.title}: mean tau {self.mean_tau:.2f} over {len(self.taus)} runs"]
        lines.append(f"  {len(self.near_ties)} differences at near-ties of stock's own")
        return "\n".join([*lines, *(f"    {case}" for case in self.near_ties)])


TALLIES: dict[str, Tally] = {}


def tally(title: str) -> Tally:
    """The session's tally of that title."""
    return TALLIES.setdefault(title, Tally(title))


@dataclass
class Run:
    """One `generate` call: what it returned and the state of the default generators after it."""

    output: Any
    state: Tensor

    @property
    def sequences(self) -> Tensor:
        return self.output if isinstance(self.output, Tensor) else self.output.sequences


def run(model: Any, inputs: dict[str, Any], seed: int, **options: Any) -> Run:
    torch.manual_seed(seed)
    output = model.generate(**inputs, **options)
    return Run(output, generators(model.device))


def generators(device: torch.device) -> Tensor:
    """The state of the CPU's default generator, and of the device's."""
    cpu = torch.get_rng_state()
    return torch.cat([cpu, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else cpu


def assert_identical(
    model: Any, drafter: Any, inputs: dict[str, Any], *, seed: int = 0, into: Tally | None = None, **options: Any
) -> tuple[Run, Run]:
    """Run both ways, without tolerance; returns stock's run and ours."""
    drafting = {name: options.pop(name) for name in ("tree_config", "refine") if name in options}
    stock = run(model, inputs, seed, **options)
    ours = run(model, inputs, seed, assistant=drafter, **drafting, **options)
    assert ours.sequences.shape == stock.sequences.shape, f"{ours.sequences}\nstock\n{stock.sequences}"
    assert torch.equal(ours.sequences, stock.sequences), f"{ours.sequences}\nstock\n{stock.sequences}"
    assert torch.equal(ours.state, stock.state), "the generator is not where stock leaves it"
    if into is not None:
        into.add(drafter.last_stats)
    return stock, ours


def assert_identical_up_to_near_ties(
    model: Any, drafter: Any, inputs: dict[str, Any], *, seed: int = 0, into: Tally, label: str, **options: Any
) -> None:
    """For fp32: where a row differs first, stock's own two best tokens must lie within `NEAR_TIE`."""
    drafting = {name: options.pop(name) for name in ("tree_config", "refine") if name in options}
    stock = run(model, inputs, seed, **options)
    ours = run(model, inputs, seed, assistant=drafter, **drafting, **options)
    into.add(drafter.last_stats)
    start = inputs["input_ids"].shape[1]
    split = first_difference(stock.sequences, ours.sequences)
    if split is None:
        assert torch.equal(ours.state, stock.state), "the generator is not where stock leaves it"
        return
    # After one row's near-tie the length of the whole batch may change too, so only what comes first counts.
    row, position = split
    gap = top2_gap(model, inputs, seed, row, position - start, **options)
    assert gap < NEAR_TIE, (
        f"{label}: row {row} differs at generated token {position - start}, where stock's own gap is {gap:.2g}"
    )
    into.near_ties.append(f"{label}: row {row}, token {position - start}, gap {gap:.1e}")


def first_difference(left: Tensor, right: Tensor) -> tuple[int, int] | None:
    """(row, column) of the first column in which two batches of ids differ."""
    width = min(left.shape[1], right.shape[1])
    differs = left[:, :width] != right[:, :width]
    if not differs.any():
        return None if left.shape == right.shape else (0, width)
    column = int(differs.any(0).nonzero()[0])
    return int(differs[:, column].nonzero()[0]), column


def top2_gap(model: Any, inputs: dict[str, Any], seed: int, row: int, position: int, **options: Any) -> float:
    """How far stock's choice at a generated position was from its second best.

    In its processed logits when greedy; in log(p / E) when sampling, E being the Exp(1) noise that
    `torch.multinomial` drew for that position.
    """
    options = {name: value for name, value in options.items() if name != "streamer"}
    told = run(model, inputs, seed, **options, return_dict_in_generate=True, output_scores=True)
    scores = told.output.scores[position].float()
    if options.get("do_sample"):
        torch.manual_seed(seed)
        for _ in range(position + 1):
            noise = torch.empty_like(scores).exponential_(1)
        scores = scores.log_softmax(-1) - noise.log()
    best = scores[row].topk(2).values
    return float(best[0] - best[1])
