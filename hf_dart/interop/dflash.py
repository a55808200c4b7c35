"""Readers of published DFlash drafters and their variants: the formats that their config.json comes in.

z-lab's (`architectures: ["DFlashDraftModel"]`, a Qwen3 config with a `dflash_config` inside) and that of speculators
(`speculators_model_type`). They differ in how they count layers and in what a sliding window covers. In z-lab's come
JetSpec (`causal_head`), DFlash2 (convolutions and a selector of pairs), DSpark (a Markov selector; the last known token
predicts too; DeepSeek's DFlash drafters are DSpark ones without a selector) and Domino (a GRU along each path), too.
SpecForge and ModelOpt name the variant in `projector_type`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import Qwen3Config

from hf_dart.interop.decoder_layers import read_rope, read_vocabulary, read_widths, read_windows
from hf_dart.interop.eagle3 import read_speculators_config, speculators_layer
from hf_dart.interop.fields import HARMLESS, MANY, Fields, refuse_by_name

_KIND = "DFlash drafter"
_MOST_LAYERS = 64
_MOST_SLOTS = 256
_DFLASH2 = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
_DSPARK = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
           "confidence_head_alpha")  # fmt: skip
_DOMINO = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")
# Names of one thing: each entry of a block predicts the token after its own position.
_ANCHOR = ("sample_from_anchor", "query_zero_predicts_next", "shift_label")
# Fields that may be inside `dflash_config` or at the top.
_CAUSAL = ("is_causal", "causal", "causal_head")
_INNER = (
    "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "input_embedding_scale",
    "output_multiplier", "final_logit_softcapping", "target_hidden_size", "attention_sink_bias", *_CAUSAL, *_ANCHOR,
    *_DFLASH2, *_DSPARK, *_DOMINO,
)  # fmt: skip
_CALLED = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark", "domino": "Domino"}
_SPECULATORS = ("dflash", "dflash2", "dspark")
_ARCHITECTURES = {
    "DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2", "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark", "LingDSparkModel": "dspark", "DominoDraftModel": "domino",
}  # fmt: skip


@dataclass(frozen=True)
class DFlashShape:
    """The shape of a [`DFlashDrafter`] and how it was trained to attend.

    Attributes:
        layers: per decoder layer, whether its block is causal, and how far back it attends: a query at q to a key at k
            if q - k <= reach (and k - q <= reach), None for everything.
        anchor_predicts: entry i of a block predicts the token after its own position, so that a block drafts one more.
        convolution: taps and group size of the convolutions of each layer (`BlockConvolution`); or None.
        selector: what scores pairs of tokens, "pairs" or "markov", or paths of them, "rnn" or "domino"
            (`drafters.dflash.modeling.SELECTORS`), and what that class takes beside the shape; None for none.
        draft_vocab_size: M, how many tokens an LM head of the drafter's own scores; None for the target's LM head.
        logit_scale, logit_cap: factor on the target's logits, then the bound c of c tanh(x / c).
        names: renamings (`hf_dart.interop.weights.renamed`) of our tensors to those of this format.
    """

    block_size: int  # entries of a block: the last known token and block_size - 1 masked ones
    mask_token_id: int  # whose embedding masked entries have
    feature_layers: tuple[int, ...]  # of the target's `hidden_states`, in the order in which they are fused
    layers: tuple[tuple[bool, int | None], ...]
    backbone: Qwen3Config  # the rest, as Qwen3 names it
    vocab_size: int  # of the target
    num_target_layers: int | None = None  # of the target; None where the format does not say
    embedding_scale: float = 1.0  # factor on the target's embedding table
    logit_scale: float = 1.0
    logit_cap: float | None = None
    names: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # what names of tensors begin with that are not used
    reach_of_block: bool = False  # all entries of a block attend as far back as the first one, and to all of the block
    anchor_predicts: bool = False
    convolution: tuple[int, int] | None = None
    selector: tuple[Any, ...] | None = None
    draft_vocab_size: int | None = None
    before_norm: bool = False  # the last of the target's `hidden_states` is meant as it is before the final norm


def dflash_format(content: dict[str, Any]) -> str | None:
    """Return a description of a config.json's drafter if it is a DFlash drafter or a variant, of whatever version."""
    kind = content.get("speculators_model_type")
    if "xpress_rank" in content or "xpress" in str(kind).lower():
        return "an XPress drafter"
    if isinstance(kind, str) and kind in _SPECULATORS:
        return f"a {_CALLED[kind]} drafter in the format of speculators"
    named = content.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    if not any(kind in name.lower() for name in names for kind in (*_SPECULATORS, "domino", "museglimmerassistant")):
        return None
    inner = content.get("dflash_config")
    inner = inner if isinstance(inner, dict) else {}
    if names[0] == "DFlashDraftModel" and inner.get("causal_head"):
        return "a JetSpec drafter"
    called = _CALLED.get(str(inner.get("projector_type"))) or _CALLED[_ARCHITECTURES.get(names[0], "dflash")]
    return f"a {called} drafter in z-lab's format"


