"""Tiny random checkpoints of DFlash's relatives, in z-lab's format and that of speculators, and what they score."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_dart.interop.eagle3 import _LAYER_FIELDS
from support.checkpoints import draft_vocabulary, save, speculators_fields
from support.eagle3 import SPECULATORS
from support.guests import dflash_config, dflash_tensors

DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
_BY_DEPTH = {"layer_types": None, "sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}
# Everything that a published config may say about the pass.
_PLAIN: dict[str, dict[str, Any]] = {
    "": {},
    ", inner block size": {"block_size": None, "dflash_config__block_size": 4},
    ", rope_parameters": {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}},
    ", yarn": {"rope_theta": None, "rope_parameters": {**_YARN, "rope_theta": 1e4}},
    ", yarn, SpecForge's": {"rope_scaling": _YARN, "rope_parameters": {**_YARN, "rope_theta": 1000000}},
    ", llama3": {"rope_theta": 1e4, "rope_scaling": {**_YARN, "rope_type": "llama3", "low_freq_factor": 1.0,
                                                     "high_freq_factor": 4.0, "rope_theta": 1e4}},
    ", sliding": _SLIDING,
    ", sliding in both directions": {**_SLIDING, "is_causal": False},
    ", causal": {"dflash_config__causal": True},
    ", sliding by depth": _BY_DEPTH,
    ", scales": {"dflash_config__input_embedding_scale": 3.0, "dflash_config__output_multiplier": 0.2,
                 "final_logit_softcapping": 2.0},
    ", biases": {"attention_bias": True},
    ", taps out of order": {"dflash_config__target_layer_ids": [3, -1]},
    ", gelu": {"hidden_act": "gelu"},
}  # fmt: skip
_DOMINO = {"projector_type": "domino", "gru_hidden_dim": 6, "emb_dim": 5, "pure_draft_prefix_len": 1}


def _inner(**fields: Any) -> dict[str, Any]:
    return {f"dflash_config__{name}": value for name, value in fields.items()}


VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"DFlash{name}": ("z-lab", "dflash", changes) for name, changes in _PLAIN.items()},
    "JetSpec": ("z-lab", "dflash", {"dflash_config__causal_head": True, "dflash_config__target_hidden_size": 32}),
    "DFlash, no taps named": ("z-lab", "dflash", {"dflash_config__target_layer_ids": None}),
    "DFlash2": ("z-lab", "dflash2", _inner(**DFLASH2)),
    "DFlash2, sliding": ("z-lab", "dflash2", {**_SLIDING, **DFLASH2, "conv_kernel_size": 8}),  # of blocks of 5
    "DSpark": ("z-lab", "dspark", {"markov_rank": 4, "markov_head_type": "vanilla", "enable_confidence_head": True}),
    "DSpark, gated": ("z-lab", "dspark", {"dflash_config__markov_rank": 4, "dflash_config__markov_head_type": "gated"}),
    "DSpark, DeepSeek's": ("z-lab", "dspark", {
        "architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "markov_rank": 4, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True}),
    "DFlash, DeepSeek's": ("z-lab", "dspark", {
        "architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "markov_rank": 0, "enable_confidence_head": False}),
    "DFlash, each entry predicts": ("z-lab", "dflash", {"dflash_config__query_zero_predicts_next": True}),
    "DSpark, fills in": ("z-lab", "dspark", {"markov_rank": 4, "sample_from_anchor": False}),
    "DSpark, SpecForge's": ("z-lab", "dspark", {**_inner(projector_type="dspark", attention_mode="mha", markov_rank=4,
                            markov_head_type="rnn", confidence_head_alpha=1.0), "num_key_value_heads": 4}),
    "Domino": ("z-lab", "domino", _inner(**_DOMINO, shift_label=True)),
    "Domino, fills in": ("z-lab", "domino", {**_inner(**_DOMINO, shift_label=False), "emb_dim": 5,
                                             "architectures": ["DFlashDraftModel"]}),
    "speculators' DFlash": (SPECULATORS, "dflash", {**_SLIDING, "max_anchors": 256, "has_no_defaults_at_init": False}),
    "speculators' DFlash, some tokens": (SPECULATORS, "dflash", {"draft_vocab_size": 20}),
    "speculators' DFlash2": (SPECULATORS, "dflash2", {**_SLIDING, **DFLASH2}),
    "speculators' DFlash2, some tokens": (SPECULATORS, "dflash2", {**DFLASH2, "draft_vocab_size": 20}),
    "speculators' DSpark": (SPECULATORS, "dspark", {**_SLIDING, "markov_rank": 4, "draft_vocab_size": 20}),
    "speculators' DSpark, recurrent": (SPECULATORS, "dspark", {"markov_rank": 4, "markov_head_type": "rnn",
                                       "draft_vocab_size": 20, "sample_from_anchor": None}),
}  # fmt: skip
"""Format, kind, and changes of the config."""
PATHS = [name for name, (_, kind, changes) in VARIANTS.items() if kind == "domino" or "rnn" in changes.values()]
"""Those that score a token by all tokens of the block in front of it."""
_NAMES = {
    "dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel",
    "domino": "DominoDraftModel",
}  # fmt: skip


def relative_config(target: Any, name: str) -> dict[str, Any]:
    """The config.json of one of `VARIANTS`; its layer's fields stand beside the others."""
    style, kind, changes = VARIANTS[name]
    deep = target.config.get_text_config(decoder=True).num_hidden_layers > 4
    taps = {} if "dflash_config__target_layer_ids" in changes or not deep else _inner(target_layer_ids=[1, 3, 4])
    config = dflash_config(target, **{"architectures": [_NAMES[kind]], "block_size": 5, **taps, **changes})
    if style == SPECULATORS:
        for field in ("dflash_config", "max_window_layers", "num_target_layers", "auto_map", "rope_scaling"):
            config.pop(field, None)
        config |= {
            "aux_hidden_state_layer_ids": [2, 4, 5],
            "mask_token_id": 47,
            "sample_from_anchor": changes.get("sample_from_anchor", kind == "dspark"),
            "sliding_window_non_causal": kind == "dflash2",
            **speculators_fields(target, kind, 4),
            "draft_vocab_size": config.get("draft_vocab_size", config["vocab_size"]),
        }
    return config


