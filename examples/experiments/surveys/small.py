"""Any class that transformers maps, built from its config class with small fields: no list of ours.

What a class is called, which fields its config has and what they hold by default comes from transformers; the rules
here are for names of sizes (`_RULES`), whichever config has them. A new class of a new release needs nothing here
unless its config has a new kind of size.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import transformers
from support.families import PAD, VOCABULARY
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)
# Ids below it are plain text; those of images, sounds and the like stand above.
WORDS = VOCABULARY
_IDS = 2 * WORDS
_WINDOW = 10
_MOST_WEIGHTS = 40_000_000

# The first rule whose pattern is in a field's name sets it, if it is a whole number by default (or not set at all).
_RULES: list[tuple[str, int | None]] = [
    (r"tokenizer_chunk_size", None),
    (r"rope_theta$", 10_000),
    (r"^pad_token_id$", PAD),
    (r"^bos_token_id$|^decoder_start_token_id$", 1),
    (r"vocab_size|num_embeddings$|_vocab$", _IDS),
    (r"max_position_embeddings|max_seq_len|n_positions|n_ctx|max_target_positions|max_context|seq_length", 256),
    (r"sliding_window$|^window_size$|attention_window|chunk_size|local_window", _WINDOW),
    (r"indexer_kv", 1),
    (r"_budget$", 16),
    (r"filters$", 4),
    (r"compress_ratio$|_period$", 2),
    (r"layer_offset$", 1),
    (r"mamba_(n|num)_heads|n_mamba_heads|mamba_d_head|mamba_headdim|mamba_head_dim", 8),
    (r"mamba_d_ssm", 64),
    (r"^qk_head_dim", 16),
    (r"n_group$|topk_group|n_groups$|ngroups|num_groups$|n_shared_experts|num_shared_experts", 1),
    (r"experts_per_tok|top_k_experts|moe_topk|moe_top_k|num_selected_experts|moe_k$", 2),
    (r"num_.*experts|n_routed_experts|n_experts|moe_num_experts|experts$", 4),
    (r"first_k_dense|moe_layer_start|dense_layers", 1),
    (r"num_.*(key_value|kv)_heads|n_kv_heads|multi_query_group_num|num_kv_heads|n_head_kv|kv_heads", 2),
    (r"(num|n)_.*heads?$|attention_heads|^num_heads|n_heads?$|heads$", 4),
    (r"index_topk", 256),
    (r"head_dim|head_size|d_kv|d_head|headdim|rotary_dim|kv_channels", 8),
    (r"^(base|z|latent|quant)_?channels$|upsample_groups$", 32),
    (r"_rank$|_lora_dim|lora_r$", 8),
    (r"num_nextn|num_mtp|num_kv_shared", 0),
    (r"layers?$|depth$|n_layers?$|num_blocks$|_depth_", 2),
    (r"intermediate_size|ffn_dim|ffn_hidden|n_inner|d_ff$|mlp_dim|ffn_size|inner_dim|mlp_hidden|intermediate_dim", 64),
    (r"hidden_size_per_layer_input", 8),
    (r"hidden_size|d_model|n_embd|embed_dim$|^width$|^dim$|hidden_dim|embedding_size|embedding_dim|_width$|model_dim"
     r"|word_embed_proj_dim|projection_dim|embed_size|_dim$|proj_dim|out_hidden|output_dim|proj_size"
     r"|adapter_input_size", 32),
    (r"ssm_state_size|state_size|d_state|d_conv|conv_kernel", 4),
    (r"image_size$", 16),
    (r"patch_size$", 8),
    (r"num_mel|n_mels|num_mel_bins", 16),
    (r"max_source_positions", 32),
]  # fmt: skip
# Sizes that have to be named where they are not by default.
_UNSET = re.compile(
    r"head_dim$|kv_heads|key_value_heads|per_tok|top_k_experts|experts$|intermediate_size$|_rank$|head_num"
    r"|n_heads$|_budget$|compress_ratio$|sliding_window$|patch_size$"
)
# Values of fields that are not numbers and that classes need, though by default they are not set.
_GIVEN: dict[str, Any] = {
    "vocabulary_map": {"<image>": WORDS},
    "deepstack_layer_map": [[-1, 0]],
    "downsample_rate": "1/2",
    "clip_qkv": 8.0,
}
# Kinds of layers, where a config derives none for so few, or none that attends.
_KINDS: list[dict[str, Any]] = [
    {"layer_types": ["linear_attention", "full_attention"], "attn_layer_indices": [1]},
    {"layer_types": ["conv", "full_attention"]},
    {"mlp_layer_types": ["dense", "sparse"]},
    {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
]
# Tried one after another until a model is built and generates.
_VARIANTS: list[dict[str, Any]] = [
    {},
    {"kv": 4},
    {"kv": 4, "none": True},
    {"mrope": [2, 1, 1]},
    {"mrope": [1, 1, 2]},
    {"mrope": [2, 1, 1], "kv": 4, "none": True},
    {"mrope": [1, 1, 0], "kv": 4},
    {"mrope": [2, 1, 1], "head": 16},
    {"mrope": [4, 2, 2], "hidden": 64, "head": 16},
    {"patch": 4, "kv": 4},
    {"patch": 4, "kv": 4, "none": True},
    {"hidden": 64, "kv": 4, "head": 16},
    {"kv": 1, "topk": 1},
    {"layers": 4},
    {"layers": 4, "kv": 4, "none": True},
    {"whole": True, "kv": 4},
    {"declared": True},
    {"declared": True, "kv": 4},
    {"declared": True, "kv": 4, "none": True},
    {"declared": True, "layers": 4, "kv": 4},
    *({"declared": True, "kv": 4, "none": True, "kinds": kinds} for kinds in _KINDS),
    {"hidden": 256, "kv": 4},
    {"lists": 4},
]


def class_names() -> list[str]:
    """Every class that generates text from text, also with images or sounds beside it, in transformers' own order."""
    names: dict[str, None] = {}
    for mapping in _MAPPINGS:
        for mapped in getattr(modeling_auto, mapping, {}).values():
            names.update(dict.fromkeys([mapped] if isinstance(mapped, str) else mapped))
    return list(names)


