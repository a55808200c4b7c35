"""`DartConfig`: what a DART head is."""

from __future__ import annotations

from typing import Any, ClassVar

from hf_dart.drafters.base_config import HeadConfig
from hf_dart.errors import check_fields

_CHOICES = {
    "block_attention": ("causal", "bidirectional"),
    "input_form": ("pair", "stream"),
    "mask_mode": ("learned", "peagle"),
    "selector_kind": ("bigram", "markov"),
}


class DartConfig(HeadConfig):
    """The shape of a [`DartHead`]; `DartConfig.for_target` reads most of it off a target.

    Args:
        draft_length: d, how many tokens one pass guesses.
        double_norm: apply the final norm twice, as DART's released code does.
        num_layers: decoder layers of the head, 1 to 5.
        input_form: what the first layer attends over: "pair", next to each other the normed embedding and the normed
            features (width E + H), or "stream", the features plus a projection of the embedding (width H), which is
            what a layer of the target is used to.
        copied_layer: the head's layers are copies of the target's, from this one (counted from 0) on; they stay as
            they are, are not saved, and are copied again at load (`hf_dart.drafters.dart.copied`).
            None for layers of its own.
        fingerprint: `hf_dart.drafters.dart.copied.fingerprint` of the weights that a checkpoint needs and does not
            hold.
        mask_mode: what a mask slot puts into the first layer: "learned", one free vector, or "peagle", a learned
            feature vector and the embedding of `mask_token_id`, which go through `fc` and the norms like those of
            real positions (P-EAGLE, arXiv 2602.01469), so that such heads can be served elsewhere.
        mask_token_id: with "peagle", a token that no text contains, as
            `hf_dart.drafters.draft_vocabulary.unused_token` finds one.
        draft_vocab_size: M, how many tokens the head scores (`reduce_vocabulary`); None is all of them.
        block_attention: what a mask slot attends to in its draft: "causal", the slots in front of it, or
            "bidirectional", all of them.
        shift_logits: the last real position drafts the first token and mask slot j the token j + 1, so that d - 1
            slots do; without, d slots draft a token each, their own. DART (arXiv 2601.19278) compares both.
        selector_rank: width of the bigram selector (`hf_dart.drafters.dart.modeling`); 0 for none.
        selector_kind: "bigram", whose scores depend on the draft's hidden states, or "markov", one low-rank matrix.
        editor: the head can run again on its own draft (`modeling.Editor`, `TreeConfig.refine`).

    Sizes, the target's and the tree's fields are those of `hf_dart.drafters.base_config.DrafterConfig`; the others, of
    copied layers and heads of other projects, are those of `hf_dart.drafters.base_config.HeadConfig`. Where the
    paper's head reads the target is `default_feature_layers(L)` of L layers.

    Raises:
        ValueError: a field is out of range; the message names the field and what it takes.
    """

    model_type = "dart"
    changeable = (*HeadConfig.changeable, "selector_rank", "selector_kind")
    former_fields: ClassVar[dict[str, Any]] = {"inject_features": False}

    # That of DFlash (arXiv 2602.06036); more cost more than they bring there.
    most_layers = 5

    double_norm: bool = False
    input_form: str = "pair"
    copied_layer: int | None = None
    fingerprint: list[float] | tuple[float, ...] | None = None
    mask_mode: str = "learned"
    mask_token_id: int | None = None
    block_attention: str = "causal"
    shift_logits: bool = True
    selector_rank: int = 0
    selector_kind: str = "bigram"
    editor: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_fields(self, choices=_CHOICES, least={"selector_rank": 0})
        if self.copied_layer is not None and self.input_form != "stream":
            raise ValueError("A copied layer takes the width of the target's; leave input_form at 'stream'.")
        if self.editor and not self.shift_logits:
            raise ValueError("Edit passes go with shifted logits; leave shift_logits True, or the editor out.")
        if self.mask_mode == "peagle":
            self._check_peagle()

    def _check_peagle(self) -> None:
        if self.mask_token_id is None:
            raise ValueError(
                "mask_mode='peagle' needs a token that no text contains; give mask_token_id, or pass tokenizer= to "
                "DartHead.from_target, which then looks for one."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id is {self.mask_token_id}; give one of 0..{self.vocab_size - 1}.")
        if self.block_attention != "causal" or self.input_form != "pair" or not self.shift_logits:
            raise ValueError(
                "mask_mode='peagle' is for heads that other engines serve, which know neither input_form='stream' nor "
                "block_attention='bidirectional' nor shift_logits=False; leave these out, or use mask_mode='learned'."
            )

    @property
    def draft_slots(self) -> int:
        """Mask slots of a whole draft: d - 1, or d where logits are not shifted."""
        return self.draft_length - int(self.shift_logits)