def relative_tensors(config: dict[str, Any], name: str, seed: int = 0) -> dict[str, Tensor]:
    """Random weights, in float64."""
    kind = VARIANTS[name][1]
    inner = config.get("dflash_config", {})
    taps = inner.get("target_layer_ids", config.get("aux_hidden_state_layer_ids", [0, 0]))
    tensors = dflash_tensors({**config, "dflash_config": {"target_layer_ids": taps}}, seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def random(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    scored = config.get("draft_vocab_size", vocabulary)
    known = {**config, **inner}
    if kind == "dflash2":
        reach, group, rank = (known[name] for name in ("conv_kernel_size", "conv_group_size", "selector_rank"))
        for index in range(config["num_hidden_layers"]):
            for part in ("attention_conv", "mlp_conv"):
                tensors[f"layers.{index}.{part}.base_kernel"] = random(2, reach, hidden)
                rows = 2 * reach * hidden // group
                tensors[f"layers.{index}.{part}.kernel_projection.weight"] = random(rows, hidden)
        tensors["candidate_selector.hidden_projection.weight"] = random(rank, hidden)
        tensors["candidate_selector.predecessor_codebook"] = 3 * random(vocabulary, rank)
        tensors["candidate_selector.successor_codebook"] = 3 * random(scored, rank)
    if kind == "domino":
        state, rank = known["gru_hidden_dim"], known["emb_dim"]
        start = "" if known["shift_label"] else "logit_head."
        for part, read in (("ih", hidden), ("hh", state)):
            tensors[f"{start}prefix_gru.weight_{part}_l0"] = random(3 * state, read)
        tensors[f"{start}embed_proj.0.weight"] = random(rank, hidden + state)
        tensors[f"{start}embed_proj.2.weight"] = 3 * random(vocabulary, rank)
    if kind == "dspark" and known["markov_rank"]:
        rank = known["markov_rank"]
        tensors["markov_head.markov_w1.weight"] = 3 * random(vocabulary, rank)
        tensors["markov_head.markov_w2.weight"] = 3 * random(scored, rank)
        tensors["confidence_head.proj.weight"] = random(1, hidden + rank)
        tensors["confidence_head.proj.bias"] = random(1)
        if known.get("markov_head_type") == "gated":
            tensors["markov_head.gate_proj.weight"] = random(rank, hidden + rank)
            tensors["markov_head.gate_proj.bias"] = random(rank)
        if known.get("markov_head_type") == "rnn":
            tensors["markov_head.joint_proj.weight"] = random(3 * rank, hidden + 2 * rank)
            tensors["markov_head.joint_proj.bias"] = random(3 * rank)
    if scored != vocabulary:
        tensors["lm_head.weight"] = random(scored, hidden)
        tensors |= draft_vocabulary(vocabulary, scored, generator)
    return tensors


def relative(
    folder: Path, target: Any, name: str, dtype: torch.dtype = torch.float64,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> str:  # fmt: skip
    """A checkpoint of one of `VARIANTS`, with a `change` of its tensors."""
    config = relative_config(target, name)
    tensors = change(relative_tensors(config, name))
    if VARIANTS[name][0] == SPECULATORS:
        layer = {field: config.pop(field) for field in _LAYER_FIELDS if field in config}
        config["transformer_layer_config"] = {**layer, "model_type": config.pop("model_type")}
    return save(folder, config, tensors, dtype=dtype)


def pair_score(weights: dict[str, Tensor], hidden: Tensor, previous: int, token: int) -> Tensor:
    """What a relative adds to the logit of column `token` after the token `previous`, between hidden states [H]."""
    if "candidate_selector.predecessor_codebook" in weights:
        context = weights["candidate_selector.hidden_projection.weight"] @ hidden
        before = weights["candidate_selector.predecessor_codebook"][previous] * context
        return before @ weights["candidate_selector.successor_codebook"][token]
    before = weights["markov_head.markov_w1.weight"][previous]
    if "markov_head.gate_proj.weight" in weights:
        gate = weights["markov_head.gate_proj.weight"] @ torch.cat([hidden, before])
        before = before * torch.sigmoid(gate + weights["markov_head.gate_proj.bias"])
    return before @ weights["markov_head.markov_w2.weight"][token]


def path_score(weights: dict[str, Tensor], hidden: Tensor, path: list[int], table: Tensor, first: int) -> Any:
    """What a relative adds to the logits [M] after a path of tokens, the root first, by a block's hidden states [d, H].

    Domino's code adds nothing to the `first` tokens' logits; `table` [V, H] are the target's embeddings.
    """
    named = {name.removeprefix("logit_head."): weight for name, weight in weights.items()}
    if "prefix_gru.weight_hh_l0" in named:
        state = torch.zeros(named["prefix_gru.weight_hh_l0"].shape[1], dtype=torch.float64)
        for token in path:
            read = (named["prefix_gru.weight_ih_l0"] @ table[token]).chunk(3)
            kept = (named["prefix_gru.weight_hh_l0"] @ state).chunk(3)
            reset, update = (torch.sigmoid(read[gate] + kept[gate]) for gate in (0, 1))
            state = (1 - update) * torch.tanh(read[2] + reset * kept[2]) + update * state
        known = named["embed_proj.0.weight"] @ torch.cat([hidden[len(path) - 1], state])
        return 0.0 if len(path) <= first else named["embed_proj.2.weight"] @ torch.nn.functional.silu(known)
    state = torch.zeros(named["markov_head.markov_w1.weight"].shape[1], dtype=torch.float64)
    for place, token in enumerate(path):
        known = torch.cat([state, named["markov_head.markov_w1.weight"][token], hidden[place]])
        known = named["markov_head.joint_proj.weight"] @ known + named["markov_head.joint_proj.bias"]
        gate, new, output = known.chunk(3)
        state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(new)
    return named["markov_head.markov_w2.weight"] @ torch.tanh(output)