def read_dflash(content: dict[str, Any]) -> DFlashShape:
    """Return the shape of a drafter that a config.json tells, or raise a `ValueError`."""
    refuse_by_name(content)
    fields = Fields(content, _KIND)
    if "speculators_model_type" in content:
        return DFlashShape(**_read_speculators(fields))
    if content.get("architectures") in [[name] for name in _ARCHITECTURES]:
        return DFlashShape(**_read_zlab(fields))
    raise ValueError(
        f"Its config.json names the architectures {content.get('architectures')}, and a DFlash drafter is one of "
        f"{', '.join(_ARCHITECTURES)}; give such a checkpoint."
    )


def _read_zlab(fields: Fields) -> dict[str, Any]:
    fields.choice("model_type", ("qwen3",))
    inner = fields.part("dflash_config", outer=_INNER)
    inner.choice("attention_mode", ("gqa", "mha"), "gqa")
    inner.choice("attention_sink_bias", (False,), False)
    kind = _ARCHITECTURES[fields.given("architectures")[0]]
    # SGLang takes all of SpecForge's drafters as DFlash's.
    kind = inner.choice("projector_type", _CALLED if kind == "dflash" else (kind,), kind)
    backbone = _backbone(fields)
    said = inner.named(*_CAUSAL)
    causal = inner.flag(said) if said in inner else None
    vocab_size = fields.integer("vocab_size", 1, MANY)
    target_layers = inner.integer("num_target_layers", 1, MANY) if "num_target_layers" in inner else None
    cap = inner.number("final_logit_softcapping", 0.0, positive=False)
    config = {
        **_block(kind, inner, backbone, vocab_size),
        # A query at q attends to a key at k if q - k < window.
        "layers": tuple(
            ((window is not None) if causal is None else causal, None if window is None else window - 1)
            for window in read_windows(fields, backbone.num_hidden_layers, by_depth=True)
        ),
        "num_target_layers": target_layers,
        "vocab_size": vocab_size,
        "embedding_scale": inner.number("input_embedding_scale", 1.0),
        "logit_scale": inner.number("output_multiplier", 1.0),
        "logit_cap": cap if cap > 0 else None,
        "feature_layers": _feature_layers(inner, backbone, target_layers),
    }
    inner.finish()
    fields.finish((*HARMLESS, "num_anchors"))
    return config


def _read_speculators(fields: Fields) -> dict[str, Any]:
    kind = fields.choice("speculators_model_type", _SPECULATORS)
    layer = speculators_layer(fields, ("qwen3",))
    backbone = _backbone(layer)
    both_ways = fields.flag("sliding_window_non_causal", kind == "dflash2")
    read_speculators_config(fields, _SPECULATORS)
    vocabulary = read_vocabulary(fields, layer)
    whole = vocabulary["draft_vocab_size"] is None
    config = {
        **_block(kind, fields, backbone, vocabulary["vocab_size"]),
        **vocabulary,
        "ignored": ("confidence_head.", "embed_tokens.", "verifier_", *(["lm_head."] if whole else [])),
        "layers": tuple(
            (window is not None and not both_ways, window) for window in read_windows(layer, backbone.num_hidden_layers)
        ),
        "reach_of_block": True,
        # Counted as `hidden_states`, the last of which speculators reads before the final norm.
        "before_norm": True,
        "feature_layers": fields.integers("aux_hidden_state_layer_ids", 0, MANY),
    }
    fields.finish((*HARMLESS, "speculators_version", "max_anchors", "has_no_defaults_at_init"))
    return config


