"""What a published DFlash drafter is, read from either of the two formats that its config.json comes in.

z-lab's (`architectures: ["DFlashDraftModel"]`, a Qwen3 config with a `dflash_config` inside) and that of transformers'
assistants (`model_type: "muse_glimmer_assistant"`). They differ in names, and in what a sliding window covers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import Qwen3Config

from hf_dart.interop.checkpoint import HARMLESS, Fields, one_of, place_of
from hf_dart.interop.rope import read_rope

_KIND = "DFlash drafter"
_MANY = 2**31 - 1
_MOST_LAYERS = 64
_MOST_SLOTS = 256
_DFLASH2 = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
# What may stand inside `dflash_config` or beside it.
_INNER = (
    "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "causal", "input_embedding_scale",
    "output_multiplier", "final_logit_softcapping",
)  # fmt: skip


@dataclass(frozen=True)
class DFlashConfig:
    """The shape of a [`DFlashDrafter`] and how it was trained to attend.

    Attributes:
        block_size: entries of a block: the last known token and block_size - 1 masked ones.
        mask_token_id: whose embedding masked entries have.
        feature_layers: of the target's `hidden_states`, in the order in which they are fused.
        hidden_size: H, also the width of the target's hidden states, embeddings and LM head.
        num_target_layers, vocab_size: of the target; None where the format does not say.
        layers: per decoder layer, whether its block is causal, and how far it sees back: a query at q sees a key at k
            if q - k <= reach (and k - q <= reach), None for everything.
        embedding_scale: factor on the target's embedding table.
        logit_scale, logit_cap: factor on the target's logits, then the bound c of c tanh(x / c).
        backbone: the rest, as Qwen3 names it.
        names: how this format names tensors that ours names otherwise.
    """

    block_size: int
    mask_token_id: int
    feature_layers: tuple[int, ...]
    hidden_size: int
    num_target_layers: int | None
    vocab_size: int | None
    layers: tuple[tuple[bool, int | None], ...]
    embedding_scale: float
    logit_scale: float
    logit_cap: float | None
    backbone: Qwen3Config
    names: dict[str, str]

    @property
    def made_for(self) -> str:
        """What messages call the target; neither format names it."""
        return "a target"

    @property
    def needs(self) -> dict[str, int]:
        """What a target has to have, in the words of `hf_dart.drafters.compatibility.check_compatible`."""
        widths = dict.fromkeys(("hidden size", "embedding width", "LM head width"), self.hidden_size)
        return widths if self.num_target_layers is None else {**widths, "number of layers": self.num_target_layers}

    @property
    def tokenizer_hash(self) -> None:
        """None: neither format says which tokenizer the target has."""

    @property
    def chat_template_hash(self) -> None:
        """None: neither format says which chat template the drafter was trained with."""

    @classmethod
    def read(cls, content: dict[str, Any]) -> DFlashConfig:
        """From a config.json.

        Raises:
            ValueError: it describes no DFlash drafter, or one that is not known here, or contradicts itself.
        """
        architectures = content.get("architectures")
        inner = content.get("dflash_config")
        inside = inner if isinstance(inner, dict) else {}
        marked = any(name in part for part in (content, inside) for name in _DFLASH2)
        if marked or architectures == ["DFlash2DraftModel"]:
            raise ValueError(
                "This is a DFlash2 drafter (convolutions and a path selector), which hf_dart does not know yet; use a "
                "DFlash drafter (architecture DFlashDraftModel) for this target."
            )
        if content.get("model_type") == "muse_glimmer_assistant":
            return _read_assistant(Fields(content, _KIND))
        if architectures == ["DFlashDraftModel"]:
            return _read_zlab(Fields(content, _KIND))
        raise ValueError(
            f"Its config.json names the architectures {architectures}, and a DFlash drafter is a DFlashDraftModel or a "
            "muse_glimmer_assistant; give such a checkpoint."
        )


def dflash_format(content: dict[str, Any]) -> str | None:
    """What a config.json describes, if it is that of a DFlash drafter, of whatever version."""
    architectures = content.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if content.get("model_type") == "muse_glimmer_assistant":
        return "a DFlash drafter in the format of transformers' assistants"
    return "a DFlash drafter in z-lab's format" if any("DFlash" in str(name) for name in names) else None


def _read_zlab(fields: Fields) -> DFlashConfig:
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
    causal = one_of(fields, inner, ("is_causal", "causal"))
    if causal is not None and not isinstance(causal, bool):
        raise fields.wrong("causal", causal, "true or false")
    depth = at["num_target_layers"]
    target_layers = depth.integer("num_target_layers", 1, _MANY) if "num_target_layers" in depth else None
    # A query at q sees a key at k if q - k < window.
    reach = None if window is None else window - 1
    cap = at["final_logit_softcapping"]
    bounded = "final_logit_softcapping" in cap and cap.number("final_logit_softcapping", positive=False) > 0
    config = DFlashConfig(
        layers=tuple((slides if causal is None else causal, reach if slides else None) for slides in sliding),
        num_target_layers=target_layers,
        vocab_size=fields.integer("vocab_size", 1, _MANY),
        embedding_scale=at["input_embedding_scale"].number("input_embedding_scale", 1.0),
        logit_scale=at["output_multiplier"].number("output_multiplier", 1.0),
        logit_cap=cap.number("final_logit_softcapping") if bounded else None,
        names={},
        **_common(at["block_size"], at["mask_token_id"], at["target_layer_ids"], backbone, target_layers),
    )
    inner.finish()
    fields.finish(HARMLESS)
    return config


def _read_assistant(fields: Fields) -> DFlashConfig:
    fields.choice("architectures", (["MuseGlimmerAssistantModel"],))
    backbone = _backbone(fields)
    sliding = _sliding(fields, backbone.num_hidden_layers)
    # Here a window reaches as far in both directions, its end included.
    reach = fields.integer("sliding_window", 1, _MANY) if any(sliding) or "sliding_window" in fields else None
    config = DFlashConfig(
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
    block: Fields, mask: Fields, taps: Fields, backbone: Qwen3Config, target_layers: int | None
) -> dict[str, Any]:
    """What both formats say; they count the outputs of layers from 0, `hidden_states` has the embeddings in front."""
    ids = taps.integers("target_layer_ids", 0, (target_layers or _MANY) - 1)
    return {
        "block_size": block.integer("block_size", 2, _MOST_SLOTS),
        "mask_token_id": mask.integer("mask_token_id", 0, _MANY),
        "feature_layers": tuple(layer + 1 for layer in ids),
        "hidden_size": backbone.hidden_size,
        "backbone": backbone,
    }


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
