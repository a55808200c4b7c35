"""`DrafterConfig`: what configs of drafters that are made for a target have in common; `HeadConfig`: those of heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig, PreTrainedModel

from hf_dart.drafters.compatibility import unwrapped
from hf_dart.errors import annotated, check_fields, check_types, refuse_unknown
from hf_dart.hub.download import cached_commit
from hf_dart.hub.publish import add_custom_generate
from hf_dart.models.features import default_feature_layers, layer_count, lent_modules, table_of
from hf_dart.trees.config import checked_tree
from hf_dart.trees.tree import MAX_DRAFT_LENGTH

_CHOICES = {"embeddings": ("target", "table", "own"), "fusion_norm": ("none", "joint", "each")}
_SIZES = (
    "hidden_size", "embedding_size", "feature_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "target_num_layers",
)  # fmt: skip


class DrafterConfig(PreTrainedConfig):
    """The part of a drafter's shape that its target decides, and what every drafter has.

    Args:
        draft_length: d, how many tokens are drafted at a time.
        feature_layers: which of the target's `hidden_states` are read, in the order in which they are joined; 0 is the
            embedding output, L the output of the last of L layers.
        hidden_size: H, the width of the drafter's network; where it scores with the target's LM head, that head's.
        embedding_size: E, the width of the target's token embeddings.
        feature_size: width of one target hidden state.
        num_attention_heads, num_key_value_heads, head_dim, intermediate_size, rms_norm_eps, rope_theta: of the
            drafter's layers.
        initializer_range: standard deviation of new weights.
        draft_window: how many of the last entries the drafter attends to when it drafts, in addition to the first
            `draft_sink`; positions are counted without those in between. None is all of the text.
        draft_sink: how many of the first entries it attends to, whatever the window.
        tree: fields of the [`TreeConfig`] that suits this drafter best; what `drafter.tree_config` starts as.
        vocab_size: rows of the target's embedding table, padding rows included.
        target_name, target_model_type, target_num_layers: the target that the drafter was made for.
        target_revision: the commit of its repository on the Hub, or None if not known.
        tokenizer_hash: `hf_dart.models.tokenizers.vocabulary_hash` of the target's tokenizer, or None if not recorded.
        chat_template_hash, enable_thinking: `hf_dart.models.tokenizers.template_hash` of the chat template of the
            conversations that the drafter was trained on, and the thinking flag that was handed to it; None without.
        origin, origin_license: the Hub repository (or the name of the folder) of another project that the drafter came
            from, and the licence that it was published under there, as the Hub spells it; None for one of our own.

    Raises:
        ValueError: a field is out of range; the message names the field and what it takes.
    """

    changeable: ClassVar[tuple[str, ...]] = ("tree", "target_name", "draft_window", "draft_sink")
    """Fields that a trained drafter may be given other values of."""

    former_fields: ClassVar[dict[str, Any]] = {}
    """Fields that files of earlier versions have and this config has not, with the only values that are read."""

    attention_bias = output_bias = mlp_bias = qk_norm = False  # no fields but of a `HeadConfig`
    hidden_act = "silu"  # no field of any

    draft_length: int = 8
    feature_layers: list[int] | tuple[int, ...] = (2, 4, 6)
    hidden_size: int = 256
    embedding_size: int = 256
    feature_size: int = 256
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 64
    intermediate_size: int = 768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    draft_window: int | None = None
    draft_sink: int = 4
    tree: dict[str, Any] = dataclasses.field(default_factory=dict)
    initializer_range: float = 0.02
    vocab_size: int = 6144
    target_name: str | None = None
    target_revision: str | None = None
    target_model_type: str | None = None
    target_num_layers: int = 8
    tokenizer_hash: str | None = None
    chat_template_hash: str | None = None
    enable_thinking: bool | None = None
    origin: str | None = None
    origin_license: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name, value in self.former_fields.items():
            if kwargs.pop(name, value) != value:
                raise ValueError(f"{type(self).__name__} of this version has no {name}; train a drafter without it.")
        super().__post_init__(**kwargs)
        for kind in type(self).__mro__:
            if issubclass(kind, DrafterConfig):
                check_types(self, kind)
        self.feature_layers = list(dict.fromkeys(self.feature_layers))
        self._check_shape()
        self.tree = checked_tree(self.tree)

    def _check_shape(self) -> None:
        check_fields(self, least=dict.fromkeys(_SIZES, 1))
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; give an even number, as rotary positions turn pairs.")
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number above 0.")
        if not 1 <= self.draft_length <= MAX_DRAFT_LENGTH:
            raise ValueError(f"draft_length is {self.draft_length}; give 1 to {MAX_DRAFT_LENGTH}.")
        self.check_window(self.draft_window, self.draft_sink)
        for layer in self.feature_layers:
            if not 0 <= layer <= self.target_num_layers:
                raise ValueError(
                    f"feature_layers has {layer}, and the target's hidden_states go from 0 (the embeddings) to "
                    f"{self.target_num_layers}; name some of these."
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})."
            )

    @property
    def least_window(self) -> int:
        """The smallest `draft_window`."""
        return 4 * (self.draft_length + 1)

    def check_window(self, window: int | None, sink: int) -> None:
        """Raise a `ValueError` if these are no `draft_window` and `draft_sink` of the drafter."""
        if window is not None and window < self.least_window:
            raise ValueError(
                f"draft_window is {window}; give {self.least_window} or more, four times what a round of "
                f"{self.draft_length} drafted tokens writes, or None for all of the text."
            )
        if sink < 0:
            raise ValueError(f"draft_sink is {sink}; give 0 or more.")

    @property
    def features_width(self) -> int:
        """F, the width of the concatenated features of one position."""
        return len(self.feature_layers) * self.feature_size

    @property
    def options(self) -> dict[str, Any]:
        """Fields of this kind of drafter alone that differ from their defaults, without lists and tables."""
        plain = type(self)()
        own = {one.name for one in dataclasses.fields(self)} - {one.name for one in dataclasses.fields(DrafterConfig)}
        changed = {name: getattr(self, name) for name in sorted(own) if getattr(self, name) != getattr(plain, name)}
        return {name: value for name, value in changed.items() if isinstance(value, (int, float, str))}

    @property
    def made_for(self) -> str:
        """Name of the drafter's target in messages."""
        kind = "a target" if self.target_model_type is None else f"a {self.target_model_type} target"
        return self.target_name or kind

    @property
    def needs(self) -> dict[str, int]:
        """Sizes that a target needs, by the names of `hf_dart.drafters.compatibility.check_compatible`."""
        return {
            "hidden size": self.feature_size,
            "embedding width": self.embedding_size,
            "number of layers": self.target_num_layers,
            "LM head width": self.hidden_size,
        }

    @classmethod
    def for_target(cls, target: PreTrainedModel, **overrides: Any) -> Self:
        """Return the config of a drafter for `target` (a causal LM), read off it; any field can be overridden.

        Raises:
            TypeError: a field is unknown, or `target` is no model.
            ValueError: the target has no token embeddings or no LM head to share.
        """
        refuse_unknown(overrides, annotated(cls), f"{cls.__name__} has no field")
        unwrapped(target)
        text = target.config.get_text_config(decoder=True)
        embeddings, lm_head = lent_modules(target)
        table = table_of(embeddings)
        hidden, ropes = int(text.hidden_size), getattr(text, "rope_parameters", None) or {}
        # By kind of layer, where these differ; None for a kind without rotary positions.
        kinds = (ropes, ropes.get("full_attention"), *ropes.values())
        bases = (kind["rope_theta"] for kind in kinds if isinstance(kind, dict) and kind.get("rope_theta"))
        heads = _first(text, ("num_attention_heads",), max(hidden // 64, 1))  # a target may have no attention
        fields: dict[str, Any] = {
            "feature_layers": default_feature_layers(layer_count(target)),
            "hidden_size": int(getattr(lm_head, "in_features", hidden)),
            "embedding_size": int(table.embedding_dim),
            "feature_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": _first(text, ("num_key_value_heads",), heads),
            "head_dim": _first(text, ("head_dim",), hidden // heads),
            "intermediate_size": _first(text, ("intermediate_size", "ffn_dim", "n_inner"), 4 * hidden),
            "rms_norm_eps": _first(text, ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), 1e-6),
            "rope_theta": float(next(bases, 10000.0)),
            "vocab_size": int(table.num_embeddings),
            **told_of(target),
        }
        return cls(**{**fields, **overrides})

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write config.json and `custom_generate` to a folder, as every kind of drafter does when saved."""
        super().save_pretrained(save_directory, **kwargs)
        add_custom_generate(save_directory)


class HeadConfig(DrafterConfig):
    """The shape of a head of decoder layers over tokens and the target's fused features, whoever trained it.

    Args:
        num_layers: decoder layers.
        draft_vocab_size: M, how many tokens the head scores; None is all of them.
        own_lm_head: score tokens with an LM head of the head's own, [V, H] or [M, H], instead of the target's.
        embeddings: how tokens are read: "target", as the target itself embeds them; "table", by the rows of its table
            alone, without the factors and norms that some families put after it; "own", by a table of the head's.
        fusion_norm: what the target's hidden states go through before they are fused: "none", "joint", one norm of
            all, or "each", one norm per layer that is read.
        norm_before_residual: the first layer's residual is the normed feature, not the feature.
        fusion_bias, attention_bias, output_bias, mlp_bias: biases of the fusion, of q, k and v, of the attention's
            output, and of the MLP.
        qk_norm: norms of queries and keys.
        windows: per layer, how many positions of the text an entry attends to, its own included; 0 is all, and an
            empty list is all in every layer.
        rope_frequencies: rotary frequencies [head_dim / 2]; None are those of rope_theta.
        rope_scale: factor on rotary cosines and sines.

    The other fields are those of `DrafterConfig`.

    Raises:
        ValueError: a field is out of range; the message names the field and what it takes.
    """

    most_layers: ClassVar[int]

    num_layers: int = 1
    draft_vocab_size: int | None = None
    own_lm_head: bool = False
    embeddings: str = "target"
    fusion_norm: str = "none"
    norm_before_residual: bool = False
    fusion_bias: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: list[int] | tuple[int, ...] = ()
    rope_frequencies: list[float] | tuple[float, ...] | None = None
    rope_scale: float = 1.0

    def _check_shape(self) -> None:
        super()._check_shape()
        if not self.feature_layers:
            raise ValueError("feature_layers is empty; name at least one index of the target's hidden_states.")
        if not 1 <= self.num_layers <= self.most_layers:
            raise ValueError(f"num_layers is {self.num_layers}; give 1 to {self.most_layers}.")
        self.windows = list(self.windows)
        if self.windows and (len(self.windows) != self.num_layers or min(self.windows) < 0):
            raise ValueError(f"windows is {self.windows}; give {self.num_layers} numbers of 0 or more, or none.")
        check_fields(self, choices=_CHOICES)
        frequencies, pairs = self.rope_frequencies, self.head_dim // 2
        if frequencies is not None and len(frequencies) != pairs:
            raise ValueError(f"rope_frequencies has {len(frequencies)} entries; give {pairs}, half of head_dim.")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; give 1 to {self.vocab_size}, the target's vocabulary, "
                "or None for all of it."
            )

    @property
    def needs(self) -> dict[str, int]:
        own = {"LM head width": self.own_lm_head, "embedding width": self.embeddings == "own"}
        return {name: size for name, size in super().needs.items() if not own.get(name, False)}


def told_of(target: PreTrainedModel) -> dict[str, Any]:
    """Return the fields of a `DrafterConfig` that say which target it is for."""
    # A folder's path means nothing on another machine; its name may.
    name = target.config.name_or_path
    return {
        "target_name": (Path(name).name if Path(name).is_dir() else name) or None,
        "target_revision": cached_commit(name),
        "target_model_type": target.config.model_type,
        "target_num_layers": layer_count(target),
    }


def _first(config: Any, names: Sequence[str], default: Any) -> Any:
    """Return a field under the first of several names that families use; the maximum, where layers differ in it."""
    layers = list(config.per_layer_config)
    for name in names:
        given = [getattr(layer, name, None) for layer in layers]
        lists = [value if isinstance(value, (list, tuple)) else [value] for value in given]
        values = [value for per_layer in lists for value in per_layer if value is not None]
        if values:
            return max(values)
    return default