def config_class_of(name: str) -> Any:
    """The config that a class of that name is built from."""
    return getattr(transformers, name).config_class


NOT_BUILT = "not built: "


class CannotBuild(Exception):
    """No variant of small fields makes a model of the class, or none that runs on text: `NOT_BUILT` tells the first."""


_FOUND: dict[str, dict[str, Any]] = {}
_NOT_FOUND: dict[tuple[str, str, torch.dtype], str] = {}
_LACKS = re.compile(r"'(\w+)' object has no attribute '(\w+)'")


def build(name: str, attention: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """A small random model of a class, in eval mode; the global generators are not moved.

    Of the variants of small fields, the first with which stock generates, or else with which the model runs.

    Raises:
        CannotBuild: with the reasons.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name in _FOUND:
            torch.manual_seed(seed)
            try:
                model = _build(name, attention, dtype, _FOUND[name])
                model(input_ids=torch.tensor([[2, 3, 4]]), use_cache=False)  # BigBird makes new layers then
                return model
            except Exception as reason:  # unknown code may fail in any way
                raise CannotBuild(_told(reason)) from reason
        if (name, attention, dtype) in _NOT_FOUND:
            raise CannotBuild(_NOT_FOUND[name, attention, dtype])
        reasons: list[str] = []
        runs: dict[str, Any] | None = None
        built = False
        waiting = list(_VARIANTS)
        while waiting:
            variant = waiting.pop(0)
            torch.manual_seed(seed)
            try:
                model = _build(name, attention, dtype, variant)
                built = True
                model(input_ids=torch.tensor([[2, 3, 4]]), use_cache=False)
                runs = variant if runs is None else runs
                model.generate(torch.tensor([[2, 3, 4]]), max_new_tokens=3, do_sample=False)
                runs = variant
                break
            except Exception as reason:  # unknown code may fail in any way
                reasons.append(_told(reason))
                lacks = _LACKS.search(str(reason)) if isinstance(reason, AttributeError) else None
                if lacks and lacks[1].endswith("Config") and lacks.groups() not in variant.get("lacks", []):
                    waiting.insert(0, {**variant, "lacks": [*variant.get("lacks", []), lacks.groups()]})
        if runs is None:
            _NOT_FOUND[name, attention, dtype] = ("" if built else NOT_BUILT) + "; ".join(dict.fromkeys(reasons))
            raise CannotBuild(_NOT_FOUND[name, attention, dtype])
        _FOUND[name] = runs
    return build(name, attention, dtype, seed)


def _told(reason: Exception) -> str:
    return f"{type(reason).__name__}: {str(reason)[:300]}"


def builds_with(name: str, attention: Any, own: dict[str, Any], dtype: torch.dtype = torch.float64) -> Iterator[Any]:
    """Small random models of a class, in eval mode, with fields of its `own`; those of its parts are dicts.

    One of each variant of small fields that a model can be made of; whether it runs is not asked. No weight is zero.

    Raises:
        CannotBuild: there is none; with the reasons.
    """
    reasons: list[str] | None = []
    for variant in (one for one in _VARIANTS if "kinds" not in one):
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            try:
                model = _build(name, attention, dtype, variant, own)
            except Exception as reason:  # unknown code may fail in any way
                if reasons is not None:
                    reasons.append(_told(reason))
                continue
            with torch.no_grad():
                for weight in model.parameters():
                    if not weight.any():  # as gates and projections of images begin
                        weight.normal_()
        reasons = None
        yield model
    if reasons is not None:
        raise CannotBuild(NOT_BUILT + "; ".join(dict.fromkeys(reasons)))


def _build(name: str, attention: Any, dtype: torch.dtype, variant: dict[str, Any], own: Any = None) -> Any:
    kind = getattr(transformers, name)
    fields = small_fields(config_class_of(name), variant)
    _put(fields, own or {})
    config = config_class_of(name)(**fields)
    for part in _configs(config):
        for field, value in (("is_decoder", True), ("add_cross_attention", False), ("is_encoder_decoder", False)):
            if getattr(part, field, value) != value and (field != "is_encoder_decoder"):
                setattr(part, field, value)
    if name not in _FOUND:
        with torch.device("meta"):
            weights = sum(weight.numel() for weight in kind._from_config(config).parameters())
        if weights > _MOST_WEIGHTS:
            raise ValueError(f"more than {_MOST_WEIGHTS:,} weights")
    # Stock's grouped and batched expert kernels take no float64.
    model = kind._from_config(config, attn_implementation=attention, experts_implementation="eager", dtype=dtype)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.ndim >= 2 and not any(part in weight_name for part in ("embed", "wte", "wpe")):
                weight.mul_(10.0)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.use_cache = True
        model.generation_config.pad_token_id = PAD
        model.generation_config.bos_token_id = 1
    return model.eval()


def _put(fields: dict[str, Any], own: dict[str, Any]) -> None:
    """Set fields, in parts too."""
    for name, value in own.items():
        if isinstance(value, dict) and isinstance(fields.get(name), dict) and name.endswith("_config"):
            _put(fields[name], value)
        else:
            fields[name] = copy.deepcopy(value)


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        if isinstance(getattr(config, name, None), PreTrainedConfig):
            yield from _configs(getattr(config, name))


def small_fields(kind: Any, variant: dict[str, Any]) -> dict[str, Any]:
    """Fields of a config class: its defaults, those that are sizes made small, in its parts too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default = kind()
    fields: dict[str, Any] = {}
    special = iter(range(_IDS - 1, WORDS, -1))
    layers = _size("num_hidden_layers", variant)
    declared = {field.name: field.default for field in dataclasses.fields(kind)} if variant.get("declared") else None
    length = next(
        (
            n
            for n in (default.__dict__.get(name) for name in ("num_hidden_layers", "n_layer", "num_layers"))
            if isinstance(n, int)
        ),
        None,
    )
    for name, value in default.to_dict().items():
        if name in kind.sub_configs:
            part = getattr(default, name, None)
            sub = type(part) if isinstance(part, PreTrainedConfig) else kind.sub_configs[name]
            if sub is AutoConfig or not isinstance(sub, type):
                model_type = (value or {}).get("model_type") if isinstance(value, dict) else None
                if model_type is None:
                    continue
                sub = CONFIG_MAPPING[model_type]
            fields[name] = {"model_type": sub.model_type, **small_fields(sub, variant)}
            if kind.sub_configs[name] is not AutoConfig:
                fields[name].pop("model_type")
            continue
        if name in ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype"):
            continue
        if value is None and name in _GIVEN:
            fields[name] = copy.deepcopy(_GIVEN[name])
            continue
        if declared is not None and declared.get(name) is None and value is not None:
            continue  # derived from others
        if isinstance(value, list) and length and len(value) == length:
            fields[name] = _cut(value, layers)
            continue
        if isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
            listed = _small_list(name, list(value), layers, getattr(default, "hidden_size", None), variant)
            if listed is not None:
                fields[name] = listed
            continue
        if name == "eos_token_id" and not variant.get("whole"):
            fields[name] = None
            continue
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            fields[name] = _rope(value, variant.get("mrope"))
            continue
        if name.startswith("default_") and value is None and getattr(default, name[8:] + "s", None):
            fields[name] = next(iter(getattr(default, name[8:] + "s")))
            continue
        if re.search(r"(token|_id)_?(id|index|idx|ids)?$", name) and _is_id(name, value):
            ruled = _size(name, variant)
            fields[name] = ruled if ruled is not None else next(special)
            continue
        if isinstance(value, bool) or not (isinstance(value, int) or value is None):
            continue
        ruled = _size(name, variant)
        if ruled is not None and (value > 0 if value is not None else variant.get("none") and _UNSET.search(name)):
            fields[name] = ruled
    for name, kinds in variant.get("kinds", {}).items():
        if hasattr(default, name) and not isinstance(getattr(kind, kind.attribute_map.get(name, name), None), property):
            fields[name] = copy.deepcopy(kinds)
    for config, name in variant.get("lacks", []):
        if config == kind.__name__:
            fields[name] = WORDS if _is_id(name, 0) else _size(name, variant)
    return fields


def _small_list(name: str, values: list[int], layers: int, hidden: Any, variant: dict[str, Any]) -> list[int] | None:
    """Small instead of some numbers: parts of the hidden size, indices of layers, sizes of stages; None as they are."""
    if len(values) > 1 and sum(values) == hidden:
        return [(_size("hidden_size", variant) or 0) // len(values)] * len(values)
    if "layer" in name and max(map(abs, values)) > layers:
        ranks = sorted(set(values))
        first = 0 if "vision" in name else 1  # Mllama's layers of cross-attention hold nothing on text
        return [first + ranks.index(value) for value in values if first + ranks.index(value) < layers]
    if "lists" in variant and re.search("dim|hidden|channels", name) and max(values) > 64:
        return [value // variant["lists"] for value in values]
    return None


def _rope(rope: dict[str, Any], sections: list[int] | None) -> dict[str, Any]:
    """Rotary parameters with sections for heads of 8; where a class needs some that its config does not name, too."""
    inner = {name: _rope(part, sections) if isinstance(part, dict) else part for name, part in rope.items()}
    named = "mrope_section" in rope or (sections and "rope_theta" in rope)
    return {**inner, "mrope_section": sections or [2, 1, 1]} if named else inner


def _is_id(name: str, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and ("token" in name or name.endswith("_id"))


def _cut(values: list[Any], count: int) -> list[Any]:
    """`count` of per-layer values, of every kind one where there is room."""
    with suppress(TypeError):
        kinds = list(dict.fromkeys(values))
        if 1 < len(kinds) <= count:
            return kinds + values[: count - len(kinds)]
    return values[:count]


def _size(name: str, variant: dict[str, Any]) -> int | None:
    ruled = next((size for pattern, size in _RULES if re.search(pattern, name)), None)
    if ruled is None:
        return None
    pattern = next(pattern for pattern, _ in _RULES if re.search(pattern, name))
    if "kv" in variant and "kv_heads" in pattern:
        return variant["kv"]
    if "hidden" in variant and ruled == 32 and "hidden_size" in pattern:
        return variant["hidden"]
    if "topk" in variant and "per_tok" in pattern:
        return variant["topk"]
    if "head" in variant and pattern.startswith("head_dim"):
        return variant["head"]
    if "layers" in variant and pattern.startswith("layers"):
        return variant["layers"]
    if "patch" in variant and pattern.startswith("patch"):
        return variant["patch"]
    return ruled


def vocabulary_of(model: Any) -> int:
    """How many tokens a model knows."""
    return int(model.get_input_embeddings().weight.shape[0])
