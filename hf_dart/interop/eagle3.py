"""EAGLE and P-EAGLE heads as other projects publish them: what their config.json and weights say.

Two formats. The *original* one (SafeAILab's code; also AngelSlim, SpecForge, SGLang, NVIDIA's ModelOpt) is a flat
config.json whose first layer is called `midlayer` or `layers.0`. That of *speculators* (vLLM, Red Hat) has the layer's
shape in `transformer_layer_config`. The tensors have the same names in both, and the network is the same: a fusion of
hidden states, a first layer over pairs of token and feature, further layers, a norm, an LM head of its own over a
vocabulary that is mapped to the target's by offsets: token i of the draft is i + d2t[i] of the target.

EAGLE-1 and EAGLE-2 heads are one network, in the original format alone: a fusion of the token with the target's last
hidden state, a layer without the norm in front of it, and the target's LM head. Their config.json is that of a Llama of
one layer, so that the names of the tensors tell.

Layers of the target are counted in three ways. Where no config names them, they are `hidden_states` 2, L // 2 and
L - 3; speculators and vLLM name indices of `hidden_states`; `eagle_config` of ModelOpt and SGLang counts the outputs of
layers from 0, one less.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from hf_dart.hub.checkpoint import read_tensors
from hf_dart.interop.fields import HARMLESS, Fields, one_of
from hf_dart.interop.rope import read_rope, rope_frequencies
from hf_dart.models.features import default_feature_layers

_MANY = 2**31 - 1
_MOST_LAYERS = 8
_HOSTS = ("llama", "qwen2", "qwen3", "mixtral")
JOINED = "an EAGLE-1 or EAGLE-2 head"
"""Name of such a checkpoint in messages; its config.json does not say it."""
# The levels of a tree as SafeAILab's code grows it by default: its depth=7 counts those below the first one.
_LEVELS = 8
_SPECULATORS = {"eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
_TAPS = "eagle_aux_hidden_state_layer_ids"
# Fields of training code that do not affect the forward pass.
_REMARKS = (
    "max_position_embeddings", "max_window_layers", "pretraining_tp", "sep_token_id", "target_model_type",
    "embed_requires_grad", "has_no_defaults_at_init", "speculators_version", "id2label", "label2id", "return_dict",
    "chunk_size_feed_forward", "is_encoder_decoder", "output_attentions", "output_hidden_states", "problem_type",
    "name_or_path", "attn_implementation", "_attn_implementation_autoset", "num_aux_hidden_states",
)  # fmt: skip
_AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
# Our names to theirs, except those that depend on the layer.
_PARTS = {
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "fusion_norm.weight": "input_norm.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed_tokens.weight",
}
_LAYERS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_LAYER_FIELDS = (
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window",
    "vocab_size",
)  # fmt: skip
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

    Args:
        content: of the config.json.
        names: gives the names; is asked only if the config.json may be that of one.
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


@dataclass(frozen=True)
class Published:
    """A published head, by its config.json and the headers of its weights.

    Attributes:
        fields: of an `EagleConfig` or a `DartConfig`; `mask_token_id` too for P-EAGLE.
        taps: the layers of the target in the order in which they are fused.
        first: what names of tensors of the first layer begin with.
        deeper_norm: what the norm before the attention of the other layers is called.
        legacy_norms: the norms of the fused layers are called after low, mid and high.
        ignored: names of tensors that are not used.
        mask: what the vector of mask slots is called.
    """

    fields: dict[str, Any]
    taps: list[int]
    first: str
    deeper_norm: str = "input_layernorm"
    legacy_norms: bool = False
    ignored: frozenset[str] = frozenset()
    mask: str = "mask_hidden"

    def name(self, ours: str) -> str:
        """Return the name in the file of the weight `ours` of a network with `layers.N`."""
        if self.legacy_norms and (norm := re.fullmatch(r"fusion_norm\.(\d+)\.weight", ours)):
            return f"{_AUX_NORMS[int(norm[1])]}.weight"
        if ours in _PARTS or ours == "mask_slot.weight":
            return _PARTS.get(ours, self.mask)
        if ours in ("embedding_norm.weight", "feature_norm.weight"):
            return f"{self.first}.{'input_layernorm' if ours.startswith('embedding') else 'hidden_norm'}.weight"
        if ours.startswith("fusion_norm."):
            return ours.replace("fusion_norm", "fc_norm")
        _, number, rest = ours.split(".", 2)
        rest = rest.replace("mlp_norm", "post_attention_layernorm").replace("input_norm", self.deeper_norm)
        return f"{self.first}.{rest}" if number == "0" else f"layers.{number}.{rest}"


def read_published(
    content: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], num_layers: int, path: str
) -> Published:
    """Read a head's config.json and the shapes of its tensors.

    Args:
        content: of the config.json, of which `eagle3_format` is not None, or `eagle1_format`.
        shapes: of the tensors by their names, as `weight_shapes` gives them.
        num_layers: of the target.
        path: of the checkpoint, for messages.

    Raises:
        ValueError: a field is missing, out of range, unknown or contradicts another one or the weights.
    """
    found = eagle3_format(content) or JOINED
    joined = found == JOINED
    fields = Fields(content, found.split(" ", 1)[1] if joined else f"{found.split(' ')[1]} head")
    speculators = "speculators_model_type" in content
    layer = speculators_layer(fields) if speculators else fields
    nested = Fields({}, fields.kind) if speculators else fields.part("eagle_config")
    fields.given("speculators_model_type")

    ignored = frozenset(name for name in shapes if _IGNORED.fullmatch(name))
    stored = frozenset(shapes) - ignored
    first = "midlayer" if any(name.startswith("midlayer.") for name in stored) else "layers.0"
    taps = [num_layers] if joined else _taps(fields, nested, num_layers, speculators)
    described = _widths(fields, layer, shapes.get(f"{first}.self_attn.q_proj.weight"), path)
    described |= {
        "num_layers": _layer_count(layer, first, stored),
        "feature_layers": taps,
        "embeddings": "own" if "embed_tokens.weight" in stored else "table",
        "own_lm_head": "lm_head.weight" in stored,
        "joined": joined,
        "fusion_norm": _fusion_norm(fields, nested),
        "norm_before_residual": fields.flag("norm_before_residual", False),
        "norm_output": fields.flag("norm_output", False),
    }
    described |= _biases(layer, first, stored, path) | _rotation(layer, described["head_dim"])
    described["windows"] = _windows(layer, described["num_layers"])
    layer.choice("hidden_act", ("silu",), "silu")
    if not speculators:
        _refuse_nested(nested)
    described |= read_speculators_config(fields, tuple(_SPECULATORS)) if speculators else {"draft_length": _LEVELS}
    if is_peagle(content):
        described["mask_token_id"] = fields.integer("mask_token_id", 0, described["vocab_size"] - 1)
    fields.finish((*HARMLESS, *_REMARKS))
    deeper_norms = {name for name in ("input_layernorm", "hidden_norm") if f"layers.1.{name}.weight" in stored}
    if len(deeper_norms) > 1:
        raise ValueError(
            f"The second layer of {path} has an input_layernorm and a hidden_norm, of which each engine uses another; "
            "take one of them out."
        )
    legacy = f"{_AUX_NORMS[0]}.weight" in stored
    return Published(described, taps, first, next(iter(deeper_norms), "input_layernorm"), legacy, ignored)


def _layer_count(layer: Fields, first: str, stored: Collection[str]) -> int:
    layers = layer.integer("num_hidden_layers", 1, _MOST_LAYERS, 1)
    deeper = {int(name.split(".")[1]) for name in stored if re.match(r"layers\.\d{1,3}\.", name)} - {0}
    # Code that names its layer so has one, whatever its config.json says.
    return 1 if first == "midlayer" and not deeper else layers


def _widths(fields: Fields, layer: Fields, query: tuple[int, ...] | None, path: str) -> dict[str, Any]:
    """Widths and vocabularies; `query` is the shape of the queries' projection."""
    hidden = layer.integer("hidden_size", 2, 2**20)
    heads = layer.integer("num_attention_heads", 1, 4096)
    vocab_size = layer.integer("vocab_size", 2, _MANY)
    scored = fields.integer("draft_vocab_size", 1, vocab_size, vocab_size)
    return {
        "hidden_size": hidden,
        "embedding_size": hidden,
        "feature_size": fields.integer("target_hidden_size", 2, 2**20, hidden),
        "num_attention_heads": heads,
        "num_key_value_heads": layer.integer("num_key_value_heads", 1, heads, heads),
        "head_dim": _head_dim(layer, query, heads, path),
        "intermediate_size": layer.integer("intermediate_size", 1, 2**24),
        "rms_norm_eps": layer.number("rms_norm_eps", 1e-6),
        "vocab_size": vocab_size,
        "draft_vocab_size": None if scored == vocab_size else scored,
    }


