"""`hf-dart audit`: drafted against stock for any pair, prompt by prompt, beside stock against stock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from hf_dart.bench.exact import (
    LOW_PRECISION_ULPS,
    NEAR_TIE,
    Difference,
    Run,
    differences,
    run,
    run_differences,
    verdict,
)
from hf_dart.bench.pair import Pair
from hf_dart.bench.speed import MODES, Settings, pad_left, pad_token
from hf_dart.trees.config import TreeConfig
from hf_dart.view.tables import Verdict, headline

_MODES = ("greedy", "sampled, T=1")


@dataclass(frozen=True)
class Finding:
    """What one prompt showed in one mode.

    Attributes:
        prompt: its number, from 1.
        alone: drafted against stock, the prompt alone.
        batched: drafted against stock, in a padded batch of all prompts.
        control: stock in that batch against stock alone: what a change of shapes does without any drafts.
    """

    mode: str
    prompt: int
    alone: Difference | None
    batched: Difference | None
    control: Difference | None


@dataclass(frozen=True)
class Audit:
    """All findings, and the verdict on every drafted run (the control is no part of it)."""

    findings: list[Finding]
    verdicts: list[Verdict]

    @property
    def passed(self) -> bool:
        """No drafted run differs at more than a near-tie, and each leaves the generator as stock does."""
        return all(one.identical for one in self.verdicts)

    @property
    def generator(self) -> bool:
        """Every run without a difference left the generator as stock leaves it."""
        return all(one.generator or one.near_ties or one.differences for one in self.verdicts)

    @property
    def drafted(self) -> list[Difference]:
        """All first differences of drafted runs."""
        return _present(one for finding in self.findings for one in (finding.alone, finding.batched))

    @property
    def control(self) -> list[Difference]:
        """All first differences of stock's own batched runs."""
        return _present(finding.control for finding in self.findings)


