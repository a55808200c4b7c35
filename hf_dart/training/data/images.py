"""Rows of prompts with images or sounds and the target's replies, and batches of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
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
        raise ValueError("The sequence does not begin with the one prompt; give a text and what was written for it.")
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

    `documents` are -1 in padding. `beside` has marks of tokens [B, T], and of all other inputs those of all rows along
    their first axis, as processors give them.
    """
    if not any("beside" in row for row in rows):
        return default_data_collator(list(rows))
    blank = {"input_ids": 0, "documents": -1, "loss_mask": False}
    batch: dict[str, Any] = {
        name: pad_sequence([torch.as_tensor(row[name]) for row in rows], batch_first=True, padding_value=value)
        for name, value in blank.items()
    }
    names = dict.fromkeys(name for row in rows for name in row.get("beside", {}))
    batch["beside"] = {name: _together(rows, name) for name in names}
    return batch


def _together(rows: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    found = [row.get("beside", {}).get(name) for row in rows]
    lengths = [len(row["input_ids"]) for row in rows]
    there = [value for value in found if value is not None]
    if any(value is not None and value.shape != (1, n) for value, n in zip(found, lengths, strict=True)):
        return torch.cat(there)
    marks = [there[0].new_zeros(n) if value is None else value[0] for value, n in zip(found, lengths, strict=True)]
    return pad_sequence(marks, batch_first=True)
