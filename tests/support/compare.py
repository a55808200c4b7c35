"""Drafted against stock `generate`: output, error, the generator's state, and what a call leaves on the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import is_initialized

from hf_dart.bench import exact
from hf_dart.models.devices import autocast_dtype
from support.tallies import Tally
from support.tallies import tally as tally


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


def both(model: Any, drafter: Any, inputs: dict[str, Any], seed: int, options: dict[str, Any]) -> tuple[Run, Run]:
    """Stock's run and ours, which alone takes options of drafts: they are taken out."""
    drafting = {name: options.pop(name) for name in ("tree_config", "refine", "memory") if name in options}
    stock = stock_run(model, inputs, seed, options)
    return stock, run(model, inputs, seed, assistant=drafter, **drafting, **options)


_STOCK_RUNS: dict[Any, Run] = {}


def stock_run(model: Any, inputs: dict[str, Any], seed: int, options: dict[str, Any]) -> Run:
    """Run stock, or take the run of an equal call from earlier in this process."""
    key = stock_key(model, inputs, seed, options)
    made = _STOCK_RUNS.get(key) or run(model, inputs, seed, **options)
    if key is not None and isinstance(made.output, Tensor):
        _STOCK_RUNS[key] = made
    return made


def stock_key(model: Any, inputs: dict[str, Any], seed: int, options: dict[str, Any]) -> Any:
    """All that stock's run depends on; None where that is more than transformers' own code, weights and plain values.

    So stock is run for attention that tests register and whose calls they count, too, and of several processes by all.
    """
    attention, held = model.config._attn_implementation, model.state_dict().values()
    if attention not in ("eager", "sdpa") or model.device.type != "cpu" or is_initialized():
        return None
    for module in model.modules():
        code = (*module._forward_hooks.values(), *module._forward_pre_hooks.values(), type(module))
        if "forward" in vars(module) or not all(it.__module__.startswith(("torch.", "transformers.")) for it in code):
            return None
    try:
        asked = json.dumps([seed, options, {name: value.tolist() for name, value in inputs.items()}])
    except (TypeError, AttributeError):
        return None
    if any(type(weight) is not Tensor for weight in held):
        return None
    weights = tuple(hash(bytes(weight.reshape(-1).view(torch.uint8).numpy())) for weight in held)
    kinds = *(value.dtype for value in inputs.values()), model.dtype, model.training, attention
    around = torch.get_default_dtype(), autocast_dtype(model.device), torch.is_inference_mode_enabled()
    configs = repr([vars(one) for one in (model.config, model.generation_config)])
    return asked, weights, kinds, around, repr(model), configs


def assert_identical(
    model: Any, drafter: Any, inputs: dict[str, Any], *, seed: int = 0, into: Tally | None = None, **options: Any
) -> tuple[Run, Run]:
    """Run both ways, without tolerance; returns stock's run and ours."""
    stock, ours = both(model, drafter, inputs, seed, options)
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
    assert [*ours.output] == [*stock.output]
    for name in ("scores", "logits", "hidden_states"):
        left, right = getattr(ours.output, name), getattr(stock.output, name)
        assert type(left) is type(right)
        # Parts of some models, and all scores, are computed in fp32.
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5, equal_nan=True)


def assert_identical_up_to_near_ties(
    model: Any, drafter: Any, inputs: dict[str, Any], *, seed: int = 0, into: Tally, label: str, **options: Any
) -> None:
    """For 32 bits and less: where a row differs first, stock's own choice must be a near-tie (`bench.exact`)."""
    stock, ours = both(model, drafter, inputs, seed, options)
    found = parted(model, inputs, seed, options, stock, ours)
    assert all(one.near_tie for one in found), f"{label}: {found}"
    assert found or torch.equal(ours.state, stock.state), "the generator is not where stock leaves it"
    into.add(drafter.last_stats)
    into.near_ties += [f"{label}: token {one.position}, gap {one.gap:.1e}" for one in found]


def parted(
    model: Any, inputs: dict[str, Any], seed: int, options: dict[str, Any], stock: Run, ours: Run
) -> list[exact.Difference]:
    """Where rows differ first from stock's."""
    runs = (exact.Run(model, inputs, options, seed, one.sequences, 0.0, 0.0, one.state, None) for one in (stock, ours))
    return [one for one in exact.differences(*runs)[0] if one is not None]


@contextmanager
def configs_put_back(model: Any) -> Iterator[None]:
    """Undo what happens inside to the model's configs.

    Stock's own calls change them: `assistant_early_exit` the layers.
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
