"""The kinds of drafters that go to the Hub, and what is said of each on its card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_dart.drafters.dart.configuration import DartConfig
from hf_dart.drafters.diffusion.configuration import DiffusionConfig
from hf_dart.drafters.eagle.configuration import EagleConfig

Config = DartConfig | DiffusionConfig
Rows = dict[str, str]  # of the card's table; empty ones are left out


@dataclass(frozen=True)
class Kind:
    """One kind of drafter.

    Attributes:
        config_class: its config.
        class_name: of the drafter, in `hf_dart`.
        trained_as: what `hf-dart train --drafter` calls it.
        called: what it is called, with its article.
        short: what it is called in code, and where nothing else is meant.
        tag: of the card's front matter.
        introduced: as `called`, with a link to the paper.
        rows: what its config says, in words.
        source: the paper in BibTeX.
    """

    config_class: type[Config]
    class_name: str
    trained_as: str
    called: str
    short: str
    tag: str
    introduced: str
    rows: Callable[[Any], Rows]
    source: str


def kind_of(config: Config) -> Kind:
    """The kind of a drafter, by its config."""
    return KINDS[config.model_type]


def _layers(config: Config, number: int) -> str:
    layers = "one decoder layer" if number == 1 else f"{number} decoder layers"
    return (
        f"{layers}: hidden {config.hidden_size}, {config.num_attention_heads} query and "
        f"{config.num_key_value_heads} key-value heads of {config.head_dim}, MLP {config.intermediate_size}"
    )


def _reads(config: Config) -> str:
    return f"layers {', '.join(map(str, config.feature_layers))} of the target's {config.target_num_layers}"


def _dart(config: DartConfig) -> Rows:
    copied = "" if config.copied_layer is None else f"; copies of the target's from layer {config.copied_layer} on"
    injected = ", also as keys and values of every layer" if config.inject_features else ""
    mask = f", mask slots as P-EAGLE's, token {config.mask_token_id}" if config.mask_mode == "peagle" else ""
    own = "" if config.shift_logits else ", each in a mask slot of its own"
    attention = f"{config.block_attention} attention among them"
    return {
        "layers": _layers(config, config.num_layers) + copied,
        "reads": _reads(config) + injected,
        "drafts": f"{config.draft_length} tokens in one pass, {attention}{mask}{own}",
        "vocabulary": f"the {config.draft_vocab_size} tokens it was given" if config.draft_vocab_size else "",
        "selector": f"{config.selector_kind}, rank {config.selector_rank}" if config.selector_rank else "",
    }


def _diffusion(config: DiffusionConfig) -> Rows:
    steps = "one reverse step" if config.denoise_steps == 1 else f"{config.denoise_steps} reverse steps"
    order = {"confidence": "the likeliest tokens first", "left_to_right": "left to right"}[config.unmasking]
    text = f"the last {config.context_window} tokens"
    return {
        "layers": _layers(config, config.num_layers),
        "reads": f"{text}, and {_reads(config)}" if config.feature_layers else text,
        "drafts": f"{config.draft_length} tokens in {steps}, {order}",
    }


def _eagle(config: EagleConfig) -> Rows:
    beam = "" if config.beam == 1 else f", the {config.beam} best of each depth drafted on from"
    return {
        "layers": _layers(config, 1),
        "reads": _reads(config),
        "drafts": f"{config.draft_length} tokens, one pass each{beam}",
    }


def _bibtex(key: str, title: str, year: int, number: str) -> str:
    return f"""```bibtex
@misc{{{key},
  title = {{{title}}},
  year = {{{year}}},
  eprint = {{{number}}},
  archivePrefix = {{arXiv}},
  url = {{https://arxiv.org/abs/{number}}}
}}
```"""


KINDS: dict[str, Kind] = {
    kind.config_class.model_type: kind
    for kind in (
        Kind(
            DartConfig,
            "DartHead",
            "dart",
            "a DART head",
            "head",
            "dart",
            "A [DART](https://arxiv.org/abs/2601.19278) draft head",
            _dart,
            _bibtex(
                "dart2026",
                "DART: Diffusion-Inspired Speculative Decoding for Fast LLM Inference",
                2026,
                "2601.19278",
            ),
        ),
        Kind(
            DiffusionConfig,
            "DiffusionDrafter",
            "diffusion",
            "a diffusion drafter",
            "drafter",
            "masked-diffusion",
            "A masked diffusion language model that drafts ([SpecDiff](https://arxiv.org/abs/2408.05636))",
            _diffusion,
            _bibtex(
                "specdiff2024",
                "Speculative Diffusion Decoding: Accelerating Language Generation through Diffusion",
                2024,
                "2408.05636",
            ),
        ),
        Kind(
            EagleConfig,
            "EagleDrafter",
            "eagle",
            "an EAGLE head",
            "head",
            "eagle",
            "An autoregressive draft head ([EAGLE-3](https://arxiv.org/abs/2503.01840))",
            _eagle,
            _bibtex(
                "eagle2025",
                "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
                2025,
                "2503.01840",
            ),
        ),
    )
}
"""By the `model_type` of their config."""