class _SampleWhenGreedy(LogitsProcessor):
    """Makes a greedy run draw each row's tokens with the noise that a sampled run of that row alone has.

    `torch.multinomial(p, 1)` is argmax(p / E), E ~ Exp(1); a sampled batch gives every row other noise, so
    that it says nothing about the same prompts alone.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device)
        self._generator.manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = torch.empty_like(scores[:1]).exponential_(1, generator=self._generator)
        return scores.log_softmax(-1) - noise.log()


def audit(
    pair: Pair,
    prompts: list[list[int]],
    settings: Settings,
    tree_config: TreeConfig | None = None,
    progress: Callable[[str], object] = lambda line: None,
) -> Audit:
    """Run all prompts with and without the head, greedy and sampled, one by one and in one batch.

    Args:
        prompts: token ids, two prompts or more.
        settings: their `new_tokens` and `seed` are used.
        tree_config: replaces the head's own.
    """
    model, seed = pair.model, settings.seed
    drafting = {"assistant": pair.head, **({} if tree_config is None else {"tree_config": tree_config})}
    every = [pad_left([prompt], 0, model.device) for prompt in prompts]
    together = pad_left(prompts, pad_token(pair), model.device)
    verdicts: list[Verdict] = []
    findings = []
    for mode in _MODES:
        progress(mode)
        options = {**MODES[mode], "max_new_tokens": settings.new_tokens}

        def both(inputs: dict[str, Tensor], options: dict[str, Any]) -> tuple[Run, list[Difference | None]]:
            stock, drafted = run(model, inputs, options, seed), run(model, inputs, {**options, **drafting}, seed)
            found = run_differences(model, inputs, options, seed, stock, drafted)
            verdicts.append(verdict(found, stock, drafted))
            return stock, found

        batch, batched = both(together, options)
        if options["do_sample"]:
            coupled = LogitsProcessorList([_SampleWhenGreedy(seed, batch.sequences.device)])
            greedy = {"do_sample": False, "max_new_tokens": settings.new_tokens, "logits_processor": coupled}
            batch = run(model, together, greedy, seed)
        columns = together["input_ids"].shape[1]
        for number, inputs in enumerate(every):
            stock, alone = both(inputs, options)
            text = stock.sequences[:, inputs["input_ids"].shape[1] :]
            in_batch = batch.sequences[number : number + 1, columns : columns + text.shape[1]]
            control = differences(model, inputs, options, seed, text, in_batch)
            findings.append(Finding(mode, number + 1, alone[0], batched[number], control[0]))
    return Audit(findings, verdicts)


def as_table(done: Audit, about: dict[str, Any]) -> str:
    """A Markdown table of all first differences, its headline above and the verdict below."""
    settings = about["settings"]
    size = settings["prompts"]
    lines = [
        headline(about),
        f"{size} prompts ({about['text']}), {settings['new_tokens']} new tokens, seed {settings['seed']}",
        "",
        f"| mode | prompt | drafted | drafted, batch of {size} | control: stock, batch of {size} |",
        "|---|---|---|---|---|",
    ]
    for one in done.findings:
        cells = (_cell(one.alone, "stock"), _cell(one.batched, "stock"), _cell(one.control, "alone"))
        lines.append(f"| {one.mode} | {one.prompt} | {' | '.join(cells)} |")
    rows = sum(one.rows for one in done.verdicts)
    too_far = sum(one.differences for one in done.verdicts)
    lines += [
        "",
        "In a cell: the first generated token that differs from stock's (control: from stock's alone), and how much "
        "better stock's own token was there, in ulp of the top logit.",
        f"drafted: {rows} outputs, {_summary(done.drafted)}, {too_far} of them beyond {_allowed(about['dtype'])}; "
        f"generator left as stock leaves it: {'yes' if done.generator else 'no'}",
        f"control: {len(done.findings)} outputs, {_summary(done.control)}",
        f"audit: {'passed' if done.passed else 'FAILED'}",
    ]
    return "\n".join(lines)


def _allowed(dtype: str) -> str:
    if dtype == "float64":
        return "exact ties"
    return f"a gap of {NEAR_TIE:g}" if dtype == "float32" else f"{LOW_PRECISION_ULPS} ulp"


def as_json(done: Audit, about: dict[str, Any]) -> dict[str, Any]:
    """Everything, ready for `json.dump`."""
    return {
        **about,
        "passed": done.passed,
        "compared": {
            "rows": sum(one.rows for one in done.verdicts),
            "near_ties": sum(one.near_ties for one in done.verdicts),
            "differences": sum(one.differences for one in done.verdicts),
            "generator": done.generator,
        },
        "findings": [
            {
                "mode": one.mode,
                "prompt": one.prompt,
                "drafted": _entry(one.alone),
                "drafted_batch": _entry(one.batched),
                "control": _entry(one.control),
            }
            for one in done.findings
        ],
    }


def _present(found: Any) -> list[Difference]:
    return [one for one in found if one is not None]


def _ulps(one: Difference, gap: float) -> float | None:
    return gap / one.ulp if isfinite(gap) else None


def _cell(one: Difference | None, like: str) -> str:
    if one is None:
        return f"as {like}"
    ulps = _ulps(one, one.gap)
    gap = "impossible" if ulps is None else f"{ulps:.3g} ulp"
    return f"token {one.position + 1}: {gap}{'' if one.near_tie else ' (no near-tie)'}"


def _summary(found: list[Difference]) -> str:
    ulps = [ulps for one in found if (ulps := _ulps(one, one.gap)) is not None]
    return f"{len(found)} with a first difference{f' (largest {max(ulps):.3g} ulp)' if ulps else ''}"


def _entry(one: Difference | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {
        "token": one.position + 1,
        "near_tie": one.near_tie,
        "gap": one.gap if isfinite(one.gap) else None,
        "gap_ulp": _ulps(one, one.gap),
        "top2_ulp": _ulps(one, one.top2),
        "ulp": one.ulp,
    }