def _fusion_norm(fields: Fields, nested: Fields) -> str:
    joint = _flag(fields, nested, "norm_before_fc")
    each = fields.flag("fc_norm", False) or fields.flag("use_aux_norm", False)
    if joint and each:
        raise fields.wrong("fc_norm", True, "false where norm_before_fc is true")
    return "joint" if joint else "each" if each else "none"


def _biases(layer: Fields, first: str, stored: Collection[str], path: str) -> dict[str, bool]:
    """Biases and norms of queries and keys, which the tensors tell."""
    for name, tensor in (("attention_bias", "self_attn.q_proj.bias"), ("mlp_bias", "mlp.gate_proj.bias")):
        if layer.flag(name, False) and f"{first}.{tensor}" not in stored:
            raise ValueError(f"The config.json of {path} says {name}: true, and its weights lack {first}.{tensor}.")
    for name in ("qkv_bias", "bias"):
        layer.given(name)
    return {
        "fusion_bias": "fc.bias" in stored,
        "attention_bias": f"{first}.self_attn.q_proj.bias" in stored,
        "output_bias": f"{first}.self_attn.o_proj.bias" in stored,
        "mlp_bias": f"{first}.mlp.gate_proj.bias" in stored,
        "qk_norm": f"{first}.self_attn.q_norm.weight" in stored,
    }


