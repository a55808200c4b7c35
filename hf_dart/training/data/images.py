"""Rows of prompts with images or sounds and the target's replies, and batches of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import default_data_collator

_OF_TEXT = ("input_ids", "attention_mask")


def image_row(inputs: Mapping[str, Tensor], sequence: Tensor) -> dict[str, Any]:
    """Return a training row of a prompt with images, sounds or video and the reply that the target wrote.

    Args:
        inputs: of the processor for one text, without padding: `input_ids` [1, P], and other inputs of `generate`:
            `pixel_values`, `image_grid_thw`, marks [1, P] of tokens, and so on.
        sequence: [T] or [1, T] of `generate`: the prompt and the reply.

    Returns:
        `input_ids` and `documents` [T], `loss_mask` [T], which is true in the reply, and `beside`: a dict of the other
        inputs, marks of tokens up to the end of the reply.

    Raises:
        ValueError: the prompt is not one row, or the sequence does not begin with it.
    """
    prompt, sequence = inputs["input_ids"].cpu(), sequence.detach().cpu().reshape(-1)
    if len(prompt) != 1 or not torch.equal(sequence[: prompt.shape[1]], prompt[0]):
        raise ValueError(
            "The sequence does not begin with the one prompt; give one text and what was generated for it."
        )
    more = len(sequence) - prompt.shape[1]
    beside = {name: value.detach().cpu() for name, value in inputs.items() if name not in _OF_TEXT}
    return {
        "input_ids": sequence,
        "documents": torch.zeros_like(sequence),
        "loss_mask": torch.arange(len(sequence)) >= prompt.shape[1],
        "beside": {
            name: F.pad(value, (0, more)) if value.shape == prompt.shape else value for name, value in beside.items()
        },
    }


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a batch of rows: those of one length are stacked, those with images (`image_row`) padded to the longest.

    Returns:
        With images: `input_ids`, `documents` [B, T] (-1 in padding), `loss_mask` [B, T], and `beside`: of marks of
        tokens [B, T], of all other inputs those of all rows along their first axis, as processors give them.
    """
    if not any("beside" in row for row in rows):
        return default_data_collator(list(rows))
    width = max(len(row["input_ids"]) for row in rows)
    blank = {"input_ids": 0, "documents": -1, "loss_mask": False}
    batch: dict[str, Any] = {
        name: torch.stack([_widened(torch.as_tensor(row[name]), width, value) for row in rows])
        for name, value in blank.items()
    }
    names = dict.fromkeys(name for row in rows for name in row.get("beside", {}))
    batch["beside"] = {name: _together(rows, name, width) for name in names}
    return batch


def _together(rows: Sequence[Mapping[str, Any]], name: str, width: int) -> Tensor:
    found = [row.get("beside", {}).get(name) for row in rows]
    shapes = [(1, len(row["input_ids"])) for row in rows]
    if all(value is None or value.shape == shape for value, shape in zip(found, shapes, strict=True)):
        one = next(value for value in found if value is not None)
        marks = (one.new_zeros(shape) if value is None else value for value, shape in zip(found, shapes, strict=True))
        return torch.cat([_widened(value, width, 0) for value in marks])
    return torch.cat([value for value in found if value is not None])


def _widened(values: Tensor, width: int, blank: int) -> Tensor:
    """Values [..., T] with blanks after them, [..., width]."""
    return F.pad(values, (0, width - values.shape[-1]), value=blank)
