"""`EagleConfig`: what an EAGLE head is."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self

from transformers import PreTrainedModel

from hf_dart.drafters.base_config import DrafterConfig
from hf_dart.drafters.dart.configuration import DartConfig
from hf_dart.target.features import layer_count

_MOST_LAYERS = 8


class EagleConfig(DrafterConfig):
    """The shape of an [`EagleDrafter`]: decoder layers over a token and fused features.

    Args:
        draft_length: d, passes of the layers per draft.
        beam: W, how many different tokens of each depth are drafted on from; 1 drafts a chain. What `drafter.beam`
            starts as.
        num_layers: decoder layers; the first one attends over the pair of both, the others over its output.
        embeddings: how tokens are read: "target", as the target itself embeds them; "table", by the rows of its table
            alone, without the factors and norms that some families put after it; "own", by a table of the head's.
        own_lm_head: score tokens with an LM head of the head's own instead of the target's.
        joined: the fusion takes a token's embedding together with the feature, instead of features of several layers;
            there are no norms in front of the first layer or after the last one (EAGLE-1 and EAGLE-2).
        draft_vocab_size: M, how many tokens the head scores; None is all of them.
        fusion_norm: what the target's hidden states go through before they are fused: "none", "joint", one norm of
            all, or "each", one norm per layer that is read.
        norm_before_residual: the first layer's residual is the normed feature, not the feature.
        norm_output: what stands in for the next feature is the output after the final norm, not before it (EAGLE-3.1).
        fusion_bias, attention_bias, output_bias, mlp_bias: biases of the fusion, of q, k and v, of the attention's
            output, and of the MLP.
        qk_norm: norms of queries and keys.
        windows: per layer, how many positions of the text an entry sees, its own included (a drafted one as many as the
            last one of the text); 0 is all, and an empty list is all in every layer.
        rope_frequencies: rotary frequencies [head_dim / 2]; None are those of rope_theta.
        rope_scale: factor on rotary cosines and sines.

    The other fields are those of `hf_dart.drafters.base_config.DrafterConfig`.

    Raises:
        ValueError: a field is out of range, or belongs to DART heads.
    """

    model_type = "dart_eagle"
    changeable = (*DrafterConfig.changeable, "beam")

    beam: int = 4
    num_layers: int = 1
    embeddings: str = "target"
    own_lm_head: bool = False
    joined: bool = False
    draft_vocab_size: int | None = None
    fusion_norm: str = "none"
    norm_before_residual: bool = False
    norm_output: bool = False
    fusion_bias: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: list[int] | tuple[int, ...] = ()
    rope_frequencies: list[float] | tuple[float, ...] | None = None
    rope_scale: float = 1.0

    def __post_init__(self, **kwargs: Any) -> None:
        for name, default in _FORMER.items():
            if kwargs.pop(name, default) != default:
                raise ValueError(f"{name} belongs to DART heads, and an EAGLE head has none; leave it out.")
        super().__post_init__(**kwargs)
        if self.beam < 1:
            raise ValueError(f"beam is {self.beam}; give 1 or more.")
        if not self.feature_layers:
            raise ValueError("feature_layers is empty; name at least one index of the target's hidden_states.")
        if not 1 <= self.num_layers <= _MOST_LAYERS:
            raise ValueError(f"num_layers is {self.num_layers}; give 1 to {_MOST_LAYERS}.")
        self.windows = list(self.windows)
        if self.windows and (len(self.windows) != self.num_layers or min(self.windows) < 0):
            raise ValueError(f"windows is {list(self.windows)}; give {self.num_layers} numbers of 0 or more, or none.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; give one of {', '.join(choices)}.")
        normed = self.fusion_norm != "none" or self.norm_before_residual or self.norm_output
        if self.joined and (normed or self.features_width != self.hidden_size):
            raise ValueError(
                "joined reads one layer of the target, of the width hidden_size, and has no norms; leave out "
                "fusion_norm, norm_before_residual and norm_output, and name one layer in feature_layers."
            )
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; give 1 to {self.vocab_size}, the target's vocabulary, "
                "or None for all of it."
            )
        frequencies, pairs = self.rope_frequencies, self.head_dim // 2
        if frequencies is not None and len(frequencies) != pairs:
            raise ValueError(f"rope_frequencies has {len(frequencies)} entries; give {pairs}, half of head_dim.")

    @classmethod
    def for_target(cls, target: PreTrainedModel, **overrides: Any) -> Self:
        """As `DrafterConfig.for_target`; one that is `joined` reads the last hidden state."""
        if overrides.get("joined"):
            overrides.setdefault("feature_layers", [layer_count(target)])
        return super().for_target(target, **overrides)

    @property
    def needs(self) -> dict[str, int]:
        """What a target has to have, in the words of `hf_dart.drafters.compatibility.check_compatible`."""
        own = {"LM head width": self.own_lm_head, "embedding width": self.embeddings == "own"}
        return {name: size for name, size in super().needs.items() if not own.get(name, False)}

    @property
    def borrows_vocabulary(self) -> bool:
        """Are tokens read through the target's embeddings?"""
        return self.embeddings != "own"


_CHOICES = {"embeddings": ("target", "table", "own"), "fusion_norm": ("none", "joint", "each")}
# Earlier versions wrote the fields of DART heads into config.json too, as DART heads have them by default.
_OWN = {one.name for kind in (DrafterConfig, EagleConfig) for one in fields(kind)}
_FORMER = {one.name: one.default for one in fields(DartConfig) if one.name not in _OWN}
EagleConfig.former_fields = tuple(_FORMER)