def _rotation(layer: Fields, head_dim: int) -> dict[str, Any]:
    rotation = read_rope(layer, theta=10000.0, more=("dynamic", "mrope"))
    frequencies, scale = rope_frequencies(rotation, head_dim, layer.integer("max_position_embeddings", 1, _MANY, 2048))
    plain = rotation["rope_type"] == "default"
    return {
        "rope_theta": rotation["rope_theta"],
        "rope_frequencies": None if plain else frequencies.tolist(),
        "rope_scale": scale,
    }


def read_weights(
    published: Published, shapes: Mapping[str, tuple[int, ...]], files: Iterable[str | Path], path: str
) -> dict[str, Tensor]:
    """Return a published head's weights under our names, its taps ascending, and `draft_vocabulary` [M] if any.

    Args:
        shapes: of the weights of the network with `layers.N` by our names.
        files, path: of the checkpoint.

    Raises:
        ValueError: they are damaged, contradict themselves or the config.
    """
    scored, vocab_size = published.fields["draft_vocab_size"], published.fields["vocab_size"]
    names = {ours: published.name(ours) for ours in shapes if ours != "draft_vocabulary"}
    wanted = {names[ours]: shape for ours, shape in shapes.items() if ours in names}
    if (slot := shapes.get("mask_slot.weight")) is not None:
        wanted[published.mask] = (1, *slot) if published.mask == "mask_hidden" else slot[1:]
    wanted |= {"d2t": (scored or vocab_size,), "t2d": (vocab_size,)}
    tensors = read_tensors(
        files,
        path,
        wanted,
        optional=("t2d",) if scored else ("d2t", "t2d"),
        ignored=published.ignored,
        dtypes={"d2t": torch.int64, "t2d": torch.bool},
    )
    weights = {ours: tensors[theirs] for ours, theirs in names.items()}
    if slot is not None:
        weights["mask_slot.weight"] = weights["mask_slot.weight"].reshape(slot)
    if scored:
        tokens, rows = draft_tokens(path, tensors["d2t"], tensors.get("t2d"), vocab_size)
        weights["draft_vocabulary"] = tokens
        if "lm_head.weight" in weights:
            weights["lm_head.weight"] = weights["lm_head.weight"][rows]
    elif "d2t" in tensors and bool(tensors["d2t"].any()):
        raise ValueError(f"The d2t of {path} moves tokens although the head scores all of them; fetch it again.")
    return _with_ascending_taps(weights, published.taps)


def speculators_layer(fields: Fields, kinds: tuple[str, ...] = ("llama", "qwen3")) -> Fields:
    """Return the fields of the layer. That format leaves out what its kind of layer has by default in transformers."""
    given = fields.part("transformer_layer_config")
    kind = given.choice("model_type", kinds, "qwen3")
    known = {name: value for name in _LAYER_FIELDS if (value := given.given(name)) is not None}
    given.finish((*HARMLESS, *_REMARKS))
    try:
        whole = _LAYERS[kind](**known).to_dict()
    except Exception as error:  # transformers raises many kinds of errors for a field of a wrong type
        words = " ".join(str(error).split())[:200]
        raise ValueError(
            f"The transformer_layer_config of this {fields.kind} describes no layer ({words}); fetch it again."
        ) from error
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


