"""EAGLE and P-EAGLE heads as other projects publish them: what their config.json and weights say.

Two formats. The *original* one (SafeAILab's code; also AngelSlim, SpecForge, SGLang, NVIDIA's ModelOpt, DeepSeek's
DeepSpec) is a flat config.json whose first layer is called `midlayer` or `layers.0`. That of *speculators* (vLLM, Red
Hat) has the layer's shape in `transformer_layer_config`. Network and names of tensors are the same.

EAGLE-1 and EAGLE-2 heads fuse a token with the target's last hidden state. Their config.json is that of a Llama of one
layer, so that the names of the tensors tell.

Layers of the target are `hidden_states` 2, L // 2 and L - 3 where no config names them; speculators and vLLM name
indices of `hidden_states`; `eagle_config` of ModelOpt and SGLang, and DeepSpec's `target_layer_ids`, count the outputs
of layers from 0, one less.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from hf_dart.hub.checkpoint import refused
from hf_dart.interop.decoder_layers import read_rope, read_vocabulary, read_widths, read_windows, scaled_rotation
from hf_dart.interop.fields import HARMLESS, MANY, Fields, refuse_by_name
from hf_dart.models.features import default_feature_layers

_MOST_LAYERS = 8
_HOSTS = ("llama", "qwen2", "qwen3", "mixtral")
JOINED = "an EAGLE-1 or EAGLE-2 head"  # name of such a checkpoint in messages; its config.json does not say it
# The levels of a tree as SafeAILab's code grows it by default: its depth=7 counts those below the first one.
_LEVELS = 8
_SPECULATORS = {"eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
_TAPS = "eagle_aux_hidden_state_layer_ids"
# Fields of training code that do not affect the forward pass.
_REMARKS = (
    "max_position_embeddings", "max_window_layers", "pretraining_tp", "sep_token_id", "target_model_type",
    "embed_requires_grad", "has_no_defaults_at_init", "speculators_version", "id2label", "label2id", "name_or_path",
    "attn_implementation", "_attn_implementation_autoset", "num_aux_hidden_states", "num_target_layers",
    "target_model_name_or_path", "ttt_length", "step_loss_decay", "draft_num_hidden_layers", "num_depths",
    "down_sample_ratio", "down_sample_ratio_min",
)  # fmt: skip
_AUX_NORMS = {rf"^fusion_norm\.{index}\.": f"aux_norm_{name}." for index, name in enumerate(("low", "mid", "high"))}
# Fields of an `eagle_config` and what an EAGLE-3 head has there, first what stands for a missing one.
_NESTED: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1, 0),
    "parallel_draft_heads_num_layers": (1, 0),
}
_LAYERS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_LAYER_FIELDS = (
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window",
    "vocab_size",
)  # fmt: skip
# Tensors of the first layer that tell what the others have, too.
_TOLD_BY = {
    "attention_bias": "self_attn.q_proj.bias", "output_bias": "self_attn.o_proj.bias",
    "mlp_bias": "mlp.gate_proj.bias", "qk_norm": "self_attn.q_norm.weight",
}  # fmt: skip
_IGNORED = re.compile(r"verifier_(norm|lm_head)\.weight|(.*\.)?rotary_emb\.inv_freq")


def eagle3_format(content: Mapping[str, Any]) -> str | None:
    """Return a description such as "an EAGLE-3 head in the original format"; None if a config is of neither format."""
    kind = content.get("speculators_model_type")
    if isinstance(kind, str) and kind in _SPECULATORS:
        return f"{'a' if kind == 'peagle' else 'an'} {_SPECULATORS[kind]} head in the format of speculators"
    architectures = content.get("architectures")
    named = isinstance(architectures, list) and any("eagle3" in str(name).lower() for name in architectures)
    scored = "draft_vocab_size" in content and content.get("model_type") == "llama" and "draft_length" not in content
    return "an EAGLE-3 head in the original format" if named or scored else None


def eagle1_format(content: Mapping[str, Any], names: Callable[[], Collection[str]]) -> str | None:
    """Return a description if a config.json and the names of its tensors are those of an EAGLE-1 or EAGLE-2 head.

    `names` is called only if the config.json may be that of one.
    """
    layers = content.get("num_hidden_layers")
    if eagle3_format(content) or content.get("model_type") not in _HOSTS or layers not in range(1, _MOST_LAYERS + 1):
        return None
    found = names()
    joined = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= set(found)
    return JOINED if joined and "layers.0.input_layernorm.weight" not in found else None


def is_peagle(content: Mapping[str, Any]) -> bool:
    """Return True if `eagle3_format` describes a P-EAGLE head."""
    return content.get("speculators_model_type") == "peagle"


def network_names(
    first: str = "layers.0", deeper_norm: str = "input_layernorm", mask: str = "mask_hidden"
) -> dict[str, str]:
    """Return the renamings (`interop.weights.renamed`) from a network with `layers.N` to that of published heads.

    There, tensors of the first layer begin with `first`, and `mask` is the vector of mask slots.
    """
    return {
        r"^embedding_norm\.": f"{first}.input_layernorm.",
        r"^feature_norm\.": f"{first}.hidden_norm.",
        r"^fusion_norm\.weight": "input_norm.weight",
        r"^fusion_norm\.": "fc_norm.",
        r"^mask_slot\.weight": mask,
        r"^(layers\.\d+)\.input_norm\.": rf"\1.{deeper_norm}.",
        r"^(layers\.\d+)\.mlp_norm\.": r"\1.post_attention_layernorm.",
        r"^layers\.0\.": f"{first}.",
    }


@dataclass(frozen=True)
class Published:
    """A published head, by its config.json and the headers of its weights."""

    fields: dict[str, Any]  # of an `EagleConfig` or `DartConfig`, `feature_layers` in the order in which they are fused
    names: dict[str, str] = field(default_factory=network_names)  # renamings (`weights.renamed`) to those in the file
    ignored: frozenset[str] = frozenset()  # names of tensors that are not used


def read_published(
    content: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], num_layers: int, path: str
) -> Published:
    """Read a head's config.json and the shapes of its tensors, for a target of `num_layers` layers."""
    refuse_by_name(content)
    found = eagle3_format(content) or JOINED
    joined = found == JOINED
    fields = Fields(content, found.split(" ", 1)[1] if joined else f"{found.split(' ')[1]} head")
    speculators = fields.given("speculators_model_type") is not None
    layer = speculators_layer(fields) if speculators else fields
    nested = fields.part("eagle_config", outer=("norm_before_fc",))

    ignored = frozenset(name for name in shapes if _IGNORED.fullmatch(name))
    stored = frozenset(shapes) - ignored
    first = "midlayer" if any(name.startswith("midlayer.") for name in stored) else "layers.0"
    query = shapes.get(f"{first}.self_attn.q_proj.weight")
    deeper = any(re.match(r"layers\.0*[1-9]\d*\.", name) for name in stored)
    layers = layer.integer("num_hidden_layers", 1, _MOST_LAYERS, 1)
    joint = nested.flag("norm_before_fc", False)
    each = fields.flag("fc_norm", False) or fields.flag("use_aux_norm", False)
    if joint and each:
        raise fields.wrong("fc_norm", True, "false where norm_before_fc is true")
    described = read_widths(layer, _head_dim(layer, query, path)) | read_vocabulary(fields, layer)
    described |= {
        "embedding_size": described["hidden_size"],
        "feature_size": fields.integer("target_hidden_size", 2, 2**20, described["hidden_size"]),
        # Code that calls its layer so has one, whatever its config.json says.
        "num_layers": 1 if first == "midlayer" and not deeper else layers,
        "feature_layers": [num_layers] if joined else _taps(fields, nested, num_layers),
        "embeddings": "own" if "embed_tokens.weight" in stored else "table",
        "own_lm_head": "lm_head.weight" in stored,
        "joined": joined,
        "fusion_norm": "joint" if joint else "each" if each else "none",
        "norm_before_residual": fields.flag("norm_before_residual", False),
        "norm_output": fields.flag("norm_output", False),
    }
    # "dynamic" scales beyond the text it was trained on alone; "mrope" has three positions, all alike in plain text.
    rotation = read_rope(layer, theta=10000.0, as_default=("dynamic", "mrope"))
    longest = layer.integer("max_position_embeddings", 1, MANY, 2048)
    if rotation["rope_type"] != "default":
        described |= scaled_rotation(rotation, described["head_dim"], longest)
    described |= {"rope_theta": rotation["rope_theta"], **_biases(layer, first, stored, path)}
    windows = read_windows(layer, described["num_layers"])
    described["draft_window"] = layer.given("max_position_embeddings")  # beyond which it was not trained
    described["windows"] = [window or 0 for window in windows] if any(windows) else []
    layer.choice("hidden_act", ("silu",), "silu")
    for name, choices in _NESTED.items():
        nested.choice(name, choices, choices[0])
    nested.finish()
    described |= read_speculators_config(fields, tuple(_SPECULATORS)) if speculators else {"draft_length": _LEVELS}
    if is_peagle(content):
        token = fields.integer("mask_token_id", 0, described["vocab_size"] - 1)
        described |= {"mask_mode": "peagle", "mask_token_id": token}
    fields.finish((*HARMLESS, *_REMARKS))
    deeper_norms = {name for name in ("input_layernorm", "hidden_norm") if f"layers.1.{name}.weight" in stored}
    if len(deeper_norms) > 1:
        raise ValueError(
            f"The second layer of {path} has an input_layernorm and a hidden_norm, of which each engine uses another; "
            "take one of them out."
        )
    legacy = _AUX_NORMS if "aux_norm_low.weight" in stored else {}
    names = network_names(first, next(iter(deeper_norms), "input_layernorm"))
    return Published(described, {**legacy, **names}, ignored)


