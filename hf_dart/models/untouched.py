"""A trial on a model that leaves no trace: what forwards keep in its modules is put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Put back the buffers and attributes of all modules that the block has replaced, added or written into.

    Rotary frequencies, for one, may follow the longest text that a model was ever run on. Buffers that are saved with
    the weights (quantised weights among them) are no matter of a forward; they are put back where they were replaced,
    and not copied. Forwards of instances stay: other threads put them in place, and take them away themselves.

    A block in which weights were replaced leaves all as it is: the first forward of a model may unpack its weights
    (compressed-tensors does), and is not to be undone by half.
    """
    parts = list(model.modules())
    held = [(members, dict(members)) for part in parts for members in (vars(part), part._buffers)]
    weights = [(part._parameters, dict(part._parameters)) for part in parts]
    copies = [
        (buffer, buffer.clone())
        for part in parts
        for name, buffer in part._buffers.items()
        if name in part._non_persistent_buffers_set and buffer is not None and not buffer.is_meta
    ]
    try:
        yield
    finally:
        if not any(_replaced(now, before) for now, before in weights):
            for now, before in held:
                for name in now.keys() - before.keys() - {"forward"}:
                    del now[name]
                for name, value in before.items():
                    if name != "forward" and now.get(name, now) is not value:
                        now[name] = value
            with torch.no_grad():
                for buffer, content in copies:
                    if not torch.equal(buffer, content):
                        buffer.copy_(content)


def _replaced(now: Any, before: dict[str, Any]) -> bool:
    """Return True if weights were replaced. Offloaded ones are on "meta" between forwards, each time a new tensor."""
    return now.keys() != before.keys() or any(
        now[name] is not weight and not (weight is not None and weight.is_meta) for name, weight in before.items()
    )
