"""`hf-dart audit`: drafted against stock for any pair, prompt by prompt, with stock against stock as the control."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import isfinite
from typing import Any

import torch

from hf_dart.bench.exact import LOW_PRECISION_ULPS, NEAR_TIE, Difference, differences
from hf_dart.bench.pair import Pair
from hf_dart.bench.speed import MODES, Settings, measure
from hf_dart.hub.tables import OURS, STOCK, Verdict, headline, markdown
from hf_dart.models.attention import TreeAttention
from hf_dart.models.quantised import rounding_of

_GREEDY = "greedy"
_MODES = (_GREEDY, "sampled, T=1")


def audit(pair: Pair, prompts: list[list[int]], settings: Settings, quiet: bool = True) -> dict[str, Any]:
    """Run two or more prompts with and without the head, greedy and sampled, one by one and in one padded batch of all.

    Returned for JSON are settings: as they were used; passed: whether no drafted run differs at more than a near-tie
    and each leaves the generator as stock does; compared: the fields of the `Verdict` on all drafted runs; attention:
    the target's, and what verifies its trees; rounding: the dtype that near-ties are judged by; findings: by mode and
    prompt the first difference (None without one) of `drafted`, the prompt alone, of `drafted_batch`, and of greedy
    text of `control`, stock in the batch against stock alone: what a change of shapes does without any drafts.
    (Sampled in a batch, a row is drawn with other noise than alone.)
    """
    settings = replace(settings, prompts=len(prompts), repeats=1, batches=(1, len(prompts)))
    modes = {mode: MODES[mode] for mode in _MODES}
    measured = measure(pair, prompts, settings, {OURS: {"assistant": pair.head}}, modes, quiet)
    found = {(one.mode, one.batch, one.method): one for one in measured}
    findings = []
    for mode in _MODES:
        ((batch,),) = found[mode, len(prompts), STOCK].runs
        alone, together = (found[mode, size, OURS].differences for size in settings.batches)
        for row, stock in enumerate(found[mode, 1, STOCK].runs[0]):
            parted = {"drafted": alone[row], "drafted_batch": together[row]}
            if mode == _GREEDY:
                in_batch = batch.generated[row : row + 1, : stock.generated.shape[1]]
                text = torch.cat([stock.inputs["input_ids"], in_batch], dim=1)
                ((parted["control"],),) = differences(stock, replace(stock, sequences=text))
            entries = {name: _entry(one) for name, one in parted.items()}
            findings.append({"mode": mode, "prompt": row + 1, **entries})
    attention = TreeAttention(pair.model)
    verdict = sum((one.verdict for one in measured), Verdict())
    return {
        "settings": asdict(settings),
        "passed": verdict.identical,
        "compared": asdict(verdict),
        "rounding": str(rounding_of(pair.model)).removeprefix("torch."),
        "attention": {"own": attention.own, "trees": attention.name},
        "findings": findings,
    }


def as_table(report: dict[str, Any]) -> str:
    """Return the findings of `audit` in Markdown: the circumstances, all first differences, and the verdict below."""
    settings, compared, size = report["settings"], report["compared"], report["settings"]["prompts"]
    likes = {"drafted": "stock", "drafted_batch": "stock", "control": "alone"}
    found = {column: [one[column] for one in report["findings"] if column in one] for column in likes}
    rows = [
        [
            one["mode"],
            str(one["prompt"]),
            *(_cell(one[column], like) if column in one else "" for column, like in likes.items()),
        ]
        for one in report["findings"]
    ]
    names = ["mode", "prompt", "drafted", f"drafted, batch of {size}", f"control: stock, batch of {size}"]
    allowed = {"float64": "exact ties", "float32": f"a gap of {NEAR_TIE:g}"}
    about = f"{size} prompts ({report['text']}), {settings['new_tokens']} new tokens, seed {settings['seed']}"
    lines = [headline(report), about]
    own, trees = report["attention"]["own"], report["attention"]["trees"]
    if own != trees:
        lines.append(f"{own} takes no tree mask, so {trees} verifies trees: roundings of the two kernels differ, too")
    if report["rounding"] != report["dtype"]:
        lines.append(f"quantised modules round like {report['rounding']} in {report['dtype']}: ulp are those")
    lines += [
        "",
        *markdown(names, rows),
        "",
        "In a cell: the first generated token that differs from stock's (control: from stock's alone), and how much "
        "better stock's own token was there, in ulp of the top logit.",
        f"drafted: {compared['rows']} outputs, {_summary(found['drafted'] + found['drafted_batch'])}, "
        f"{compared['differences']} of them beyond {allowed.get(report['rounding'], f'{LOW_PRECISION_ULPS} ulp')}; "
        f"generator left as stock leaves it: {'yes' if compared['generator'] else 'no'}",
        f"control: {len(found['control'])} outputs, {_summary(found['control'])}",
        f"audit: {'passed' if report['passed'] else 'FAILED'}",
    ]
    return "\n".join(lines)


def _entry(one: Difference | None) -> dict[str, Any] | None:
    """Return a difference for JSON, which has no infinite numbers: the gap of an end at another place is None."""
    if one is None:
        return None
    gap = one.gap if isfinite(one.gap) else None
    ulps = None if gap is None else gap / one.ulp
    return {"token": one.position + 1, "near_tie": one.near_tie, "gap": gap, "gap_ulp": ulps, "ulp": one.ulp}


def _cell(one: dict[str, Any] | None, like: str) -> str:
    if one is None:
        return f"as {like}"
    gap = "impossible" if one["gap_ulp"] is None else f"{one['gap_ulp']:.3g} ulp"
    return f"token {one['token']}: {gap}{'' if one['near_tie'] else ' (no near-tie)'}"


def _summary(found: list[dict[str, Any] | None]) -> str:
    present = [one for one in found if one is not None]
    ulps = [one["gap_ulp"] for one in present if one["gap_ulp"] is not None]
    return f"{len(present)} with a first difference{f' (largest {max(ulps):.3g} ulp)' if ulps else ''}"
