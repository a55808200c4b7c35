"""Reader of heads in the format of DART's released code (arXiv 2601.19278).

There a head reads the target in front of layers 2, L // 2 and L - 3, has an LM head of its own, norms the output of its
layer twice, and maps its vocabulary to the target's by offsets: token i of the draft is i + d2t[i] of the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_dart.interop.decoder_layers import read_vocabulary, read_widths
from hf_dart.interop.eagle3 import Published, network_names, papers_taps
from hf_dart.interop.fields import Fields

# Token embeddings are the target's; hf_dart 0.1 wrote the other one.
_IGNORED = frozenset(("embed_tokens.weight", "hf_dart.norm.weight"))


def original_format(content: dict[str, Any]) -> str | None:
    """Return a description of a config.json's head if it is in the format of DART's code."""
    ours = content.get("model_type") == "llama" and "draft_length" in content
    return "a DART head in the format of DART's code" if ours else None


def read_original(
    content: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], num_layers: int, path: str
) -> Published:
    """Read the config.json of such a head into fields of a `DartConfig`, for a target of `num_layers` layers.

    Fields that DART's code does not read have no effect there, and none here.
    """
    fields = Fields(content, "DART head")
    fields.choice("hidden_act", ("silu",), "silu")
    if "rope_scaling" in fields:
        raise fields.wrong("rope_scaling", fields.given("rope_scaling"), "left out; scaled rotations are not known")
    widths = read_widths(fields)
    described = {
        **widths,
        **read_vocabulary(fields, fields),
        "draft_length": fields.integer("draft_length", 0, 30) + 1,
        "feature_layers": papers_taps(num_layers, "Heads in the format of DART's code"),
        "embedding_size": widths["hidden_size"],
        "feature_size": fields.integer("target_hidden_size", 2, 2**20, widths["hidden_size"]),
        "own_lm_head": True,
        "double_norm": True,
        "rope_theta": fields.number("rope_theta", 10000.0),
    }
    return Published(described, network_names("midlayer", mask="midlayer.mask_rep"), _IGNORED & shapes.keys())
