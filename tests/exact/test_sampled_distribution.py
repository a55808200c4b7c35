"""Sampled text is distributed as it should be: against the probability of every text that there is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.tiny import tiny_head, tiny_target
from torch import Tensor

from hf_dart import TreeConfig

_TOKENS, _LENGTH = 5, 3
_OPTIONS = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.9}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    target = tiny_target("llama", vocab_size=_TOKENS, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    return target, tiny_head(target, tree={"nodes": 6})


@torch.no_grad()
def chances(target: Any, prompt: Tensor) -> Tensor:
    """[5^3] the chance of every text after the prompt [1, P], from one forward pass and the definition of top-p."""
    texts = torch.tensor(list(itertools.product(range(_TOKENS), repeat=_LENGTH)))
    rows = torch.cat([prompt.expand(len(texts), -1), texts], dim=1)
    logits = target(input_ids=rows).logits[:, prompt.shape[1] - 1 : -1] / _OPTIONS["temperature"]
    steps = logits.softmax(-1)
    ordered, order = steps.sort(-1, descending=True)
    outside = (ordered.cumsum(-1) - ordered) >= _OPTIONS["top_p"]
    steps = steps.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), 0)
    steps = steps / steps.sum(-1, keepdim=True)
    return steps.gather(-1, texts[..., None])[..., 0].prod(-1)


def chi_squared(found: Tensor, expected: Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom; texts expected less than five times are taken together."""
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    found = torch.cat([found[~rare], found[rare].sum()[None]])
    kept = expected > 0
    return float(((found - expected)[kept] ** 2 / expected[kept]).sum()), int(kept.sum()) - 1


def test_every_text_comes_as_often_as_it_should(pair: tuple[Any, Any]) -> None:
    """Against the law itself, not against stock."""
    target, head = pair
    prompt = torch.tensor([[1, 2, 3, 1]])
    expected = chances(target, prompt)
    assert float(expected.sum()) == pytest.approx(1)
    rows, calls = 250, 8
    drafting = {"assistant": head, "tree_config": TreeConfig(nodes=6, lookup=0), "num_return_sequences": rows}
    torch.manual_seed(0)
    texts = [target.generate(prompt, max_new_tokens=_LENGTH, **_OPTIONS, **drafting) for _ in range(calls)]
    drawn = torch.cat(texts)[:, prompt.shape[1] :]
    places = drawn @ torch.tensor([_TOKENS**2, _TOKENS, 1])
    found = torch.bincount(places, minlength=_TOKENS**_LENGTH).double()
    assert found[expected == 0].sum() == 0
    statistic, degrees = chi_squared(found, expected * rows * calls)
    assert degrees > 5
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5  # four standard deviations
    # The test can fail: the same counts do not follow a slightly flatter law.
    flatter = expected.sqrt() / expected.sqrt().sum()
    assert chi_squared(found, flatter * rows * calls)[0] > degrees + 4 * (2 * degrees) ** 0.5
