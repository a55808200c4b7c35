"""Loading heads that other projects published (`interop.eagle3`, `interop.original_dart`) as drafters of ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.drafters.compatibility import check_compatible
from hf_dart.errors import annotated
from hf_dart.hub.checkpoint import weight_shapes
from hf_dart.hub.download import published_license, tensor_names, weight_files
from hf_dart.interop.eagle3 import Published, read_published
from hf_dart.interop.weights import read_weights, renamed
from hf_dart.models.devices import weight_of
from hf_dart.models.features import layer_count
from hf_dart.models.tokenizers import vocabulary_hash


def load_published(
    drafter_class: Any,
    path: str,
    content: dict[str, Any],
    target: PreTrainedModel | None,
    tokenizer: Any,
    *,
    read: Callable[..., Published] = read_published,
    layers: Callable[[str], str] = str,  # from the name of a weight of the drafter to that in a network with `layers.N`
    **where: Any,
) -> Any:
    """Return a drafter of ours with the weights of a published head, for a target that it fits."""
    if target is None:
        found = drafter_class.reads(content, partial(tensor_names, path, **where))
        raise ValueError(
            f"{path} is {found}, which does not say what its target is like; pass target=, and save_pretrained it to "
            "load it without."
        )
    files = weight_files(path, pickled=True, **where)
    published = read(content, weight_shapes(files, path), layer_count(target), path)
    known = annotated(drafter_class.config_class)  # P-EAGLE heads feed nothing back, and have no fields for it
    fields = {name: value for name, value in published.fields.items() if name in known}
    if tokenizer is not None:
        fields["tokenizer_hash"] = vocabulary_hash(tokenizer)
    config = drafter_class.config_class.for_target(target, **fields)
    own_name, config.target_name = config.target_name, fields.get("target_name")
    check_compatible(config, target, tokenizer)
    with torch.device("meta"):  # nothing is allocated by what a config says alone
        drafter = drafter_class(config)
    shapes = {name: tuple(weight.shape) for name, weight in drafter.state_dict().items() if name != "draft_vocabulary"}
    names = {name: renamed(layers(name), published.names) for name in shapes}
    if (slot := shapes.get("mask_slot.weight")) is not None:
        shapes["mask_slot.weight"] = (1, *slot) if names["mask_slot.weight"] == "mask_hidden" else slot[1:]
    sizes = {name: published.fields[name] for name in ("vocab_size", "draft_vocab_size")}
    weights = read_weights(files, path, names, shapes, **sizes, ignored=published.ignored)
    if slot is not None:
        weights["mask_slot.weight"] = weights["mask_slot.weight"].reshape(slot)
    if _same_rows(weights.get("embed_tokens.weight"), target):
        del weights["embed_tokens.weight"]
        drafter.embed_tokens, drafter.reads_rows, config.embeddings = None, True, "table"
    drafter.load_state_dict(weights, assign=True)
    config.target_name = own_name or config.target_name
    note_origin(config, path, **where)
    return drafter.to(weights["fc.weight"].dtype)


def note_origin(config: Any, path: str, **where: Any) -> Any:
    """Keep in a drafter's config, which is returned, where it comes from and its licence, as its card will say."""
    config.origin = path if not Path(path).is_dir() else Path(path).resolve().name
    config.origin_license = published_license(path, **where)
    return config


def _same_rows(table: Tensor | None, target: PreTrainedModel) -> bool:
    """Return True if these rows [V, E] equal the target's own table, in the coarser of both dtypes."""
    own = weight_of(target.get_input_embeddings())
    if table is None or table.shape != own.shape or not own.dtype.is_floating_point:
        return False
    dtype = min(table.dtype, own.dtype, key=lambda one: (one.itemsize, torch.finfo(one).bits))
    return torch.equal(table.to(dtype), own.detach().cpu().to(dtype))


def eagle_layers(name: str) -> str:
    """Return the name of a weight of an EAGLE head as that in a network with `layers.N`."""
    name = re.sub(r"^layer\.", "layers.0.", name)
    return re.sub(r"^deeper\.(\d+)\.", lambda found: f"layers.{int(found[1]) + 1}.", name)
