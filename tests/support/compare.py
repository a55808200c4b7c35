"""Drafted against stock `generate`: output, error, the generator's state, and what a call leaves on the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    """One `generate` call: what it returned or raised, and the state of the default generators after it."""

    output: Any
    state: Tensor
    error: type[BaseException] | None = None

    @property
    def sequences(self) -> Tensor:
        return self.output if isinstance(self.output, Tensor) else self.output.sequences


def run(model: Any, inputs: dict[str, Any], seed: int, **options: Any) -> Run:
    torch.manual_seed(seed)
    output = model.generate(**inputs, **options)
    return Run(output, generators(model.device))


def outcome(model: Any, inputs: dict[str, Any], seed: int, **options: Any) -> Run:
    """Run a call that may raise."""
    try:
        return run(model, inputs, seed, **options)
    except (ValueError, RuntimeError, IndexError, TypeError, AttributeError) as error:
        return Run(error, generators(model.device), type(error))


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
    same(ours, stock)
    if into is not None:
        into.add(drafter.last_stats)
    return stock, ours


def same(ours: Run, stock: Run) -> None:
    """Hold tokens and generators to stock's without tolerance, and what else was asked for to rounding."""
    assert ours.error is stock.error, f"{ours.output!r}\nstock\n{stock.output!r}"
    if stock.error is not None:
        return
    assert torch.equal(ours.sequences, stock.sequences), f"{ours.sequences}\nstock\n{stock.sequences}"
    assert torch.equal(ours.state, stock.state), "the generator is not where stock leaves it"
    if isinstance(stock.output, Tensor):
        return
    assert set(ours.output.keys()) - {"draft_stats"} == set(stock.output.keys())
    for name in ("scores", "logits", "hidden_states"):
        left, right = getattr(ours.output, name), getattr(stock.output, name)
        assert type(left) is type(right)
        # Parts of some models, and all scores, are computed in fp32.
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5, equal_nan=True)


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


@contextmanager
def configs_put_back(model: Any) -> Iterator[None]:
    """Undo what happens inside to the model's configs.

    Stock's own calls change them: `cache_implementation="paged"` the attention, `assistant_early_exit` the layers.
    """
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = [(config, dict(vars(config))) for config in configs.values()]
    try:
        yield
    finally:
        for config, fields in before:
            vars(config).clear()
            vars(config).update(fields)


def snapshot(model: Any) -> dict[str, Any]:
    """All of a model that a call could leave changed."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "generation": model.generation_config.to_dict(),
        "training": [module.training for module in model.modules()],
        "hooks": [len(getattr(module, name)) for module in model.modules() for name in hooks],
        # A static cache that was asked for is made by stock, before it calls us, and kept on the model.
        "own": [sorted(vars(m).keys() - {"_cache", "_previous_max_cache_length"}) for m in model.modules()],
        "forward": [module.forward.__func__ for module in model.modules()],
        "weights": [weight.data_ptr() for weight in model.state_dict().values()],
        "values": [weight.sum().item() for weight in model.state_dict().values()],
    }
