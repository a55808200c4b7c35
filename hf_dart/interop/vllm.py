"""Heads for serving engines: `mask_mode="peagle"` heads in the format of vLLM's `speculators` package (0.9).

vLLM's P-EAGLE (arXiv 2602.01469) is the same network, so its logits are the head's. It drafts chains. What it does not
know is refused here, because it would be served as something else without a word.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_dart.interop.eagle3 import network_names
from hf_dart.interop.weights import renamed, vocabulary_maps

SPECULATORS_VERSION = "0.9.0"  # the version that reads what is written here, and that it was compared with
_SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
          "rms_norm_eps")  # fmt: skip
# Fields that have to be as they are by default; "peagle" excludes the others.
_UNKNOWN = (
    "double_norm", "selector_rank", "editor", "fusion_norm", "fusion_bias", "attention_bias", "output_bias", "mlp_bias",
    "qk_norm", "windows", "rope_frequencies", "rope_scale", "copied_layer",
)  # fmt: skip


def write_vllm(head: Any, folder: str | Path, *, target: PreTrainedModel, verifier: str | None = None) -> None:
    """Write a `DartHead` for vLLM: config.json and model.safetensors, without token embeddings, which are the target's.

    vLLM finds the target by its Hub id or folder `verifier`, or else by the head's `target_name`.
    """
    if head.adapted:
        raise ValueError("This head has an adapter, which vLLM does not know; call head.merge_adapter() first.")
    config = head.config
    _refuse(config)
    state = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    dtype = state["fc.weight"].dtype
    vocabulary = state.pop("draft_vocabulary", None)
    if not config.own_lm_head:
        lm_head = head.shared.lm_head
        if type(lm_head) is not nn.Linear or lm_head.bias is not None or not lm_head.weight.dtype.is_floating_point:
            raise ValueError(
                "The target's LM head is quantized, adapted or has a bias, and vLLM's drafters have a plain one of "
                "their own; convert with the unquantized target."
            )
        weight = lm_head.weight.detach().cpu()
        state["lm_head.weight"] = (weight if vocabulary is None else weight[vocabulary]).to(dtype)
    tensors = {renamed(ours, network_names()): weight.clone() for ours, weight in state.items()}
    tensors["mask_hidden"] = tensors["mask_hidden"][None]  # [1, 1, F]
    if vocabulary is not None:
        tensors |= vocabulary_maps(vocabulary, config.vocab_size)
    name = verifier or config.target_name
    if name is None:
        raise ValueError("vLLM has to be told the target; give verifier=, its Hub id or folder.")
    positions = int(target.config.get_text_config(decoder=True).max_position_embeddings)
    content = _content(config, dtype, type(target).__name__, positions, name)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")


def _content(
    config: PreTrainedConfig, dtype: torch.dtype, architecture: str, max_positions: int, verifier: str
) -> dict[str, Any]:
    """Write every flag out: defaults differ between vLLM, its algorithms and their versions."""
    layer = {
        **{name: getattr(config, name) for name in _SHAPE},
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
    }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.draft_length,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "peagle",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": [architecture]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": None,
        "mask_token_id": config.mask_token_id,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _refuse(config: PreTrainedConfig) -> None:
    if config.mask_mode != "peagle":
        raise ValueError(
            "vLLM serves heads whose mask slots go through fc like real positions (P-EAGLE), and this head's are free "
            "vectors; train one with mask_mode='peagle'."
        )
    layers, last = config.feature_layers, config.target_num_layers
    if len(layers) != 3 or {0, last} & {*layers}:
        raise ValueError(
            f"This head reads feature_layers {layers}, and vLLM's P-EAGLE three of them, neither 0 nor the last, "
            f"{last}; it is not written."
        )
    plain = type(config)()
    known = {name: getattr(config, name) == getattr(plain, name) for name in _UNKNOWN}
    known |= {name: getattr(config, name) == config.hidden_size for name in ("embedding_size", "feature_size")}
    known["embeddings"] = config.embeddings != "own"
    for name in known:
        if not known[name]:
            raise ValueError(
                f"This head has {name} {getattr(config, name)}, which vLLM's P-EAGLE does not know; it would be served "
                "as another head, so it is not written."
            )
