"""Configurations of tiny random targets: one per family and mask form, and those that are refused.

Every name maps to a transformers `model_type` and the fields of its config. A name with a suffix is a further
variant of a family (`_sw`: sliding windows).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from transformers.cache_utils import Cache

needs_running_states = pytest.mark.skipif(
    not hasattr(Cache, "get_conv_state"), reason="models reach into the cache's layers in this release, and are refused"
)



def sampled(families: Iterable[str], *default: str) -> list[Any]:
    """Some families by default, all with `-m matrix`."""
    return [name if name in default else pytest.param(name, marks=pytest.mark.matrix) for name in families]


VOCABULARY = 48
WINDOW = 10
PAD = 0

_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": None}
SIZES = {
    **_TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}
_ROTARY = {**SIZES, "tie_word_embeddings": False}
_GPT = {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_SHORT = {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_FALCON = {**_SHORT, "alibi": False, "new_decoder_architecture": False, "multi_query": True}
_PLAIN = [
    "llama", "qwen2", "qwen3", "ministral3", "gemma", "granite", "olmo", "olmo2", "glm", "glm4", "helium", "seed_oss",
    "ernie4_5", "hunyuan_v1_dense", "apertus", "arcee", "bitnet", "diffllama", "nemotron", "persimmon", "cohere",
]  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}
_LATENT = {
    **_ROUTED, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_SLIDING = {"sliding_window": WINDOW}
_TYPES = ["sliding_attention", "full_attention"]
_MIXED = {**_SLIDING, "layer_types": _TYPES}
_SOME_LAYERS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_PER_LAYER_INPUT = {**_SLIDING, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
_GEMMA4 = {**_PER_LAYER_INPUT, "global_head_dim": 16, "num_global_key_value_heads": 1}
_LINEAR = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}
_LINEAR_EXPERTS = {
    "linear_head_dim": 8, "linear_num_heads": 4, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
_CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
_MAMBA_1 = {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8, "time_step_rank": 4}
_MAMBA_2 = {
    **_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1,
    "chunk_size": 16, "expand": 2,
}  # fmt: skip
_NEO = {
    **_TOKENS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
    "window_size": WINDOW, "max_position_embeddings": 256,
}  # fmt: skip
_LLAMA4 = {
    **_EXPERTS, "num_experts_per_tok": 1, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 48,
    "num_hidden_layers": 4,
}


def _rotary(model_type: str, *parts: dict[str, Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    config = dict(_ROTARY)
    for part in (*parts, fields):
        config.update(part)
    return model_type, config


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # One mask, rotary positions.
    **{name: _rotary(name) for name in _PLAIN},
    "mistral_full": _rotary("mistral", sliding_window=None),
    "phi": _rotary("phi", num_key_value_heads=4, partial_rotary_factor=0.5),
    "phi3_full": _rotary("phi3", sliding_window=None),
    "smollm3": _rotary("smollm3", num_hidden_layers=4, no_rope_layer_interval=2),
    "stablelm": _rotary("stablelm", partial_rotary_factor=0.5),
    "starcoder2": _rotary("starcoder2", sliding_window=None),
    # Learned positions, and older attention code that stays eager.
    "gpt2": ("gpt2", _GPT),
    "gpt_bigcode": ("gpt_bigcode", _GPT),
    "gpt_neox": _rotary("gpt_neox", rotary_pct=0.5),
    "opt": ("opt", {**_SHORT, "ffn_dim": 48, "max_position_embeddings": 256, "word_embed_proj_dim": 32}),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 4}),
    "codegen": ("codegen", {**_GPT, "n_ctx": 256, "rotary_dim": 4}),
    "falcon": ("falcon", _FALCON),
    # Mixtures of experts, latent attention, an indexer.
    **{name: _rotary(name, _EXPERTS) for name in ("qwen3_moe", "olmoe", "granitemoe", "minimax_m2")},
    "mixtral_full": _rotary("mixtral", _EXPERTS, sliding_window=None),
    "phimoe": _rotary("phimoe", _EXPERTS, sliding_window=None),
    "granitemoeshared": _rotary("granitemoeshared", _EXPERTS, shared_intermediate_size=24),
    "qwen2_moe": _rotary("qwen2_moe", _EXPERTS, shared_expert_intermediate_size=24),
    "glm4_moe": _rotary("glm4_moe", _ROUTED),
    "deepseek_v2": _rotary("deepseek_v2", _LATENT),
    "deepseek_v3": _rotary("deepseek_v3", _LATENT),
    # Every layer slides.
    **{name: _rotary(name, _SLIDING) for name in ("mistral", "ministral", "phi3")},
    "mixtral": _rotary("mixtral", _EXPERTS, _SLIDING),
    # Some layers slide: a dict of masks.
    "qwen2_sw": _rotary("qwen2", _SOME_LAYERS),
    "qwen3_sw": _rotary("qwen3", _SOME_LAYERS),
    "gemma2": _rotary("gemma2", _MIXED, query_pre_attn_scalar=8),
    "gemma3": _rotary("gemma3_text", _MIXED, query_pre_attn_scalar=8, tie_word_embeddings=True),
    "cohere2": _rotary("cohere2", _SLIDING, num_hidden_layers=4),
    "olmo3": _rotary("olmo3", _SLIDING, num_hidden_layers=4),
    "exaone4": _rotary("exaone4", _SLIDING, sliding_window_pattern=2),
    "gpt_oss": _rotary("gpt_oss", _MIXED, num_local_experts=4, num_experts_per_tok=2),
    # Layers that read another layer's keys and values.
    "gemma3n": _rotary(
        "gemma3n_text", _PER_LAYER_INPUT, num_hidden_layers=4, num_kv_shared_layers=2, layer_types=_TYPES * 2,
        laurel_rank=4, altup_num_inputs=2, intermediate_size=[48] * 4, activation_sparsity_pattern=[0.0] * 4,
    ),
    "gemma4": _rotary("gemma4_text", _GEMMA4, layer_types=_TYPES, attention_k_eq_v=True),
    "gemma4_shared": _rotary(
        "gemma4_text", _GEMMA4, num_hidden_layers=4, layer_types=_TYPES * 2, num_kv_shared_layers=2
    ),
    # Chunked attention.
    "llama4": _rotary("llama4_text", _LLAMA4, attn_temperature_tuning=False),
}

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": _rotary("lfm2", _CONVOLUTIONS, block_auto_adjust_ff_dim=False),
    "lfm2_moe": _rotary("lfm2_moe", _EXPERTS, _CONVOLUTIONS),
    "lfm3": _rotary(
        "lfm3", _SLIDING, num_hidden_layers=4, layer_types=["conv", "sliding_attention", "full_attention", "conv"]
    ),
    "zaya": _rotary("zaya", _EXPERTS, num_hidden_layers=4, num_experts_per_tok=1),
    "qwen3_5": _rotary("qwen3_5_text", _LINEAR),
    "qwen3_5_moe": _rotary("qwen3_5_moe_text", _LINEAR, _EXPERTS, shared_expert_intermediate_size=24),
    "qwen3_next": _rotary("qwen3_next", _LINEAR, _EXPERTS, shared_expert_intermediate_size=24),
    "olmo_hybrid": _rotary("olmo_hybrid", _LINEAR),
    "kimi_linear": _rotary("kimi_linear", _LATENT, _EXPERTS, _LINEAR, _LINEAR_EXPERTS, q_lora_rank=None),
    "bailing_hybrid": _rotary("bailing_hybrid", _LATENT, _EXPERTS, _LINEAR, _LINEAR_EXPERTS),
    "falcon_h1": _rotary("falcon_h1", _MAMBA, mamba_d_ssm=64),
    "bamba": _rotary("bamba", _MAMBA, attn_layer_indices=[1]),
    "granitemoehybrid": _rotary(
        "granitemoehybrid", _MAMBA, layer_types=["mamba", "attention"], num_local_experts=0,
        shared_intermediate_size=24,
    ),
    "nemotron_h": _rotary(
        "nemotron_h", num_hidden_layers=3, hybrid_override_pattern="M*-", mamba_num_heads=8, mamba_head_dim=8,
        n_groups=1, ssm_state_size=8, chunk_size=16,
    ),
    "zamba2": _rotary(
        "zamba2", layers_block_type=["mamba", "hybrid"], hybrid_layer_ids=[1], mamba_d_state=8, mamba_headdim=8,
        n_mamba_heads=8, mamba_ngroups=1, mamba_expand=2, chunk_size=16, num_mem_blocks=1, use_mem_rope=True,
        attention_hidden_size=64, attention_head_dim=16, adapter_rank=4,
    ),
    "zamba": _rotary("zamba", num_hidden_layers=4, num_key_value_heads=4, mamba_d_state=8, mamba_dt_rank=4),
    "jamba": _rotary(
        "jamba", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2,
        mamba_dt_rank=4, num_experts=2, num_experts_per_tok=1,
    ),
    # Without attention.
    "mamba": ("mamba", _MAMBA_1),
    "falcon_mamba": ("falcon_mamba", _MAMBA_1),
    "mamba2": ("mamba2", _MAMBA_2),
}
"""Those that keep running states, most of them beside attention: short convolutions, delta rules, Mamba 2, Mamba 1."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    # The states are attributes of modules.
    "recurrent_gemma": _rotary(
        "recurrent_gemma", num_hidden_layers=4, intermediate_size=96, attention_window_size=WINDOW,
        block_types=["recurrent", "recurrent", "attention"], lru_width=32,
    ),
    # Indexers choose the entries that a token attends to; the cache holds their keys, too.
    "deepseek_v32": _rotary("deepseek_v32", _LATENT, index_topk=256, index_head_dim=16, index_n_heads=2),
    "axk2": _rotary("axk2", _LATENT, index_topk=256, index_head_dim=16, index_n_heads=2),
    "minimax_m3_sparse": _rotary(
        "minimax_m3_vl_text", _EXPERTS, layer_types=["full_attention", "minimax_m3_sparse"], index_n_heads=2,
        index_head_dim=8, index_block_size=4, index_topk_blocks=2, dense_intermediate_size=48,
        shared_intermediate_size=48, rotary_dim=8,
    ),
    # Layers of the cache keep a summary of many tokens.
    "deepseek_v4": _rotary(
        "deepseek_v4", _ROUTED, _SLIDING, q_lora_rank=8, o_groups=4, o_lora_rank=8, index_topk=256, index_head_dim=8,
        index_n_heads=2, layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        mlp_layer_types=["moe"] * 2, num_nextn_predict_layers=0,
    ),
    # Windows, biases and positions that follow slots.
    "inkling": _rotary("inkling_text", _ROUTED, swa_head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2),
    "roformer": ("roformer", {**SIZES, "is_decoder": True}),
    "gpt_neo": ("gpt_neo", _NEO),
    "bloom": ("bloom", {**_TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mpt": ("mpt", {**_TOKENS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}),
    "falcon_alibi": ("falcon", {**_FALCON, "alibi": True}),
}
ROUNDS_INSIDE = {"kimi_linear", "bailing_hybrid"}
"""Whose rule is summed in fp32 whatever the dtype: stock's own float64 rows differ by 1e-6 with how many there are."""
FORGETS_STATES = {"jamba", "zamba"}
"""Where stock goes on wrongly when several tokens come after a cached text: it drops a state."""
OTHERS = {
    "mimo_v2": _rotary("mimo_v2_flash", _ROUTED, head_dim=8, v_head_dim=8, sliding_window=WINDOW),
    "zaya_sw": _rotary("zaya", _EXPERTS, _SLIDING, num_experts_per_tok=1, layer_types=["hybrid", "hybrid_sliding"]),
}
"""Those of tests of their own alone."""
WITHOUT_ATTENTION = {"mamba", "falcon_mamba", "mamba2", "mimo_v2"}
"""Those that know no attention implementation but "eager"."""
# Stock's grouped and batched expert kernels take no float64.
EXPERTS_IN_A_LOOP = {
    name
    for name, (_, config) in {**FAMILIES, **HYBRIDS, **REFUSED, **OTHERS}.items()
    if config.keys() & {"num_experts_per_tok", "num_local_experts"}
}