def _biases(layer: Fields, first: str, stored: Collection[str], path: str) -> dict[str, bool]:
    """Biases and norms of queries and keys, which the tensors tell."""
    found = {name: f"{first}.{tensor}" in stored for name, tensor in _TOLD_BY.items()}
    for name in ("attention_bias", "mlp_bias"):
        if layer.flag(name, False) and not found[name]:
            raise ValueError(f"The config.json of {path} says {name}: true, and its weights have no such biases.")
    for name in ("qkv_bias", "bias"):
        layer.given(name)
    return {**found, "fusion_bias": "fc.bias" in stored}


def speculators_layer(fields: Fields, kinds: tuple[str, ...] = ("llama", "qwen3")) -> Fields:
    """Return the fields of the layer. That format leaves out what its kind of layer has by default in transformers."""
    given = fields.part("transformer_layer_config")
    kind = given.choice("model_type", kinds, "qwen3")
    known = {name: value for name in _LAYER_FIELDS if (value := given.given(name)) is not None}
    given.finish((*HARMLESS, *_REMARKS))
    with refused(f"The transformer_layer_config of this {fields.kind}", "fetch it again"):
        whole = _LAYERS[kind](**known).to_dict()
    return Fields({name: whole[name] for name in _LAYER_FIELDS if whole.get(name) is not None}, given.kind)


