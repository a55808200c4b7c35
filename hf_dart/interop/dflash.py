"""Readers of published DFlash drafters and their variants: the formats that their config.json comes in.

z-lab's (`architectures: ["DFlashDraftModel"]`, a Qwen3 config with a `dflash_config` inside), that of transformers'
assistants (`model_type: "muse_glimmer_assistant"`) and that of speculators (`speculators_model_type`). They differ in
names, in how they count layers and in what a sliding window covers. In z-lab's come JetSpec (`causal_head`), DFlash2
(convolutions and a selector of pairs) and DSpark (a Markov selector; the last known token predicts too), too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Qwen3Config

from hf_dart.interop.eagle3 import read_speculators_config, speculators_layer
from hf_dart.interop.fields import HARMLESS, Fields, one_of, place_of
from hf_dart.interop.rope import read_rope

_KIND = "DFlash drafter"
_MANY = 2**31 - 1
_MOST_LAYERS = 64
_MOST_SLOTS = 256
_DFLASH2 = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
_DSPARK = ("markov_rank", "markov_head_type", "sample_from_anchor", "enable_confidence_head",
           "confidence_head_with_markov")  # fmt: skip
# Fields that may be inside `dflash_config` or at the top.
_INNER = (
    "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "causal", "input_embedding_scale",
    "output_multiplier", "final_logit_softcapping", "causal_head", "target_hidden_size", *_DFLASH2, *_DSPARK,
)  # fmt: skip
_CALLED = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}
_ARCHITECTURES = {
    "DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2", "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark", "LingDSparkModel": "dspark",
}  # fmt: skip


def _architecture(content: dict[str, Any]) -> str | None:
    """Return the variant that a config.json in z-lab's format describes; None if it describes none."""
    architectures = content.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        return None
    return _ARCHITECTURES.get(architectures[0])


def _is_xpress(content: dict[str, Any]) -> bool:
    """Recognise the config.json of an XPress drafter (arXiv 2608.02438), by speculators or by its authors."""
    return "xpress_rank" in content or "xpress" in str(content.get("speculators_model_type")).lower()


def dflash_format(content: dict[str, Any]) -> str | None:
    """Return a description of a config.json's drafter if it is a DFlash drafter or a variant, of whatever version."""
    if _is_xpress(content):
        return "an XPress drafter"
    kind = content.get("speculators_model_type")
    if isinstance(kind, str) and kind in _CALLED:
        return f"a {_CALLED[kind]} drafter in the format of speculators"
    if content.get("model_type") == "muse_glimmer_assistant":
        return "a DFlash drafter in the format of transformers' assistants"
    inner = content.get("dflash_config")
    if _architecture(content) == "dflash" and isinstance(inner, dict) and inner.get("causal_head"):
        return "a JetSpec drafter"
    architectures = content.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    known = any("dflash" in str(name).lower() or "dspark" in str(name).lower() for name in names)
    return f"a {_CALLED[_architecture(content) or 'dflash']} drafter in z-lab's format" if known else None


