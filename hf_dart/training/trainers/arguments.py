"""The options of a training run: of the trainer, and for the command line of the target and the drafter.

`HfArgumentParser` reads the annotations and makes a flag of every field.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from transformers import TrainingArguments

from hf_dart.training.objective.objective import PRESETS, Objective
from hf_dart.training.trainers.evaluate import DraftQuality

# Options for models that transformers trains by losses of its own.
_OF_NO_USE = ("label_smoothing_factor", "neftune_noise_alpha", "use_liger_kernel")


@dataclass
class TargetArguments:
    """The target of a run: its weights stay as they are, in any form that transformers runs."""

    target: str | None = field(default=None, metadata={"help": "a folder or a Hub id; default: the packaged target"})
    target_revision: str | None = field(default=None, metadata={"help": "branch, tag or commit on the Hub"})
    tokenizer: str | None = field(default=None, metadata={"help": "default: the target's"})
    dtype: str | None = field(
        default=None, metadata={"help": "of the target's weights; default: float32 for the packaged one, else as saved"}
    )
    device_map: str | None = field(
        default=None, metadata={"help": "auto spreads the target over devices; default: whole on each process's own"}
    )
    quantization: str | None = field(
        default=None, metadata={"help": 'fields of a BitsAndBytesConfig as JSON, such as {"load_in_4bit": true}'}
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "of the target, as for from_pretrained"})

    def quantization_fields(self) -> dict[str, Any]:
        """`quantization` as a dict, empty without.

        Raises:
            ValueError: it is no JSON object.
        """
        return _json_object("quantization", self.quantization, '{"load_in_4bit": true}')


@dataclass
class DrafterArguments:
    """A new drafter, shaped by the fields of its config, or one to train on."""

    drafter: str = field(
        default="dart",
        metadata={"help": "its kind, edit for a head with edit passes; --help lists the options of that kind"},
    )
    head: str | None = field(default=None, metadata={"help": "go on training this one: a folder or a Hub id"})
    draft_length: int | None = field(default=None, metadata={"help": "d, tokens guessed at a time"})
    feature_layers: list[int] | None = field(default=None, metadata={"help": "hidden_states of the target to read"})
    num_layers: int | None = field(default=None, metadata={"help": "decoder layers of the drafter"})
    num_attention_heads: int | None = field(default=None, metadata={"help": "default: as the target"})
    num_key_value_heads: int | None = field(default=None, metadata={"help": "default: as the target"})
    head_dim: int | None = field(default=None, metadata={"help": "default: as the target"})
    intermediate_size: int | None = field(default=None, metadata={"help": "default: as the target"})
    rms_norm_eps: float | None = field(default=None, metadata={"help": "default: as the target"})
    rope_theta: float | None = field(default=None, metadata={"help": "default: as the target"})
    initializer_range: float | None = field(default=None, metadata={"help": "standard deviation of new weights"})
    target_name: str | None = field(default=None, metadata={"help": "kept in the config; default: the target's name"})
    tree: str | None = field(default=None, metadata={"help": "fields of the TreeConfig that suits it, as JSON"})

    def config(self) -> dict[str, Any]:
        """The fields of the config that were given.

        Raises:
            ValueError: `tree` is no JSON object.
        """
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("drafter", "head")}
        if self.tree is not None:
            given["tree"] = _json_object("tree", self.tree, '{"nodes": 16}')
        return {name: value for name, value in given.items() if value is not None}


def _json_object(name: str, text: str | None, example: str) -> dict[str, Any]:
    try:
        return {} if text is None else dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {text!r}; give a JSON object such as {example}.") from error


@dataclass
class HeadArguments(DrafterArguments):
    """A [`DartHead`]."""

    block_attention: Literal["causal", "bidirectional"] | None = field(
        default=None, metadata={"help": "what the mask slots of a draft see of each other"}
    )
    shift_logits: bool | None = field(
        default=None, metadata={"help": "false: every drafted token has a mask slot of its own, the first one too"}
    )
    inject_features: bool | None = field(default=None, metadata={"help": "also as keys and values of every layer"})
    mask_mode: Literal["learned", "peagle"] | None = field(default=None, metadata={"help": "what a mask slot holds"})
    mask_token_id: int | None = field(default=None, metadata={"help": "with peagle; default: an unused token"})
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "draft only so many tokens, the most frequent of the training rows"}
    )
    selector_rank: int | None = field(default=None, metadata={"help": "give the head a bigram selector this wide"})
    selector_kind: Literal["bigram", "markov"] | None = field(
        default=None, metadata={"help": "whether its scores depend on the context; default: bigram, which do"}
    )


@dataclass
class DartTrainingArguments(TrainingArguments):
    """`TrainingArguments` and what is DART's own.

    Args:
        anchors_per_row: K, blocks trained per row.
        loss: "dart" (annealed KL), "left_to_right", "dpace" or "lk".
        divergence, position_weights, gamma, dpace_alpha, lk_eta, token_weight, focal_weight, chain_weight,
        chain_form: change that field of the preset (`Objective`).
        selector_only: train the head's bigram selector on the frozen head, by annealed KL.
        selector_candidates: K, tokens per depth that the selector learns to rank.
        early_stopping_patience: stop after so many evaluations in a row without a better τ, and keep the best head;
            None goes on to the end.
        decode_prompts: at every evaluation also decode so many prompts ([`DecodingCallback`]), the beginnings of the
            first evaluation rows, or of conversations what comes before the first reply; 0 for none.
        decode_prompt_tokens, decode_new_tokens: length of each, and of what is written after it.
        loss_chunk: blocks whose logits are held at a time; 0 holds all.
        attention: of the blocks' pass: "sdpa" with a mask of every pair of positions, "flex" (FlexAttention,
            CUDA only) which skips what no block looks at, or "auto", flex wherever it can be had.
    """

    anchors_per_row: int = field(default=32, metadata={"help": "blocks trained per row"})
    loss: str = field(default="dart", metadata={"help": f"one of {', '.join(PRESETS)}"})
    divergence: str | None = field(default=None, metadata={"help": "ce, kl, tv or lk"})
    position_weights: str | None = field(default=None, metadata={"help": "uniform, exponential or dpace"})
    gamma: float | None = field(
        default=None, metadata={"help": "exponential weights: that of a draft token relative to the one before"}
    )
    dpace_alpha: float | None = field(default=None, metadata={"help": "smoothing of the dpace weights"})
    lk_eta: float | None = field(default=None, metadata={"help": "how fast lk leaves KL for total variation"})
    token_weight: float | None = field(default=None, metadata={"help": "of the weighted divergence"})
    focal_weight: float | None = field(default=None, metadata={"help": "of the cross-entropy at the first error"})
    chain_weight: float | None = field(default=None, metadata={"help": "of the chain loss"})
    chain_form: str | None = field(default=None, metadata={"help": "linear or log"})
    selector_only: bool = field(default=False, metadata={"help": "train the bigram selector of a frozen head"})
    selector_candidates: int = field(default=32, metadata={"help": "tokens per depth that it learns to rank"})
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "evaluations in a row without a better tau before training stops"}
    )
    decode_prompts: int = field(default=0, metadata={"help": "prompts to decode at every evaluation"})
    decode_prompt_tokens: int = field(default=32, metadata={"help": "tokens of each"})
    decode_new_tokens: int = field(default=64, metadata={"help": "tokens written after each"})
    loss_chunk: int = field(default=64, metadata={"help": "blocks whose logits are held at a time; 0: all"})
    attention: str = field(default="auto", metadata={"help": "auto, sdpa, or flex (CUDA only)"})
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={"nargs": "?", "const": "true", "help": "go on from this checkpoint; alone: the newest of the run"},
    )
    metric_for_best_model: str | None = field(
        default=None, metadata={"help": "tau, tau_sampled, tau_decoded, loss, ...; default: tau with early stopping"}
    )
    # The rows hold what the target needs, not what the head's forward is called with.
    remove_unused_columns: bool = field(default=False, metadata={"help": "leave at False"})

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            self.use_cpu = True  # else bf16 would be asked of a GPU
        if self.early_stopping_patience is not None:
            if self.metric_for_best_model is None:
                self.metric_for_best_model = "tau"
            self.load_best_model_at_end = True
        sharded = str(self.__dict__["fsdp"]).lower()
        if sharded in ("true", "false"):  # in a recipe it is a word
            self.__dict__["fsdp"] = sharded == "true"
        super().__post_init__()
        for name, least in (
            ("anchors_per_row", 1),
            ("decode_prompts", 0),
            ("decode_prompt_tokens", 1),
            ("decode_new_tokens", 1),
            ("early_stopping_patience", 1),
            ("gradient_accumulation_steps", 1),
            ("loss_chunk", 0),
            ("selector_candidates", 2),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; give {least} or more.")
        for name in _OF_NO_USE:
            if getattr(self, name):
                raise ValueError(f"{name} has no effect on how drafters are trained; leave it out.")
        if self.loss not in PRESETS:
            raise ValueError(f"loss is {self.loss!r}; give one of {', '.join(PRESETS)}.")
        objective = self.objective  # says what is out of range
        if self.selector_only and objective != replace(PRESETS["dart"], gamma=objective.gamma):
            raise ValueError("selector_only trains by annealed KL; leave loss at 'dart' and change gamma only.")
        if self.attention not in ("auto", "sdpa", "flex"):
            raise ValueError(f"attention is {self.attention!r}; give 'auto', 'sdpa' or 'flex'.")
        if self.attention == "flex" and self.device.type != "cuda":
            raise ValueError(f"attention='flex' has no backward pass on {self.device.type}; give 'sdpa' or 'auto'.")
        if self.remove_unused_columns:
            raise ValueError("remove_unused_columns drops the tokens that the target reads; leave it False.")

    def metric_names(self, draft_length: int) -> set[str]:
        """The metrics of evaluations of drafts of that length, for `metric_for_best_model`."""
        return {"loss", *DraftQuality.names(draft_length), *(["tau_decoded"] if self.decode_prompts else [])}

    @property
    def objective(self) -> Objective:
        """The preset with the fields that were given."""
        given = {one.name: getattr(self, one.name) for one in fields(Objective)}
        return replace(PRESETS[self.loss], **{name: value for name, value in given.items() if value is not None})
