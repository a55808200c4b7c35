"""Texts of the cards of this package's drafters, for `register(..., card=...)`."""

from hf_dart.hub.kinds import CardTexts

# fmt: off
DART = CardTexts(
    "a DART head", "head", "dart", "A [DART](https://arxiv.org/abs/2601.19278) draft head",
    ("2601.19278", "DART: Diffusion-Inspired Speculative Decoding for Fast LLM Inference"),
)
EAGLE = CardTexts(
    "an EAGLE head", "head", "eagle", "An autoregressive draft head ([EAGLE-3](https://arxiv.org/abs/2503.01840))",
    ("2503.01840", "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"),
)
DIFFUSION = CardTexts(
    "a diffusion drafter", "drafter", "masked-diffusion",
    "A masked diffusion language model that drafts ([SpecDiff](https://arxiv.org/abs/2408.05636))",
    ("2408.05636", "Speculative Diffusion Decoding: Accelerating Language Generation through Diffusion"),
)
DFLASH = CardTexts(
    "a DFlash drafter", "drafter", "dflash",
    "A [DFlash](https://arxiv.org/abs/2602.06036) drafter, or a variant of it,",
    ("2602.06036", "DFlash: Block Diffusion for Flash Speculative Decoding"),
)
GEMMA4 = CardTexts(
    "an assistant of Gemma 4", "assistant", "gemma4-assistant",
    "An assistant that was published for [Gemma 4](https://ai.google.dev/gemma)",
)
