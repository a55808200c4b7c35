"""Ways to make a draft tree of one head, side by side: what each brings in τ and costs in time and bytes."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from hf_dart.bench.exact import Verdict
from hf_dart.bench.report import headline
from hf_dart.bench.rivals import STOCK
from hf_dart.configuration import TreeConfig
from hf_dart.pair import Pair


def ways(pair: Pair, nodes: int) -> dict[str, TreeConfig]:
    """What is compared, by name; ways that need an n-gram table or a selector are left out where there is none.

    Args:
        pair: the head's `ngram`, `selector` and `editor` count.
        nodes: size of all trees but chains and the head's own.
    """
    head = pair.head
    marginal = TreeConfig(nodes=nodes, lookup=0, selector=False, ngram_weight=0)
    found = {
        "chain": replace(TreeConfig.chain(head.draft_length), selector=False, ngram_weight=0),
        "marginal tree": marginal,
        "marginal tree, noise not shared": replace(marginal, shared_noise=False),
    }
    if head.ngram is not None:
        weight = head.tree_config.ngram_weight
        found["+ n-gram (paper)"] = replace(TreeConfig.paper(), nodes=nodes)
        found["+ n-gram (paper), noise shared"] = replace(TreeConfig.paper(), nodes=nodes, shared_noise=True)
        found["+ n-gram (calibrated)"] = replace(marginal, ngram_weight=weight)
    if getattr(head, "selector", None) is not None:
        found["+ selector"] = replace(marginal, selector=True)
        if head.ngram is not None:
            found["+ selector + n-gram (calibrated)"] = replace(marginal, selector=True, ngram_weight=weight)
    best = list(found)[-1]
    found[f"{best.removeprefix('marginal tree')} + copies".strip()] = replace(found[best], lookup=TreeConfig.lookup)
    if head.refines:
        for before in ("marginal tree", "+ selector"):
            if before in found:
                name = before.removeprefix("marginal tree")
                for passes in (1, 2, 3):
                    found[f"{name} + edit x{passes}".strip()] = replace(found[before], refine=passes)
    found["the head's own"] = head.tree_config
    found["the head's own, calibrated"] = replace(head.tree_config, calibrate=True)
    return found


def describe(pair: Pair, drafts: dict[str, TreeConfig]) -> dict[str, Any]:
    """The trees of each way and the bytes that it needs beside the head's other weights."""
    described = {}
    for name, tree in drafts.items():
        size = pair.head.ngram.nbytes if pair.head.ngram is not None and tree.ngram_weight else 0
        selector = getattr(pair.head, "selector", None)
        if selector is not None and tree.selector:
            size += sum(weight.nbytes for weight in selector.parameters())
        editor = getattr(pair.head, "editor", None)
        if editor is not None and tree.refine:
            size += sum(weight.nbytes for weight in editor.parameters())
        described[name] = {"tree": asdict(tree), "bytes": size}
    return described


def as_table(report: dict[str, Any]) -> str:
    """A Markdown table per batch size of what `report.as_json` gives, `describe` being under "drafts"."""
    settings, results = report["settings"], report["results"]
    modes = list(dict.fromkeys(one["mode"] for one in results))
    lines = [
        headline(report),
        f"{settings['prompts']} prompts of up to {settings['prompt_tokens']} tokens from {report['text']}, "
        f"{settings['new_tokens']} new tokens; median of {settings['repeats']} interleaved repeats",
    ]
    for batch in settings["batches"]:
        columns = [f"{what}, {mode}" for mode in modes for what in ("τ", "x stock", "ms draft / grow / verify")]
        lines += [
            "",
            f"| batch {batch} | {' | '.join(columns)} | MB | identical |",
            "|---" * (len(columns) + 3) + "|",
        ]
        for name, about in report["drafts"].items():
            rows = [one for one in results if one["batch"] == batch and one["method"] == name]
            cells = []
            for one in rows:
                spent = one.get("round_ms", {})
                cells += [
                    f"{one['tau']:.2f}" if "tau" in one else "",
                    f"{one['ratio']['median']:.2f}",
                    " / ".join(f"{spent[phase]:.1f}" for phase in ("draft", "grow", "verify") if phase in spent),
                ]
            verdict = sum((Verdict(**one["compared"]) for one in rows), Verdict())
            lines.append(f"| {name} | {' | '.join(cells)} | {about['bytes'] / 1e6:.1f} | {verdict} |")
    repeated = {one["mode"]: one["repeated_4grams"] for one in results if one["method"] == STOCK}
    lines += [
        "",
        "MB: what a way needs beside the head. Repeated 4-grams in stock's text: "
        + ", ".join(f"{mode} {share:.0%}" for mode, share in repeated.items())
        + ".",
    ]
    return "\n".join(lines)
