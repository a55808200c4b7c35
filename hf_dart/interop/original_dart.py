"""Reader of heads in the format of DART's released code (arXiv 2601.19278).

There a head has d - 1 mask slots and gives d distributions; it reads the target in front of layers 2, L // 2 and
L - 3, has an LM head of its own, norms the output of its layer twice, and maps its vocabulary to the target's by
offsets: token i of the draft is i + d2t[i] of the target. Token embeddings are always the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_dart.interop.eagle3 import Published
from hf_dart.interop.fields import Fields
from hf_dart.models.features import default_feature_layers

_KIND = "DART head"
_MANY = 2**31 - 1
# Token embeddings are the target's; hf_dart 0.1 wrote the other one.
_IGNORED = frozenset(("embed_tokens.weight", "hf_dart.norm.weight"))


def original_format(content: dict[str, Any]) -> str | None:
    """Return a description of a config.json's head if it is in the format of DART's code."""
    ours = content.get("model_type") == "llama" and "draft_length" in content
    return "a DART head in the format of DART's code" if ours else None


def read_original(
    content: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], num_layers: int, path: str
) -> Published:
    """Read the config.json of such a head into fields of a `DartConfig`.

    Fields that DART's code does not read have no effect there, and none here.

    Args:
        content: of its config.json.
        shapes: of the tensors by their names.
        num_layers: of the target; the file does not say which of them the head reads.
        path: of the checkpoint, for messages.

    Raises:
        ValueError: a field is missing or out of range, or the head cannot belong to a target of so many layers.
    """
    fields = Fields(content, _KIND)
    fields.choice("hidden_act", ("silu",), "silu")
    if "rope_scaling" in fields:
        raise fields.wrong("rope_scaling", fields.given("rope_scaling"), "left out; scaled rotations are not known")
    heads = fields.integer("num_attention_heads", 1, 4096)
    kv_heads = fields.integer("num_key_value_heads", 1, heads, heads)
    hidden = fields.integer("hidden_size", 2, 2**20)
    head_dim = fields.integer("head_dim", 2, 2**14, hidden // heads)
    dimension = fields.integer("target_hidden_size", 2, 2**20, hidden)
    vocab_size = fields.integer("vocab_size", 2, _MANY)
    scored = fields.integer("draft_vocab_size", 1, vocab_size)
    layers = default_feature_layers(num_layers)
    if len(layers) != 3:
        raise ValueError(
            "Heads in the format of DART's code read three different layers of their target, and this one is too "
            "small to have them; give the target that the head was made for."
        )
    described = {
        "draft_length": fields.integer("draft_length", 0, 30) + 1,
        "feature_layers": layers,
        "hidden_size": hidden,
        "embedding_size": hidden,
        "feature_size": dimension,
        "own_lm_head": True,
        "double_norm": True,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.integer("intermediate_size", 1, 2**24),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope_theta": fields.number("rope_theta", 10000.0),
        "vocab_size": vocab_size,
        "draft_vocab_size": None if scored == vocab_size else scored,
    }
    return Published(described, layers, "midlayer", ignored=_IGNORED & shapes.keys(), mask="midlayer.mask_rep")
