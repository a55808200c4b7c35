"""Texts of the cards of this package's drafters, for `register(..., card=...)`."""

from __future__ import annotations

from transformers import PreTrainedConfig

from hf_dart.hub.kinds import CardTexts, bibtex, describe_features, describe_layers


def _dart_rows(config: PreTrainedConfig) -> dict[str, str]:
    """Rows of the table of a card, from a config."""
    copied = "" if config.copied_layer is None else f"; copies of the target's from layer {config.copied_layer} on"
    injected = ", also as keys and values of every layer" if config.inject_features else ""
    mask = f", mask slots as P-EAGLE's, token {config.mask_token_id}" if config.mask_mode == "peagle" else ""
    own = "" if config.shift_logits else ", each in a mask slot of its own"
    attention = f"{config.block_attention} attention among them"
    return {
        "layers": describe_layers(config, config.num_layers) + copied,
        "reads": describe_features(config) + injected,
        "drafts": f"{config.draft_length} tokens in one pass, {attention}{mask}{own}",
        "vocabulary": f"the {config.draft_vocab_size} tokens it was given" if config.draft_vocab_size else "",
        "selector": f"{config.selector_kind}, rank {config.selector_rank}" if config.selector_rank else "",
    }


DART = CardTexts(
    "a DART head",
    "head",
    "dart",
    "A [DART](https://arxiv.org/abs/2601.19278) draft head",
    _dart_rows,
    bibtex(
        "dart2026",
        "DART: Diffusion-Inspired Speculative Decoding for Fast LLM Inference",
        2026,
        "2601.19278",
    ),
)


def _eagle_rows(config: PreTrainedConfig) -> dict[str, str]:
    """Rows of the table of a card, from a config."""
    beam = "" if config.beam == 1 else f", the {config.beam} best of each depth drafted on from"
    return {
        "layers": describe_layers(config, config.num_layers),
        "reads": describe_features(config),
        "drafts": f"{config.draft_length} tokens, one pass each{beam}",
        "vocabulary": f"{config.draft_vocab_size} of the target's tokens" if config.draft_vocab_size else "",
    }


EAGLE = CardTexts(
    "an EAGLE head",
    "head",
    "eagle",
    "An autoregressive draft head ([EAGLE-3](https://arxiv.org/abs/2503.01840))",
    _eagle_rows,
    bibtex(
        "eagle2025",
        "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
        2025,
        "2503.01840",
    ),
)


def _diffusion_rows(config: PreTrainedConfig) -> dict[str, str]:
    """Rows of the table of a card, from a config."""
    steps = "one reverse step" if config.denoise_steps == 1 else f"{config.denoise_steps} reverse steps"
    order = {"confidence": "the likeliest tokens first", "left_to_right": "left to right"}[config.unmasking]
    text = f"the last {config.context_window} tokens"
    return {
        "layers": describe_layers(config, config.num_layers),
        "reads": f"{text}, and {describe_features(config)}" if config.feature_layers else text,
        "drafts": f"{config.draft_length} tokens in {steps}, {order}",
    }


DIFFUSION = CardTexts(
    "a diffusion drafter",
    "drafter",
    "masked-diffusion",
    "A masked diffusion language model that drafts ([SpecDiff](https://arxiv.org/abs/2408.05636))",
    _diffusion_rows,
    bibtex(
        "specdiff2024",
        "Speculative Diffusion Decoding: Accelerating Language Generation through Diffusion",
        2024,
        "2408.05636",
    ),
)


def _dflash_rows(config: PreTrainedConfig) -> dict[str, str]:
    """Rows of the table of a card, from a config."""
    layers = config.published.get("transformer_layer_config", config.published).get("num_hidden_layers", 1)
    return {
        "format": config.described,
        "layers": describe_layers(config, layers),
        "reads": describe_features(config),
        "drafts": f"{config.draft_length} tokens in one pass",
    }


DFLASH = CardTexts(
    "a DFlash drafter",
    "drafter",
    "dflash",
    "A [DFlash](https://arxiv.org/abs/2602.06036) drafter, or a variant of it,",
    _dflash_rows,
    bibtex("dflash2026", "DFlash: Block Diffusion for Flash Speculative Decoding", 2026, "2602.06036"),
)