def read_speculators_config(fields: Fields, algorithms: tuple[str, ...]) -> dict[str, Any]:
    """Return the draft length and the target's name, from `speculators_config`."""
    about = fields.part("speculators_config")
    about.choice("algorithm", algorithms)
    about.given("default_proposal_method")
    verifier = about.part("verifier")
    name = verifier.given("name_or_path")
    verifier.given("architectures")
    verifier.finish()
    proposals = about.given("proposal_methods")
    one = proposals[0] if isinstance(proposals, list) and proposals and isinstance(proposals[0], dict) else {}
    proposal = Fields(one, f"{fields.kind}'s proposal method")
    length = proposal.integer("speculative_tokens", 1, 31, 7)
    about.finish()
    return {"draft_length": length, "target_name": name if isinstance(name, str) else None}


def _taps(fields: Fields, nested: Fields, num_layers: int) -> list[int]:
    """Return the indices of the target's `hidden_states`, in the order in which they are fused."""
    given: list[list[int]] = []
    # The last hidden state of transformers is normed, and theirs is not.
    if fields.given(_TAPS):
        given.append(list(fields.integers(_TAPS, 0, num_layers - 1)))
    for place, name in ((nested, _TAPS), (fields, "target_layer_ids")):
        if place.given(name):
            given.append([tap + 1 for tap in place.integers(name, 0, num_layers - 2)])
    if not given:
        return papers_taps(num_layers, "EAGLE-3 heads")
    if given[0] != given[-1]:
        raise ValueError(
            f"The config.json of this {fields.kind} contradicts itself: {_TAPS} is {given[0]} at one place and, when "
            f"it is counted in the same way, {given[-1]} in eagle_config."
        )
    return given[0]


def papers_taps(num_layers: int, heads: str) -> list[int]:
    """Return the three layers that `heads` of papers read where their config.json does not say."""
    taps = default_feature_layers(num_layers)
    if len(taps) != 3:
        raise ValueError(
            f"{heads} read three different layers of their target, and this one is too small to have them; give the "
            "target that the head was made for."
        )
    return taps


def _head_dim(layer: Fields, query: tuple[int, ...] | None, path: str) -> int:
    """Return the head dimension by the shape of the queries' projection, as some configs lack it or give another."""
    heads = layer.integer("num_attention_heads", 1, 4096)
    rows = query[0] if query else 0
    if not query or rows % heads or rows // heads % 2:
        raise ValueError(
            f"The weights in {path} have queries of {rows} rows, which are no num_attention_heads ({heads}) of an even "
            "width; fetch them again, together with their config.json."
        )
    return rows // heads
