"""What is the same but for rounding, in each dtype."""

from __future__ import annotations

import pytest
import torch

from hf_dart.models.tolerance import allowance, coarsest, difference, same

VALUES = torch.linspace(-3, 5, 37, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_roundings_of_the_largest_number(dtype: torch.dtype) -> None:
    one = VALUES.to(dtype)
    for share, is_rounding in ((0.9, True), (1.2, False)):
        other = one.double().clone()
        other[0] += share * allowance(dtype) * 5
        assert same(one, other) == is_rounding
        assert difference(one, other) <= allowance(dtype, noise=allowance(dtype))
    assert coarsest(one, torch.float64) == dtype
    assert coarsest(one.float(), torch.float64) == (torch.float32 if dtype == torch.float64 else dtype)


def test_what_is_never_the_same() -> None:
    broken = VALUES.clone()
    broken[3] = torch.nan
    assert not same(broken, VALUES)
    assert not same(VALUES[:5], VALUES)
    assert difference(VALUES, VALUES) == difference(torch.zeros(3), torch.zeros(3)) == 0
