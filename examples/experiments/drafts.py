"""Ways to make a draft tree of one head, side by side: what each brings in τ and costs in time and bytes.

    python examples/experiments/drafts.py --ngram corpus.ngram --profile --json drafts.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hf_dart.bench import profiling, report, speed, suites
from hf_dart.bench.pair import load_head
from hf_dart.bench.profiling import Profile
from hf_dart.cli.common import (
    check_file,
    given,
    json_option,
    load,
    pair_options,
    positive,
    set_threads,
    show,
    sizes,
    text_option,
    write_json,
)
from hf_dart.hub.tables import STOCK, Verdict, headline, markdown
from hf_dart.trees.config import TreeConfig


@dataclass(frozen=True)
class DraftMethod:
    """One row of the table: a drafter and how its drafts become trees."""

    drafter: Any
    tree: TreeConfig

    @property
    def options(self) -> dict[str, Any]:
        """For `generate`."""
        return {"assistant": self.drafter, "tree_config": self.tree}

    def describe(self) -> dict[str, Any]:
        """Its tree, and the bytes that it needs beside a head's other weights."""
        size = self.drafter.ngram.nbytes if self.drafter.ngram is not None and self.tree.ngram_weight else 0
        for part, used in (("selector", self.tree.selector), ("editor", self.tree.refine)):
            module = getattr(self.drafter, part, None)
            if module is not None and used:
                size += sum(weight.nbytes for weight in module.parameters())
        return {"tree": asdict(self.tree), "bytes": size}


def draft_methods(head: Any, nodes: int, costs: Profile | None = None) -> dict[str, DraftMethod]:
    """What is compared, by name; ways that need an n-gram table, a selector or an editor only where there is one.

    Args:
        head: its `ngram`, `selector` and `editor` count.
        nodes: size of all trees but chains, those sized by cost and the head's own.
        costs: those that sizes follow; None for those of the head's own tree.
    """
    marginal = TreeConfig(nodes=nodes, lookup=0, selector=False, ngram_weight=0)
    found = {
        "chain": replace(TreeConfig.chain(head.draft_length), selector=False, ngram_weight=0),
        "marginal tree": marginal,
        "marginal tree, noise not shared": replace(marginal, shared_noise=False),
    }
    refined = {"": marginal}
    best = "marginal tree"
    weight = head.tree_config.ngram_weight
    if head.ngram is not None:
        found["+ n-gram (paper)"] = replace(TreeConfig.paper(), nodes=nodes)
        found["+ n-gram (paper), noise shared"] = replace(TreeConfig.paper(), nodes=nodes, shared_noise=True)
        best = "+ n-gram (survival)"
        found[best] = replace(marginal, ngram_weight=weight)
    if getattr(head, "selector", None) is not None:
        best = selector = "+ Markov selector" if head.config.selector_kind == "markov" else "+ selector"
        refined[selector] = found[selector] = replace(marginal, selector=True)
        if head.ngram is not None:
            best = f"{selector} + n-gram (survival)"
            found[best] = replace(marginal, selector=True, ngram_weight=weight)
    if head.refines:
        for name, tree in refined.items():
            for passes in (1, 2, 3):
                found[f"{name} + edit x{passes}".strip()] = replace(tree, refine=passes)
    own = head.tree_config
    settings = {"node_cost": own.node_cost, "verify_costs": own.verify_costs, "draft_cost": own.draft_cost}
    by_cost = {"nodes": None, **(settings if costs is None else costs.tree)}
    stack = best.removeprefix("marginal tree")
    found[f"{best}, size by cost"] = replace(found[best], **by_cost)
    found[f"{stack} + copies".strip()] = replace(found[best], lookup=TreeConfig.lookup)
    found[f"{stack} + copies, size by cost".strip()] = replace(found[best], lookup=TreeConfig.lookup, **by_cost)
    found["the head's own"] = own
    return {name: DraftMethod(head, tree) for name, tree in found.items()}


def of_others(heads: Mapping[str, Any], nodes: int) -> dict[str, DraftMethod]:
    """What other heads of the same target bring by their own selectors and editors, beside their marginal trees."""
    return {
        f"{title}: {name}": way
        for title, head in heads.items()
        for name, way in draft_methods(head, nodes).items()
        if name == "marginal tree" or " x" in name or name in ("+ selector", "+ Markov selector")
    }


