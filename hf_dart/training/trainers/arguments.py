"""The options of a training run, of which `HfArgumentParser` makes flags: trainer's, and `hf-dart train`'s own."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from transformers import TrainingArguments

from hf_dart.drafters.adapters import LAYERS
from hf_dart.errors import check_fields
from hf_dart.training.objective.objective import PRESETS, Objective
from hf_dart.training.options import option

_WITHOUT_USE = (
    "activation_checkpointing", "batch_eval_metrics", "debug", "gradient_checkpointing", "include_for_metrics",
    "label_smoothing_factor", "neftune_noise_alpha", "remove_unused_columns", "use_liger_kernel",
    "bf16_full_eval", "fp16_full_eval",  # which round the drafter for good
)  # fmt: skip


@dataclass
class TargetArguments:
    """The target of a run: its weights stay as they are, in any form that transformers runs."""

    target: str | None = option(None, "a folder or a Hub id; default: the packaged target")
    target_revision: str | None = option(None, "branch, tag or commit on the Hub")
    tokenizer: str | None = option(None, "default: the target's")
    dtype: str | None = option(None, "dtype of the target's weights; default: float32 for packaged ones, else as saved")
    device_map: str | None = option(None, "auto spreads the target over devices; default: whole on each process's own")
    quantization: str | None = option(None, 'fields of a quantization config as JSON, such as {"load_in_4bit": true}')
    attn_implementation: str | None = option(None, "attention of the target, as for from_pretrained")


@dataclass
class DrafterArguments:
    """A new drafter, shaped by the fields of its config, or one to train on."""

    drafter: str = option("dart", "kind, edit for a head with edit passes; --help lists the options of that kind")
    head: str | None = option(None, "continue to train this head: a folder or a Hub id")
    draft_length: int | None = option(None, "d, tokens guessed at a time")
    feature_layers: list[int] | None = option(None, "hidden_states of the target to read")
    num_layers: int | None = option(None, "decoder layers of the drafter")
    intermediate_size: int | None = option(None, "default: as the target")
    target_name: str | None = option(None, "kept in the config; default: the target's name")
    tree: str | None = option(None, "fields of the drafter's TreeConfig, as JSON")

    def config(self) -> dict[str, Any]:
        """Return the fields of the config that were given."""
        given = _given(self, [one.name for one in fields(self) if one.name not in ("drafter", "head")])
        if self.tree is not None:
            given["tree"] = json_object("tree", self.tree, '{"nodes": 16}')
        return given


def _given(arguments: Any, names: list[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def json_object(name: str, text: str, example: str) -> dict[str, Any]:
    """Return the JSON object that an option was given."""
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {text!r}; give a JSON object such as {example}.") from error


@dataclass
class HeadArguments(DrafterArguments):
    """Options of a new [`DartHead`], in addition to those of every drafter."""

    block_attention: Literal["causal", "bidirectional"] | None = option(None, "how mask slots attend to each other")
    shift_logits: bool | None = option(None, "false: every drafted token has a mask slot of its own, the first one too")
    mask_mode: Literal["learned", "peagle"] | None = option(None, "what a mask slot holds")
    mask_token_id: int | None = option(None, "with peagle; default: an unused token")
    draft_vocab_size: int | None = option(None, "draft only so many tokens, the most frequent of the training rows")
    selector_rank: int | None = option(None, "give the head a bigram selector this wide")
    selector_kind: Literal["bigram", "markov"] | None = option(
        None, "whether its scores depend on the context; default: bigram, which do"
    )


@dataclass
class LoraArguments:
    """Options of LoRA on a head, for `HfArgumentParser`; `apply_lora` puts it there."""

    lora_rank: int | None = option(None, "train LoRA of this rank; default: all weights")
    lora_alpha: float | None = option(None, "its scale times the rank; default: 2 rank")
    lora_targets: list[str] | None = option(None, f"modules that it is put on; default: {' '.join(LAYERS)}, and fc")
    lora_dropout: float = option(0.0, "of what goes into LoRA")
    copy_layer: str | None = option(
        None, "a new head's layers are frozen copies of the target's from this one on, or its 'last'"
    )


@dataclass
class DrafterTrainingArguments(TrainingArguments):
    """`TrainingArguments` and those of every [`DrafterTrainer`]."""

    anchors_per_row: int = option(32, "K, blocks trained per row")
    loss: str = option("dart", f"one of {', '.join(PRESETS)}; the options after it change one part of it")
    divergence: str | None = option(None, "ce, kl, tv or lk")
    ce_share: float | None = option(None, "share of the cross-entropy in the divergence")
    position_weights: str | None = option(None, "uniform, exponential or dpace")
    gamma: float | None = option(None, "exponential weights: that of a draft token relative to the one before")
    dpace_alpha: float | None = option(None, "smoothing of the dpace weights")
    lk_eta: float | None = option(None, "how fast lk leaves KL for total variation")
    token_weight: float | None = option(None, "weight of the token divergence")
    focal_weight: float | None = option(None, "weight of the first-error focal loss")
    chain_weight: float | None = option(None, "weight of the chain loss")
    chain_form: str | None = option(None, "linear or log")
    early_stopping_patience: int | None = option(
        None,
        "evaluations in a row without a better tau before it stops, and keeps the best head, so that save_steps become "
        "a multiple of eval_steps; 0: never",
    )
    decode_prompts: int = option(
        0, "prompts to decode at every evaluation: beginnings of its first rows, or what comes before a first reply"
    )
    decode_prompt_tokens: int = option(32, "tokens of each decoded prompt")
    muon_learning_rate: float | None = option(
        None, "train matrices by Muon at this rate, such as 1e-2; other weights learn by optim at learning_rate"
    )
    loss_chunk: int = option(64, "blocks whose logits are held at a time; 0: all")
    resume_from_checkpoint: str | None = option(
        None, "go on from this checkpoint; alone: the newest of the run", nargs="?", const="true"
    )
    metric_for_best_model: str | None = option(None, "tau (default with early stopping), tau_sampled, loss, ...")
    # In transformers a word or a boolean, of which the command line would take the boolean alone.
    include_num_input_tokens_seen: Literal["non_padding", "all", "no"] = option(
        "non_padding", "log how many tokens were read"
    )
    # The rows hold what the target needs, not what the drafter's forward is called with.
    remove_unused_columns: bool = option(False, "leave at False")

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            self.use_cpu = True  # otherwise bf16 would require a GPU
        for name in _WITHOUT_USE:
            if getattr(self, name, None):  # not all releases know all of them
                raise ValueError(f"Drafters are trained without {name}; leave it out.")
        self.early_stopping_patience = self.early_stopping_patience or None
        if self.early_stopping_patience is not None:
            if self.eval_strategy == "no":
                raise ValueError("early_stopping_patience counts evaluations; give eval_strategy and what it asks for.")
            self.metric_for_best_model = self.metric_for_best_model or "tau"
            self.load_best_model_at_end = True
            known, every = self.__dict__, self.eval_steps or self.logging_steps
            if self.eval_strategy == self.save_strategy == "steps" and min(every, known["save_steps"]) >= 1:
                known["save_steps"] = every * math.ceil(known["save_steps"] / every)  # the best head is a saved one
        sharded = str(self.__dict__["fsdp"]).lower()
        if sharded in ("true", "false"):  # in a recipe it is a word
            self.__dict__["fsdp"] = sharded == "true"
        super().__post_init__()
        ones = ("anchors_per_row", "decode_prompt_tokens", "early_stopping_patience", "gradient_accumulation_steps")
        zeros = ("decode_prompts", "learning_rate", "loss_chunk", "muon_learning_rate", "weight_decay")
        least = {**dict.fromkeys(ones, 1), **dict.fromkeys(zeros, 0)}
        check_fields(self, least=least, choices={"loss": list(PRESETS)})
        _ = self.objective  # raises if a field is out of range

    @property
    def objective(self) -> Objective:
        """The preset with the fields that were given."""
        return replace(PRESETS[self.loss], **_given(self, [one.name for one in fields(Objective)]))


@dataclass
class DartTrainingArguments(DrafterTrainingArguments):
    """`DrafterTrainingArguments` and those of a [`DartHead`] alone."""

    selector_only: bool = option(False, "train the bigram selector of a frozen head, by annealed KL")
    selector_noise: float = option(
        0.5, "share of the blocks in which it learns to rank with the noise that the target draws its tokens with"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, shares=("selector_noise",))
        if self.selector_only and self.objective != replace(PRESETS["dart"], gamma=self.objective.gamma):
            raise ValueError("selector_only trains by annealed KL; leave loss at 'dart' and change gamma only.")