def _block(kind: str, fields: Fields, backbone: Qwen3Config, vocab_size: int) -> dict[str, Any]:
    """Read what a block is made of, and the fields of one variant; those of the others are rejected."""
    own = backbone.hidden_size
    fields.choice("target_hidden_size", (own,), own)
    parts = {"dflash2": _DFLASH2, "dspark": _DSPARK, "domino": _DOMINO}
    for name in (name for other, names in parts.items() if other != kind for name in names):
        if fields.given(name):
            raise fields.wrong(name, fields.given(name), f"left out, as a {_CALLED[kind]} drafter has no such part")
    # Until speculators had that field (0.7), all of its drafters filled in.
    anchor_predicts = fields.flag(fields.named(*_ANCHOR), kind == "dspark" and "speculators_model_type" not in fields)
    known = {
        # Without the entry that is known a block has one at least.
        "block_size": fields.integer("block_size", 1 if anchor_predicts else 2, _MOST_SLOTS),
        "mask_token_id": fields.integer("mask_token_id", 0, vocab_size - 1),
        "anchor_predicts": anchor_predicts,
        "backbone": backbone,
    }
    if kind == "dflash2":
        taps = fields.integer("conv_kernel_size", 1, 64, 2)
        group = fields.integer("conv_group_size", 1, backbone.hidden_size, 16)
        if backbone.hidden_size % group:
            raise fields.wrong("conv_group_size", group, f"a divisor of {backbone.hidden_size}")
        fields.integer("selector_top_k", 1, MANY, 16)  # ours is `TreeConfig.top_k`
        rank = fields.integer("selector_rank", 1, 2**14, 256)
        names = {r"^selector\.": "candidate_selector."}
        return {**known, "convolution": (taps, group), "selector": ("pairs", rank), "names": names}
    if kind == "dspark":
        rank = fields.integer("markov_rank", 0, 2**14, 256)
        head = fields.choice("markov_head_type", ("vanilla", "gated", "rnn"), "vanilla")
        # The confidence head is not used: the draft's own probabilities tell its confidence.
        for name in _DSPARK[2:]:
            fields.given(name)
        return {
            **known,
            "selector": (("rnn", rank) if head == "rnn" else ("markov", rank, head == "gated")) if rank else None,
            "names": {r"^selector\.": "markov_head."},
            "ignored": ("confidence_head.", "logit_head.confidence_head.", "embed_tokens.", "lm_head.", "rotary_emb."),
        }
    if kind == "domino":
        sizes = (fields.integer(name, 1, 2**14) for name in _DOMINO[:2])
        first = fields.integer(_DOMINO[2], 0, known["block_size"], 0)
        return {**known, "selector": ("domino", *sizes, first), "names": {r"^selector\.": ""}}
    return known


def _feature_layers(fields: Fields, backbone: Qwen3Config, target_layers: int | None) -> tuple[int, ...]:
    """Return the layers of the target that are read, by `hidden_states`; files count one less, from -1 (embeddings)."""
    if "target_layer_ids" in fields or target_layers is None:
        return tuple(layer + 1 for layer in fields.integers("target_layer_ids", -1, (target_layers or MANY) - 1))
    # Where z-lab's drafters do not say it: from layer 1 to L - 3, evenly.
    layers, span = backbone.num_hidden_layers, target_layers - 4
    ids = [round(1 + index * span / (layers - 1)) for index in range(layers)] if layers > 1 else [target_layers // 2]
    if len(set(ids)) < layers or min(ids) < 0:
        raise ValueError(
            f"The config.json of this {_KIND} lacks target_layer_ids, and {layers} different layers of {target_layers} "
            "cannot be chosen as its code does; give the drafter that was published for this target."
        )
    return tuple(layer + 1 for layer in ids)


def _backbone(fields: Fields) -> Qwen3Config:
    return Qwen3Config(
        **read_widths(fields),
        num_hidden_layers=fields.integer("num_hidden_layers", 1, _MOST_LAYERS),
        hidden_act=fields.choice("hidden_act", ("silu", "gelu", "gelu_pytorch_tanh", "relu")),
        attention_bias=fields.flag("attention_bias", False),
        max_position_embeddings=fields.integer("max_position_embeddings", 1, MANY),
        rope_parameters=read_rope(fields),
    )