def as_table(report: dict[str, Any]) -> str:
    """A Markdown table per batch size of a report with `results`, `describe` being under "drafts"."""
    settings, results = report["settings"], report["results"]
    modes = list(dict.fromkeys(one["mode"] for one in results))
    lines = [
        headline(report),
        f"{settings['prompts']} prompts of up to {settings['prompt_tokens']} tokens from {report['text']}, "
        f"{settings['new_tokens']} new tokens; median of {settings['repeats']} interleaved repeats",
    ]
    for batch in settings["batches"]:
        rows = []
        for name, about in report["drafts"].items():
            here = [one for one in results if one["batch"] == batch and one["method"] == name]
            cells = [name]
            for one in here:
                spent = one.get("round_ms", {})
                cells += [
                    f"{one['tau']:.2f}" if "tau" in one else "",
                    f"{one['ratio']['median']:.2f}",
                    " / ".join(f"{spent[phase]:.1f}" for phase in ("draft", "grow", "verify") if phase in spent),
                ]
            verdict = sum((Verdict(**one["compared"]) for one in here), Verdict())
            rows.append([*cells, f"{about['bytes'] / 1e6:.1f}", str(verdict)])
        columns = [f"{what}, {mode}" for mode in modes for what in ("τ", "x stock", "ms draft / grow / verify")]
        lines += ["", *markdown([f"batch {batch}", *columns, "MB", "identical"], rows)]
    repeated = {one["mode"]: one["repeated_4grams"] for one in results if one["method"] == STOCK}
    lines += [
        "",
        "MB: what a way needs beside the head. Repeated 4-grams in stock's text: "
        + ", ".join(f"{mode} {share:.0%}" for mode, share in repeated.items())
        + ".",
    ]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print a table per batch size, and return 1 if a text was not stock's."""
    parser = argparse.ArgumentParser(
        description=__doc__, parents=[pair_options()], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=positive, default=60, help="of all trees, root included (default: %(default)s)")
    text_option(parser)
    parser.add_argument("--prompts", type=positive, default=8, help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=positive, default=96, help="of the longest (default: %(default)s)")
    parser.add_argument("--new-tokens", type=positive, default=96, help="per prompt (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=1, help="default: %(default)s")
    parser.add_argument(
        "--batch", dest="batches", type=sizes, default=(1,), metavar="SIZES", help="such as 1,4 (default: 1)"
    )
    parser.add_argument(
        "--others", nargs="+", default=(), metavar="HEAD", help="other heads of the target: their selectors and editors"
    )
    parser.add_argument("--modes", nargs="+", default=("greedy", "sampled, T=1"), choices=speed.MODES, metavar="MODE")
    parser.add_argument("--profile", action="store_true", help="measure costs first, for the trees sized by them")
    json_option(parser)
    arguments = parser.parse_args(words)
    check_file(arguments.json)
    set_threads(arguments.threads)
    names = ("prompts", "prompt_tokens", "new_tokens", "repeats", "batches")
    settings = speed.Settings(**given(arguments, names))
    text, files = suites.texts(arguments.text)
    pair = load(arguments)
    others = {Path(path).name: load_head(path, pair.model, pair.tokenizer) for path in arguments.others}
    prompts = suites.cut_prompts(pair.tokenizer, files, settings.prompts, settings.prompt_tokens)
    costs = profiling.measure(pair, quiet=False) if arguments.profile else None
    ways = draft_methods(pair.head, arguments.nodes, costs) | of_others(others, arguments.nodes)
    methods = {name: way.options for name, way in ways.items()}
    modes = {mode: speed.MODES[mode] for mode in arguments.modes}
    measurements = speed.measure(pair, prompts, settings, methods, modes, quiet=False)
    content = {
        **report.circumstances(pair, settings, text, ["python", *(sys.argv if words is None else words)]),
        "drafts": {name: way.describe() for name, way in ways.items()},
        **({} if costs is None else {"costs": costs._asdict()}),
        "results": report.results(measurements),
    }
    show(as_table(content))
    write_json(arguments.json, content)
    return 0 if all(one.verdict.identical for one in measurements) else 1


if __name__ == "__main__":
    sys.exit(main())
