"""All that a `generate` call leaves, held against stock's: output, error, generator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from support.compare import Run


@dataclass
class Outcome(Run):
    """What a call returned or raised, and the generator's state after it."""

    error: type[Exception] | None = None


def call(target: Any, seed: int, **options: Any) -> Outcome:
    torch.manual_seed(seed)
    try:
        return Outcome(target.generate(**options), torch.get_rng_state())
    except (ValueError, RuntimeError, IndexError, TypeError, AttributeError) as error:
        return Outcome(error, torch.get_rng_state(), type(error))


def same(ours: Outcome, stock: Outcome) -> None:
    assert ours.error is stock.error, f"{ours.output!r}\nstock\n{stock.output!r}"
    if stock.error is not None:
        return
    assert ours.sequences.shape == stock.sequences.shape, f"{ours.sequences}\nstock\n{stock.sequences}"
    assert torch.equal(ours.sequences, stock.sequences), f"{ours.sequences}\nstock\n{stock.sequences}"
    assert torch.equal(ours.state, stock.state), "the generator is not where stock leaves it"
    if isinstance(stock.output, Tensor):
        return
    assert set(ours.output.keys()) - {"draft_stats"} == set(stock.output.keys())
    # Parts of some models, and all scores, are computed in fp32.
    for name in ("scores", "logits", "hidden_states"):
        assert_close(getattr(ours.output, name), getattr(stock.output, name), 1e-5)


def assert_close(ours: Any, stock: Any, tolerance: float) -> None:
    """Equal in structure, dtype and, to rounding, in values."""
    assert type(ours) is type(stock)
    if isinstance(stock, tuple):
        assert len(ours) == len(stock)
        for left, right in zip(ours, stock, strict=True):
            assert_close(left, right, tolerance)
    elif stock is not None:
        torch.testing.assert_close(ours, stock, rtol=tolerance, atol=tolerance, equal_nan=True)


def identical(target: Any, drafter: Any, inputs: dict[str, Any], seed: int = 0, **options: Any) -> Outcome:
    stock = call(target, seed, **inputs, **options)
    same(call(target, seed, **inputs, **options, assistant=drafter), stock)
    assert stock.error is None, stock.output
    return stock


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