def _taps(fields: Fields, nested: Fields, num_layers: int, speculators: bool) -> list[int]:
    """Return the indices of the target's `hidden_states`, in the order in which they are fused."""
    default = default_feature_layers(num_layers)
    given: list[list[int]] = []
    # The last hidden state of transformers is normed, and theirs is not.
    if fields.given(_TAPS):
        given.append(list(fields.integers(_TAPS, 0, num_layers - 1)))
    if nested.given(_TAPS):
        given.append([tap + 1 for tap in nested.integers(_TAPS, 0, num_layers - 2)])
    if not given:
        if len(default) != 3:
            raise ValueError(
                "EAGLE-3 heads read three different layers of their target, and this one is too small to have them; "
                "give the target that the head was made for."
            )
        return default
    if given[0] != given[-1]:
        raise ValueError(
            f"The config.json of this {fields.kind} contradicts itself: {_TAPS} is {given[0]} at one place and, when "
            f"it is counted in the same way, {given[-1]} in eagle_config."
        )
    return given[0]


def _head_dim(layer: Fields, query: tuple[int, ...] | None, heads: int, path: str) -> int:
    """Return the head dimension by the shape of the queries' projection, as some configs lack it or give another."""
    layer.given("head_dim")
    rows = query[0] if query else 0
    if not query or rows % heads or rows // heads % 2:
        raise ValueError(
            f"The weights in {path} have queries of {rows} rows, which are no num_attention_heads ({heads}) of an even "
            "width; fetch them again, together with their config.json."
        )
    return rows // heads


def _flag(fields: Fields, nested: Fields, name: str) -> bool:
    one_of(fields, nested, (name,))
    return fields.flag(name, False) or nested.flag(name, False)


def _refuse_nested(nested: Fields) -> None:
    """Refuse an `eagle_config` of anything but an EAGLE-3 head."""
    nested.choice("use_aux_hidden_state", (True,), True)
    nested.choice("use_input_layernorm_in_first_layer", (True,), True)
    nested.choice("use_last_layernorm", (True,), True)
    nested.choice("use_mtp_layernorm", (False,), False)
    nested.choice("next_layer_regular", (True,), True)
    nested.choice("parallel_draft_step", (0, 1), 1)
    nested.choice("parallel_draft_heads_num_layers", (0, 1), 1)
    nested.finish()


def _windows(layer: Fields, layers: int) -> list[int]:
    kinds = layer.given("layer_types")
    window = layer.integer("sliding_window", 1, _MANY) if "sliding_window" in layer else None
    used = layer.flag("use_sliding_window", True)
    if kinds is None:
        kinds = ["full_attention"] * layers
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) < layers or any(kind not in known for kind in kinds):
        raise layer.wrong("layer_types", kinds, f"a list of {layers} of {' and '.join(known)}")
    slides = [kind == known[1] for kind in kinds[:layers]]
    if any(slides) and (window is None or not used):
        raise layer.wrong("sliding_window with use_sliding_window", None, "a window, as layer_types has sliding ones")
    return [(window or 0) * one for one in slides] if any(slides) else []


def draft_tokens(path: str, d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Ids of the tokens that are scored [M], ascending, and the rows of the LM head in that order.

    Args:
        d2t: [M] what is to be added to a draft token to get the target's.
        t2d: [V] bool, which tokens are scored; None if the file does not say it again.

    Raises:
        ValueError: they are no different tokens of the vocabulary.
    """
    tokens = torch.arange(len(d2t)) + d2t
    inside = (tokens >= 0) & (tokens < vocab_size)
    if not bool(inside.all()) or len(tokens.unique()) < len(tokens):
        raise ValueError(f"The d2t of {path} names tokens twice or beyond the vocabulary; fetch it again.")
    if t2d is not None:
        marked = torch.zeros_like(t2d)
        marked[tokens] = True
        if not torch.equal(marked, t2d):
            raise ValueError(f"The d2t and t2d of {path} name different tokens; fetch it again.")
    return tokens.sort()


def _with_ascending_taps(weights: dict[str, Tensor], taps: list[int]) -> dict[str, Tensor]:
    """Weights that read the target's layers in ascending order, from those that read them in the order of `taps`."""
    order = sorted(range(len(taps)), key=taps.__getitem__)
    if order == list(range(len(taps))):
        return weights
    each = {f"fusion_norm.{new}.weight": weights[f"fusion_norm.{old}.weight"] for new, old in enumerate(order)
            if f"fusion_norm.{old}.weight" in weights}  # fmt: skip
    for name in ("fc.weight", "fusion_norm.weight", "mask_slot.weight"):
        if name in weights:
            parts = weights[name].chunk(len(taps), dim=-1)
            each[name] = torch.cat([parts[old] for old in order], dim=-1)
    return {**weights, **each}
