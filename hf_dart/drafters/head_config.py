"""`HeadConfig`: what the configs of DART and EAGLE heads have in common."""

from __future__ import annotations

from typing import ClassVar

from hf_dart.drafters.base_config import DrafterConfig
from hf_dart.errors import check_fields

_CHOICES = {"embeddings": ("target", "table", "own"), "fusion_norm": ("none", "joint", "each")}


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

    The other fields are those of `hf_dart.drafters.base_config.DrafterConfig`.

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
        """Sizes that a target needs, by the names of `hf_dart.drafters.compatibility.check_compatible`."""
        own = {"LM head width": self.own_lm_head, "embedding width": self.embeddings == "own"}
        return {name: size for name, size in super().needs.items() if not own.get(name, False)}

    @property
    def borrows_vocabulary(self) -> bool:
        """True if tokens are read through the target's embeddings."""
        return self.embeddings != "own"
