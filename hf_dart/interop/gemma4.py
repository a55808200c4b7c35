"""Reader of the config.json of Gemma 4's assistants, small Gemma 4s without keys and values of their own.

Its fields are those of transformers, whose config checks them; tensors have the names of its modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hf_dart.hub.checkpoint import refused
from hf_dart.interop.fields import HARMLESS, Fields

_FAMILIES = {"gemma4_assistant": "Gemma4", "gemma4_unified_assistant": "Gemma4Unified"}
_OWN = ("backbone_hidden_size", "centroid_intermediate_top_k", "num_centroids", "use_ordered_embeddings")
_TEXT = (
    "attention_bias", "attention_k_eq_v", "enable_moe_block", "global_head_dim", "head_dim", "hidden_activation",
    "hidden_size", "hidden_size_per_layer_input", "intermediate_size", "layer_types", "max_position_embeddings",
    "num_attention_heads", "num_global_key_value_heads", "num_hidden_layers", "num_key_value_heads",
    "per_layer_config", "rms_norm_eps", "rope_parameters", "sliding_window", "use_bidirectional_attention",
    "use_double_wide_mlp", "vocab_size", "vocab_size_per_layer_input",
)  # fmt: skip
# Stock does not look at these in an assistant.
_REMARKS = {"final_logit_softcapping", "id2label", "label2id", "moe_intermediate_size", "num_experts",
            "num_kv_shared_layers", "top_k_experts"}  # fmt: skip


def assistant_format(content: dict[str, Any]) -> str | None:
    """Return a description of a config.json's drafter if it is an assistant of Gemma 4."""
    return "an assistant of Gemma 4" if str(content.get("model_type")) in _FAMILIES else None


def read_assistant(content: dict[str, Any]) -> Any:
    """Return the config that transformers has for an assistant, of known fields alone; raise for others."""
    fields = Fields(content, "Gemma 4 assistant")
    family = _FAMILIES[fields.choice("model_type", tuple(_FAMILIES))]
    layer = fields.part("text_config")
    layer.integer("num_hidden_layers", 1, 64)
    text = {name: layer.given(name) for name in _TEXT if name in layer}
    own = {name: fields.given(name) for name in _OWN if name in fields}
    layer.finish(HARMLESS | _REMARKS)
    fields.finish(HARMLESS | _REMARKS)
    with refused("The config.json of this Gemma 4 assistant", "fetch it again, or use a newer transformers"):
        transformers = import_module("transformers")
        made = getattr(transformers, f"{family}TextConfig")(**text)
        config = getattr(transformers, f"{family}AssistantConfig")(text_config=made, **own)
        clusters = config.num_centroids
        if config.use_ordered_embeddings and (
            made.vocab_size % clusters or not 0 < config.centroid_intermediate_top_k <= clusters
        ):
            raise ValueError(f"its {clusters} clusters do not divide {made.vocab_size} tokens, or are too few")
    return config


def part_of(config: Any, name: str) -> Any:
    """Return a class that transformers has for an assistant's layers, such as `Gemma4RMSNorm` for "RMSNorm"."""
    family = config.model_type.removesuffix("_assistant")
    return getattr(
        import_module(f"transformers.models.{family}.modeling_{family}"), _FAMILIES[config.model_type] + name
    )
