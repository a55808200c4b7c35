"""Texts of the cards of this package's drafters, for `register(..., card=...)`."""

from __future__ import annotations

from hf_dart.hub.kinds import CardTexts


def _bibtex(key: str, title: str, year: int, number: str) -> str:
    """Return an entry of arXiv in BibTeX."""
    return f"""```bibtex
@misc{{{key},
  title = {{{title}}},
  year = {{{year}}},
  eprint = {{{number}}},
  archivePrefix = {{arXiv}},
  url = {{https://arxiv.org/abs/{number}}}
}}
```"""


DART = CardTexts(
    "a DART head",
    "head",
    "dart",
    "A [DART](https://arxiv.org/abs/2601.19278) draft head",
    _bibtex(
        "dart2026",
        "DART: Diffusion-Inspired Speculative Decoding for Fast LLM Inference",
        2026,
        "2601.19278",
    ),
)
EAGLE = CardTexts(
    "an EAGLE head",
    "head",
    "eagle",
    "An autoregressive draft head ([EAGLE-3](https://arxiv.org/abs/2503.01840))",
    _bibtex(
        "eagle2025",
        "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
        2025,
        "2503.01840",
    ),
)
DIFFUSION = CardTexts(
    "a diffusion drafter",
    "drafter",
    "masked-diffusion",
    "A masked diffusion language model that drafts ([SpecDiff](https://arxiv.org/abs/2408.05636))",
    _bibtex(
        "specdiff2024",
        "Speculative Diffusion Decoding: Accelerating Language Generation through Diffusion",
        2024,
        "2408.05636",
    ),
)
DFLASH = CardTexts(
    "a DFlash drafter",
    "drafter",
    "dflash",
    "A [DFlash](https://arxiv.org/abs/2602.06036) drafter, or a variant of it,",
    _bibtex("dflash2026", "DFlash: Block Diffusion for Flash Speculative Decoding", 2026, "2602.06036"),
)