def read_dflash(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `DFlashConfig` that a config.json tells.

    Raises:
        ValueError: it describes no DFlash drafter, or one that is not known here, or contradicts itself.
    """
    if _is_xpress(content):
        raise ValueError(
            "This is an XPress drafter, a DFlash drafter with a refiner of the whole block that hf_dart does not "
            "read; give a DFlash, DFlash2 or DSpark drafter of this target."
        )
    if "speculators_model_type" in content:
        return _read_speculators(Fields(content, _KIND))
    if content.get("model_type") == "muse_glimmer_assistant":
        return _read_assistant(Fields(content, _KIND))
    if _architecture(content) is not None:
        return _read_zlab(Fields(content, _KIND), content)
    raise ValueError(
        f"Its config.json names the architectures {content.get('architectures')}, and a DFlash drafter is one of "
        f"{', '.join(_ARCHITECTURES)} or a muse_glimmer_assistant; give such a checkpoint."
    )


def _read_zlab(fields: Fields, content: dict[str, Any]) -> dict[str, Any]:
    fields.choice("model_type", ("qwen3",))
    inner = fields.part("dflash_config")
    at = {name: place_of(fields, inner, name) for name in _INNER}
    inner.choice("attention_mode", ("gqa",), "gqa")
    inner.choice("projector_type", ("dflash",), "dflash")
    backbone = _backbone(fields)
    layers, first_sliding = backbone.num_hidden_layers, fields.integer("max_window_layers", 0, _MANY, 28)
    window = fields.integer("sliding_window", 1, _MANY) if "sliding_window" in fields else None
    if not fields.flag("use_sliding_window", False):
        window = None
    if "layer_types" in fields:
        sliding = _sliding(fields, layers)
    else:
        sliding = [window is not None and index >= first_sliding for index in range(layers)]
    if any(sliding) and window is None:
        raise fields.wrong("sliding_window with use_sliding_window", None, "a window, as layer_types has sliding ones")
    causal = one_of(fields, inner, ("is_causal", "causal", "causal_head"))
    if causal is not None and not isinstance(causal, bool):
        raise fields.wrong("causal", causal, "true or false")
    if (width := at["target_hidden_size"].integer("target_hidden_size", 1, _MANY, backbone.hidden_size)) != (
        backbone.hidden_size
    ):
        raise fields.wrong("target_hidden_size", width, f"the drafter's own hidden_size, {backbone.hidden_size}")
    depth = at["num_target_layers"]
    target_layers = depth.integer("num_target_layers", 1, _MANY) if "num_target_layers" in depth else None
    # A query at q attends to a key at k if q - k < window.
    reach = None if window is None else window - 1
    cap = at["final_logit_softcapping"]
    bounded = "final_logit_softcapping" in cap and cap.number("final_logit_softcapping", positive=False) > 0
    variant = _variant_fields(_architecture(content) or "dflash", at, backbone)
    least = 1 if variant["anchor_predicts"] else 2
    config = dict[str, Any](
        layers=tuple((slides if causal is None else causal, reach if slides else None) for slides in sliding),
        num_target_layers=target_layers,
        vocab_size=fields.integer("vocab_size", 1, _MANY),
        embedding_scale=at["input_embedding_scale"].number("input_embedding_scale", 1.0),
        logit_scale=at["output_multiplier"].number("output_multiplier", 1.0),
        logit_cap=cap.number("final_logit_softcapping") if bounded else None,
        **variant,
        **_common(at["block_size"], at["mask_token_id"], at["target_layer_ids"], backbone, target_layers, least),
    )
    inner.finish()
    fields.finish(HARMLESS)
    return config


def _variant_fields(kind: str, at: Mapping[str, Fields], backbone: Qwen3Config) -> dict[str, Any]:
    """Read the fields that only DFlash2 or DSpark have; fields of the other variants are rejected.

    Args:
        kind: "dflash", "dflash2" or "dspark".
        at: where its fields stand.
    """
    markov = tuple(name for name in _DSPARK if name != "sample_from_anchor")
    foreign = {"dflash": (*_DFLASH2, *markov), "dflash2": markov, "dspark": _DFLASH2}[kind]
    for name in foreign:
        if name in at[name] and at[name].given(name):
            raise at[name].wrong(name, at[name].given(name), f"left out, as a {_CALLED[kind]} drafter has no such part")
    known: dict[str, Any] = {
        "anchor_predicts": at["sample_from_anchor"].flag("sample_from_anchor", kind == "dspark"),
        "names": {},
    }
    if kind == "dflash2":
        taps = at["conv_kernel_size"].integer("conv_kernel_size", 1, 64, 2)
        group = at["conv_group_size"].integer("conv_group_size", 1, backbone.hidden_size, 16)
        if backbone.hidden_size % group:
            raise at["conv_group_size"].wrong("conv_group_size", group, f"a divisor of {backbone.hidden_size}")
        at["selector_top_k"].integer("selector_top_k", 1, _MANY, 16)  # ours is `TreeConfig.top_k`
        rank = at["selector_rank"].integer("selector_rank", 1, 2**14, 256)
        names = {"selector": "candidate_selector"}
        return {**known, "convolution": (taps, group), "selector": ("pairs", rank), "names": names}
    if kind == "dspark":
        rank = at["markov_rank"].integer("markov_rank", 0, 2**14, 256)
        # "rnn" has a state along the whole path, which no table of pairs can hold.
        head = at["markov_head_type"].choice("markov_head_type", ("vanilla", "gated"), "vanilla")
        # The confidence head is not used: the draft's own probabilities tell its confidence.
        for name in ("enable_confidence_head", "confidence_head_with_markov"):
            at[name].flag(name, True)
        return {
            **known,
            "selector": ({"vanilla": "markov", "gated": "gated"}[head], rank) if rank else None,
            "names": {"selector": "markov_head"},
            "ignored": ("confidence_head.", "embed_tokens.", "lm_head.", "rotary_emb."),
        }
    return known


def _read_speculators(fields: Fields) -> dict[str, Any]:
    kind = fields.choice("speculators_model_type", tuple(_CALLED))
    layer = speculators_layer(fields, ("qwen3",))
    backbone = _backbone(layer)
    sliding = _sliding(layer, backbone.num_hidden_layers)
    window = layer.integer("sliding_window", 1, _MANY) if any(sliding) or "sliding_window" in layer else None
    layer.given("use_sliding_window")
    both_ways = fields.flag("sliding_window_non_causal", kind == "dflash2")
    read_speculators_config(fields, tuple(_CALLED))
    vocabulary = layer.integer("vocab_size", 1, _MANY)
    scored = fields.integer("draft_vocab_size", 1, vocabulary, vocabulary)
    if (width := fields.integer("target_hidden_size", 1, _MANY, backbone.hidden_size)) != backbone.hidden_size:
        raise fields.wrong("target_hidden_size", width, f"the drafter's own hidden_size, {backbone.hidden_size}")
    variant = _variant_fields(kind, dict.fromkeys((*_DFLASH2, *_DSPARK), fields), backbone)
    whole = scored == vocabulary
    config = dict[str, Any](
        **{
            **variant,
            "ignored": ("confidence_head.", "embed_tokens.", "verifier_", *(["lm_head."] if whole else [])),
        },
        layers=tuple((slides and not both_ways, window if slides else None) for slides in sliding),
        reach_of_block=True,
        num_target_layers=None,
        vocab_size=vocabulary,
        draft_vocab_size=None if whole else scored,
        embedding_scale=1.0,
        logit_scale=1.0,
        logit_cap=None,
        block_size=fields.integer("block_size", 1 if variant["anchor_predicts"] else 2, _MOST_SLOTS),
        mask_token_id=fields.integer("mask_token_id", 0, _MANY),
        # Counted as `hidden_states`, the last of which speculators reads before the final norm.
        before_norm=True,
        feature_layers=fields.integers("aux_hidden_state_layer_ids", 0, _MANY),
        hidden_size=backbone.hidden_size,
        backbone=backbone,
    )
    fields.finish((*HARMLESS, "speculators_version"))
    return config


def _read_assistant(fields: Fields) -> dict[str, Any]:
    fields.choice("architectures", (["MuseGlimmerAssistantModel"],))
    backbone = _backbone(fields)
    sliding = _sliding(fields, backbone.num_hidden_layers)
    # In this format a window reaches equally far in both directions, its end included.
    reach = fields.integer("sliding_window", 1, _MANY) if any(sliding) or "sliding_window" in fields else None
    config = dict[str, Any](
        layers=tuple((False, reach if slides else None) for slides in sliding),
        num_target_layers=None,
        vocab_size=None,
        embedding_scale=1.0,
        logit_scale=1.0,
        logit_cap=None,
        names={"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"},
        **_common(fields, fields, fields, backbone, None),
    )
    fields.finish(HARMLESS)
    return config


def _common(
    block: Fields, mask: Fields, taps: Fields, backbone: Qwen3Config, target_layers: int | None, least: int = 2
) -> dict[str, Any]:
    """Read the fields of both formats, which count layers' outputs from 0 (`hidden_states` begins with embeddings)."""
    if "target_layer_ids" not in taps and target_layers is not None:
        ids = _default_taps(target_layers, backbone.num_hidden_layers)
    else:
        ids = taps.integers("target_layer_ids", 0, (target_layers or _MANY) - 1)
    return {
        "block_size": block.integer("block_size", least, _MOST_SLOTS),
        "mask_token_id": mask.integer("mask_token_id", 0, _MANY),
        "feature_layers": tuple(layer + 1 for layer in ids),
        "hidden_size": backbone.hidden_size,
        "backbone": backbone,
    }


def _default_taps(target_layers: int, layers: int) -> tuple[int, ...]:
    """Return the outputs that z-lab's drafters read where they do not say: from layer 1 to L - 3, evenly."""
    if layers == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    ids = tuple(round(1 + index * span / (layers - 1)) for index in range(layers))
    if len(set(ids)) < layers or min(ids) < 0:
        raise ValueError(
            f"The config.json of this {_KIND} lacks target_layer_ids, and {layers} different layers of {target_layers} "
            "cannot be chosen as its code does; give the drafter that was published for this target."
        )
    return ids


def _backbone(fields: Fields) -> Qwen3Config:
    heads = fields.integer("num_attention_heads", 1, 4096)
    kv_heads = fields.integer("num_key_value_heads", 1, heads)
    hidden = fields.integer("hidden_size", 1, 2**20)
    head_dim = fields.integer("head_dim", 2, 2**14)
    if heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"The config.json of this {_KIND} has {heads} attention heads of width {head_dim} and {kv_heads} of keys "
            "and values; the first have to be a multiple of the last, and the width even."
        )
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1, 2**24),
        num_hidden_layers=fields.integer("num_hidden_layers", 1, _MOST_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=fields.choice("hidden_act", ("silu", "gelu", "gelu_pytorch_tanh", "relu")),
        rms_norm_eps=fields.number("rms_norm_eps"),
        attention_bias=fields.flag("attention_bias", False),
        max_position_embeddings=fields.integer("max_position_embeddings", 1, _MANY),
        rope_parameters=read_rope(fields),
    )


def _sliding(fields: Fields, layers: int) -> list[bool]:
    types = fields.given("layer_types")
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise fields.wrong("layer_types", types, f"a list of {layers} of {' and '.join(known)}")
    return [kind == "sliding_attention" for kind in types]
