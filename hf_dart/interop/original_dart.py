"""Heads in the format of DART's released code (arXiv 2601.19278): read as they are, and written.

There a head has d - 1 mask slots and gives d distributions; it reads the target in front of layers 2, L // 2 and
L - 3, has an LM head of its own, norms the output of its layer twice, and maps its vocabulary to the target's by
offsets: token i of the draft is i + d2t[i] of the target. Token embeddings are always the target's.

A head of ours that scores with the target's LM head is written with rows of it, into which the weights of the final
norm are multiplied: then both norms have weights of one, the second one changes nothing but rounding, and the logits
are ours. What such a head had as its norm is kept beside, under a name that DART's code passes over; when it is
read again and the rows still are the target's, it is the head that it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_dart.interop.checkpoint import Fields, read_tensors
from hf_dart.interop.eagle3 import draft_tokens
from hf_dart.interop.vllm import llama_fields, lm_head_rows, refuse, vocabulary_maps, write_checkpoint
from hf_dart.target.features import default_feature_layers
from hf_dart.trees.config import checked_tree

_KIND = "DART head"
_OWN_NORM = "hf_dart.norm.weight"
_MANY = 2**31 - 1
# Ours to theirs.
_NAMES = {
    "fc.weight": "fc.weight",
    "embedding_norm.weight": "midlayer.input_layernorm.weight",
    "feature_norm.weight": "midlayer.hidden_norm.weight",
    "mask_slot.weight": "midlayer.mask_rep",
    **{f"layers.0.self_attn.{x}_proj.weight": f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"},
    "layers.0.mlp_norm.weight": "midlayer.post_attention_layernorm.weight",
    **{f"layers.0.mlp.{x}_proj.weight": f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
# Of our config, kept for the way back.
_KEPT = ("tree", "tokenizer_hash", "chat_template_hash", "enable_thinking", "target_name", "target_revision")


def original_format(content: dict[str, Any]) -> str | None:
    """What a config.json describes, if it is that of a head in the format of DART's code."""
    ours = content.get("model_type") == "llama" and "draft_length" in content
    return "a DART head in the format of DART's code" if ours else None


def read_weights(
    config: PreTrainedConfig, files: Iterable[str | Path], path: str, lm_head: nn.Module
) -> tuple[dict[str, Tensor], bool]:
    """The weights of a head as DART's code published it, under our names.

    Args:
        config: made of `read_fields`.
        files: of safetensors.
        path: of the checkpoint, for messages.
        lm_head: of the target.

    Returns:
        The weights, and whether the target's LM head scores for them: then they hold none of their own.

    Raises:
        ValueError: they are damaged, contradict themselves or the config.
    """
    hidden, scored, vocabulary = config.hidden_size, config.draft_vocab_size or config.vocab_size, config.vocab_size
    query, keys = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
    inner = config.intermediate_size
    ours: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * config.feature_size),
        "mask_slot.weight": (2 * hidden,),
        "layers.0.self_attn.q_proj.weight": (query, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": (keys, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": (keys, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, query),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (scored, hidden),
    }
    shapes = {theirs: ours.get(name, (hidden,)) for name, theirs in _NAMES.items()}
    shapes |= {"d2t": (scored,), "t2d": (vocabulary,), _OWN_NORM: (hidden,)}
    mapped = ("d2t", "t2d") if scored == vocabulary else ()
    tensors = read_tensors(
        files,
        path,
        shapes,
        optional=(_OWN_NORM, *mapped),
        ignored=("embed_tokens.weight",),
        dtypes={"d2t": torch.int64, "t2d": torch.bool},
    )
    weights = {name: tensors[theirs] for name, theirs in _NAMES.items()}
    weights["mask_slot.weight"] = weights["mask_slot.weight"][None]
    if config.draft_vocab_size is not None:
        tokens, rows = draft_tokens(path, tensors["d2t"], tensors["t2d"], vocabulary)
        weights["draft_vocabulary"], weights["lm_head.weight"] = tokens, weights["lm_head.weight"][rows]
    elif "d2t" in tensors and bool(tensors["d2t"].any()):
        raise ValueError(f"The d2t of {path} moves tokens although the head scores all of them; fetch it again.")
    return weights, _share_lm_head(weights, tensors.get(_OWN_NORM), lm_head)


