"""A trial on a model that leaves no trace: what forwards keep in its modules is put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_dart.models.stand_in import StandIn


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Put back the buffers and attributes of all modules that the block has replaced, added or written into.

    Rotary frequencies, for one, may follow the longest text that a model was ever run on. Buffers that are saved with
    the weights (quantised weights among them) are no matter of a forward; they are put back where they were replaced,
    and not copied.

    A block in which weights were replaced leaves all as it is: the first forward of a model may unpack its weights
    (compressed-tensors does), and is not to be undone by half.
    """
    held = [(part, dict(vars(part)), dict(part._buffers.items())) for part in model.modules()]
    weights = [(part, dict(part._parameters.items())) for part, _, _ in held]
    copies = [
        (buffer, buffer.clone())
        for part, _, buffers in held
        for name, buffer in buffers.items()
        if name in part._non_persistent_buffers_set and buffer is not None and not buffer.is_meta
    ]
    try:
        yield
    finally:
        unpacked = any(_replaced(part._parameters, before) for part, before in weights)
        with torch.no_grad():
            for part, attributes, buffers in [] if unpacked else held:
                _put_back(vars(part), attributes)
                _put_back(part._buffers, buffers)
            for buffer, content in [] if unpacked else copies:
                if not torch.equal(buffer, content):
                    buffer.copy_(content)


def _replaced(now: Any, before: dict[str, Any]) -> bool:
    """Are there other weights? Offloaded ones are on the meta device between forwards, each time in another tensor."""
    return now.keys() != before.keys() or any(
        now[name] is not weight and not (weight is not None and weight.is_meta) for name, weight in before.items()
    )


def _put_back(now: Any, before: dict[str, Any]) -> None:
    for name in {*now.keys()} - before.keys():
        if not isinstance(now[name], StandIn):  # of a call in another thread, which takes it away itself
            del now[name]
    for name, value in before.items():
        if (name not in now or now[name] is not value) and not isinstance(value, StandIn):
            now[name] = value
