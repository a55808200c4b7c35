"""`DFlashConfig`: a published DFlash drafter, or a variant of it; `DFlashShape`: what its config.json says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from transformers import Qwen3Config

from hf_dart.drafters.base_config import DrafterConfig
from hf_dart.interop.dflash import dflash_format, read_dflash

_SHAPE = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps")


@dataclass(frozen=True)
class DFlashShape:
    """The shape of a [`DFlashDrafter`] and how it was trained to attend.

    Attributes:
        block_size: entries of a block: the last known token and block_size - 1 masked ones.
        mask_token_id: whose embedding masked entries have.
        feature_layers: of the target's `hidden_states`, in the order in which they are fused.
        before_norm: the last of the target's `hidden_states` is meant as it is before the final norm.
        layers: per decoder layer, whether its block is causal, and how far back it attends: a query at q to a key at k
            if q - k <= reach (and k - q <= reach), None for everything.
        backbone: the rest, as Qwen3 names it.
        num_target_layers, vocab_size: of the target; None where the format does not say.
        reach_of_block: all entries of a block attend as far back as the first one, and to all of the block.
        anchor_predicts: entry i of a block predicts the token after its own position, so that a block drafts one more.
        convolution: taps and group size of the convolutions of each layer (`selectors.BlockConvolution`); or None.
        selector: what scores pairs of tokens, "pairs" (`selectors.PairSelector`), "markov" (`MarkovSelector`) or
            "gated" (the same with a gate), and its rank; None for none.
        draft_vocab_size: M, how many tokens an LM head of the drafter's own scores; None for the target's LM head.
        embedding_scale: factor on the target's embedding table.
        logit_scale, logit_cap: factor on the target's logits, then the bound c of c tanh(x / c).
        names: renamings (`hf_dart.interop.weights.renamed`) of our tensors to those of this format.
        ignored: what names of tensors begin with that are not used.
    """

    block_size: int
    mask_token_id: int
    feature_layers: tuple[int, ...]
    layers: tuple[tuple[bool, int | None], ...]
    backbone: Qwen3Config
    num_target_layers: int | None = None
    vocab_size: int | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    reach_of_block: bool = False
    anchor_predicts: bool = False
    convolution: tuple[int, int] | None = None
    selector: tuple[str, int] | None = None
    draft_vocab_size: int | None = None
    before_norm: bool = False

    @property
    def hidden_size(self) -> int:
        """H, also the width of the target's hidden states, embeddings and LM head."""
        return self.backbone.hidden_size

    @classmethod
    def read(cls, content: dict[str, Any]) -> DFlashShape:
        """Read a config.json.

        Raises:
            ValueError: it describes no DFlash drafter, or one that is not known here, or contradicts itself.
        """
        return cls(**read_dflash(content))


class DFlashConfig(DrafterConfig):
    """The config of a [`DFlashDrafter`]: the config.json that it was published with, and what is known of its target.

    Weights are in the same folder under the names of their own format, so that one function reads them.

    Args:
        published: the config.json that the drafter was published with.

    The other fields are those of `hf_dart.drafters.base_config.DrafterConfig`, told by that one and the target.

    Raises:
        ValueError: a field is out of range.
    """

    model_type = "dart_dflash"

    published: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def needs(self) -> dict[str, int]:
        """Sizes that a target needs, by the names of `hf_dart.drafters.compatibility.check_compatible`."""
        widths = dict.fromkeys(("hidden size", "embedding width", "LM head width"), self.hidden_size)
        layers = DFlashShape.read(self.published).num_target_layers
        return widths if layers is None else {**widths, "number of layers": layers}

    @property
    def known_rows(self) -> int | None:
        """Rows of the target's embedding table; None where the published format does not say."""
        return DFlashShape.read(self.published).vocab_size

    @property
    def options(self) -> dict[str, Any]:
        """The kind and format of the published drafter, in words."""
        return {"format": dflash_format(self.published)}

    @classmethod
    def of(cls, published: dict[str, Any]) -> Self:
        """Return the config of a published drafter, by its config.json."""
        config = DFlashShape.read(published)
        shape = config.backbone
        depth = config.num_target_layers or max(config.feature_layers)
        return cls(
            published=published,
            draft_length=max(1, config.block_size - int(not config.anchor_predicts)),
            feature_layers=list(config.feature_layers),
            **{name: getattr(shape, name) for name in _SHAPE},
            embedding_size=config.hidden_size,
            feature_size=config.hidden_size,
            **({} if config.vocab_size is None else {"vocab_size": config.vocab_size}),
            target_num_layers=depth,
        )