def read_fields(content: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The fields of a `DartConfig` that the config.json of such a head tells.

    What DART's code does not read, whatever it is, has no effect there, and none here.

    Args:
        content: of its config.json.
        num_layers: of the target; the file does not say which of them the head reads.

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
    known = _read_kept(fields.part("hf_dart"))
    return {
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
        **known,
    }


def _read_kept(kept: Fields) -> dict[str, Any]:
    known = {name: kept.given(name) for name in _KEPT if name in kept}
    kept.finish()
    for name, value in known.items():
        if name != "tree" and not isinstance(value, bool if name == "enable_thinking" else str):
            raise kept.wrong(name, value, "as write_original writes it")
    try:
        checked_tree(known.get("tree", {}))
    except (TypeError, AttributeError) as error:
        raise kept.wrong("tree", known["tree"], "the fields of a TreeConfig") from error
    return known


def _share_lm_head(weights: dict[str, Tensor], norm: Tensor | None, lm_head: nn.Module) -> bool:
    """Let the target score again if the head's LM head is what `write_original` makes of the target's."""
    if norm is None or not bool((weights["norm.weight"] == 1).all()):
        return False
    rows = lm_head_rows(lm_head, weights.get("draft_vocabulary"))
    if rows is None or not torch.equal(_scaled(rows, norm), weights["lm_head.weight"]):
        return False
    weights["norm.weight"] = norm
    del weights["lm_head.weight"]
    return True


def _scaled(rows: Tensor, norm: Tensor) -> Tensor:
    """Rows of an LM head [M, H] after a norm of weights one instead of `norm` [H], in the dtype of the norm."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return (rows.to(wide) * norm.cpu().to(wide)).to(norm.dtype)


def write_original(
    config: PreTrainedConfig, weights: dict[str, Tensor], folder: str | Path, *, lm_head: nn.Module
) -> None:
    """Write a head in the format of DART's code: config.json and model.safetensors, without token embeddings.

    Args:
        config: the `DartConfig` of the head.
        weights: of the head, by our names.
        folder: is made if there is none.
        lm_head: of the target, which is copied if the head has none of its own.

    Raises:
        ValueError: DART's code knows no such head; the message says why.
    """
    _refuse(config)
    state = {name: tensor.detach().cpu() for name, tensor in weights.items()}
    vocabulary = state.pop("draft_vocabulary", None)
    if not config.own_lm_head:
        rows = lm_head_rows(lm_head, vocabulary)
        if rows is None:
            raise ValueError(
                "The target's LM head is quantized, adapted or has a bias, which DART's format has no place for; bind "
                "the head to the unquantized target, or train one with own_lm_head=True."
            )
        state["lm_head.weight"] = _scaled(rows, state["norm.weight"])
    elif not config.double_norm:
        state["lm_head.weight"] = _scaled(state["lm_head.weight"], state["norm.weight"])
    tensors = {theirs: state[name].clone() for name, theirs in _NAMES.items()}
    tensors["midlayer.mask_rep"] = tensors["midlayer.mask_rep"][0].clone()
    if not config.double_norm:
        tensors[_OWN_NORM] = state["norm.weight"].clone()
        tensors["norm.weight"] = torch.ones_like(state["norm.weight"])
    tensors["d2t"], tensors["t2d"] = vocabulary_maps(config, vocabulary)
    content = {
        "architectures": ["LlamaForCausalLMDart"],
        **llama_fields(config),
        "draft_length": config.draft_length - 1,
        "draft_vocab_size": len(tensors["d2t"]),
        "target_hidden_size": config.feature_size,
        "num_hidden_layers": 1,
        "max_position_embeddings": 32768,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "pretraining_tp": 1,
        "torch_dtype": str(state["fc.weight"].dtype).removeprefix("torch."),
        "hf_dart": {name: getattr(config, name) for name in _KEPT if getattr(config, name) is not None},
    }
    write_checkpoint(folder, content, tensors)


def _refuse(config: PreTrainedConfig) -> None:
    has = {
        f"{config.num_layers} layers": config.num_layers > 1,
        "injected features": config.inject_features,
        "mask_mode='peagle'": config.mask_mode != "learned",
        "input_form='stream'": config.input_form != "pair",
        "block_attention='bidirectional'": config.block_attention != "causal",
        "shift_logits=False": not config.shift_logits,
        "a selector": config.selector_rank > 0,
        "an editor": config.editor,
        f"features of layers {config.feature_layers}": len(config.feature_layers) != 3
        or config.feature_layers != default_feature_layers(config.target_num_layers),
        f"embeddings of another width ({config.embedding_size}) than its own": config.embedding_size
        != config.hidden_size,
    }
    rest = "train one as DartHead.from_target makes it by default to run it there."
    refuse(has, f"which DART's code does not know; {rest}")
