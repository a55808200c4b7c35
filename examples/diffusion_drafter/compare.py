"""Drafters of one target side by side, in one interleaved run; the diffusion drafters over T and draft lengths.

    python examples/diffusion_drafter/compare.py runs --json model_cards/diffusion_drafter/compare.json

`runs` holds what `run_all.py` trained; what is missing is left out. Rows are: stock; the language model through
stock's `assistant_model=`, by stock's rule and with drafts of fixed lengths; DART heads; diffusion drafters. Copied
text is left out (`lookup=0`), so that each stands for itself. Standard errors are jackknifed over prompts. The tables
also go into the README.md beside the JSON, between its two marker lines; `--render` writes them again from the JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_dart import DartHead, DiffusionDrafter, TreeConfig
from hf_dart.bench.exact import run
from hf_dart.bench.speed import MODES, pad_left
from hf_dart.bench.suites import cut_prompts, texts
from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET
from hf_dart.hub.machine import circumstances

BEGIN, END = "<!-- tables: begin. Written by compare.py from compare.json. -->", "<!-- tables: end -->"
# Folder, name in the tables, reverse steps and length of its chains.
DIFFUSION = (
    ("bound", "diffusion, bound", ((1, 2), (2, 2), (1, 4), (2, 4), (4, 4), (1, 8), (2, 8), (4, 8), (8, 8))),
    ("left_to_right", "diffusion, left to right", ((1, 4), (1, 8), (4, 8))),
    ("features", "diffusion on features", ((1, 4), (4, 4), (1, 8), (8, 8))),
)


@dataclass(frozen=True)
class Call:
    """One prompt: seconds, of which `drafting`; tokens written; forwards of the target, its prefill left out."""

    seconds: float
    drafting: float
    tokens: int
    rounds: int
    same: bool  # as stock's


@dataclass
class Method:
    """One way to decode: whose drafts, options of `generate`, what tells the seconds of the drafts, and the calls.

    `prefills` is what stock's assisted loop does not do: it reads the prompt together with the first draft.
    """

    name: str
    drafter: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    drafting: Callable[[], float] = lambda: 0.0
    prefills: bool = True
    calls: list[Call] = field(default_factory=list)


class TimedLM:
    """A language model for `assistant_model=` that says how long its drafts of a call took."""

    def __init__(self, path: Path, **rule: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model.generation_config.update(**rule)
        self._plain, self._seconds = self.model.generate, 0.0
        self.model.generate = self._timed

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        try:
            return self._plain(*args, **kwargs)
        finally:
            self._seconds += perf_counter() - start

    def seconds(self) -> float:
        """Since it was last asked."""
        spent, self._seconds = self._seconds, 0.0
        return spent


def language_models(path: Path, lengths: list[int]) -> list[Method]:
    """Stock's speculative decoding: by its own rule for the length of a draft, and with so many tokens each."""
    fixed = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    rules = [("stock's rule", {}), *((f"{n} tokens", {"num_assistant_tokens": n, **fixed}) for n in lengths)]
    methods = []
    for name, rule in rules:
        lm = TimedLM(path, **rule)
        given = {"assistant_model": lm.model}
        methods.append(Method(f"language model, {name}", "language model", given, lm.seconds, prefills=False))
    return methods


def drafted(name: str, how: str, drafter: Any, tree: TreeConfig) -> Method:
    def seconds() -> float:
        last = drafter.last_stats
        return 0.0 if last is None else last.seconds["draft"] + last.seconds["grow"]

    return Method(f"{name}, {how}", name, {"assistant": drafter, "tree_config": tree}, seconds)


def heads(name: str, path: Path, target: Any, tokenizer: Any) -> list[Method]:
    head = DartHead.from_pretrained(str(path), target=target, tokenizer=tokenizer)
    tree = replace(head.tree_config, lookup=0)
    return [drafted(name, "4 tokens", head, TreeConfig.chain(4)), drafted(name, "tree", copy.copy(head), tree)]


def diffusion(
    name: str, path: Path, target: Any, tokenizer: Any, cells: tuple[tuple[int, int], ...]
) -> list[Method]:
    """A tree in one reverse step, and chains by steps and length."""
    drafter = DiffusionDrafter.from_pretrained(str(path), target=target, tokenizer=tokenizer)
    methods = [drafted(name, "tree, T=1", drafter, replace(drafter.tree_config, lookup=0))]
    for steps, length in cells:
        one = copy.copy(drafter)  # shares the weights
        one.denoise_steps = steps
        methods.append(drafted(name, f"{length} tokens, T={steps}", one, TreeConfig.chain(length)))
    return methods


def methods_in(runs: Path, target: Any, tokenizer: Any, lengths: list[int]) -> list[Method]:
    """Of all that was trained there."""
    found = [Method("stock")]
    if (runs / "lm" / "final").is_dir():
        found += language_models(runs / "lm" / "final", lengths)
    found += heads("DART head, packaged", PACKAGED_HEAD, target, tokenizer)
    if (runs / "dart" / "final").is_dir():
        found += heads("DART head, same rows", runs / "dart" / "final", target, tokenizer)
    for kind, name, cells in DIFFUSION:
        if (runs / kind / "final").is_dir():
            found += diffusion(name, runs / kind / "final", target, tokenizer, cells)
    return found


def call(target: Any, prompt: list[int], options: dict[str, Any], method: Method, counted: list[int]) -> Any:
    """One prompt by one method: what it was, and its text."""
    method.drafting()
    counted.clear()
    done = run(target, pad_left([prompt], 0, target.device), {**options, **method.options})
    tokens = done.sequences.shape[1] - len(prompt)
    return Call(done.seconds, method.drafting(), tokens, len(counted) - method.prefills, False), done.sequences


# ---- figures ------------------------------------------------------------------------------------------------


def jackknife(statistic: Callable[[list[int]], float], count: int) -> tuple[float, float]:
    """A statistic of prompts 0..count-1 and its standard error, from leaving each of them out."""
    everything = list(range(count))
    left = [statistic(everything[:one] + everything[one + 1 :]) for one in everything] if count > 1 else []
    mean = sum(left) / max(len(left), 1)
    return statistic(everything), math.sqrt((count - 1) / count * sum((one - mean) ** 2 for one in left))


def figures(method: Method, stock: Method, prompts: int) -> dict[str, Any]:
    """A method's row; every prompt's repeats are taken together."""

    def total(one: Method, name: str, chosen: list[int]) -> float:
        return sum(getattr(done, name) for prompt in chosen for done in one.calls[prompt::prompts])

    def tau(chosen: list[int]) -> float:  # the prefill's own token is not a round's
        first = len(chosen) * len(method.calls) // prompts if method.prefills else 0
        return (total(method, "tokens", chosen) - first) / total(method, "rounds", chosen)

    def ratio(chosen: list[int]) -> float:
        ours, theirs = (total(one, "seconds", chosen) / total(one, "tokens", chosen) for one in (method, stock))
        return theirs / ours

    everything = list(range(prompts))
    rounds = total(method, "rounds", everything)
    return {
        "method": method.name,
        "tau": jackknife(tau, prompts),
        "ratio": jackknife(ratio, prompts),
        "draft_ms": 1000 * total(method, "drafting", everything) / rounds,
        "round_ms": 1000 * total(method, "seconds", everything) / rounds,
        "same": sum(done.same for done in method.calls) / len(method.calls),
    }


def tables(report: dict[str, Any]) -> str:
    """All modes of a report, as Markdown."""
    settings = report["settings"]
    lines = [
        f"{report['hardware']}, {settings['threads']} thread{'s' * (settings['threads'] != 1)}, float32; "
        + ", ".join(f"{name} {number}" for name, number in report["versions"].items())
        + f"; `{report['command']}`.",
        f"{settings['prompts']} prompts of up to 96 tokens from pytest's source, {settings['new_tokens']} new tokens, "
        f"{settings['repeats']} repeats, batch 1; ± is one standard error over prompts.",
        "",
        "Parameters: " + ", ".join(f"{name} {count / 1e6:.2f} M" for name, count in report["parameters"].items()) + ".",
    ]
    columns = ["method", "τ", "ms a draft", "ms a round", "x stock", "same text"]
    for result in report["results"]:
        lines += ["", f"### {result['mode']}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        best = max(one["ratio"][0] for one in result["methods"])
        for one in result["methods"]:
            (tau, tau_error), (ratio, ratio_error) = one["tau"], one["ratio"]
            plain = one["method"] == "stock"
            shown = f"**{ratio:.2f}**" if ratio == best else f"{ratio:.2f}"
            cells = [
                one["method"],
                f"{tau:.2f}" if plain else f"{tau:.2f} ± {tau_error:.2f}",
                "" if plain else f"{one['draft_ms']:.2f}",
                f"{one['round_ms']:.2f}",
                "1" if plain else f"{shown} ± {ratio_error:.2f}",
                "" if plain else f"{one['same']:.0%}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_tables(report: dict[str, Any], card: Path) -> None:
    """Put the tables of a report between the marker lines of a card, which is made if there is none."""
    text = card.read_text(encoding="utf8") if card.is_file() else f"# Diffusion drafters\n\n{BEGIN}\n{END}\n"
    above, _, rest = text.partition(BEGIN)
    card.write_text(f"{above}{BEGIN}\n\n{tables(report)}\n\n{END}{rest.partition(END)[2]}", encoding="utf8")


# ---- the run ------------------------------------------------------------------------------------------------


def compare(runs: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """The report of a run; `settings` are those of `options`."""
    logging.set_verbosity_error()
    torch.set_num_threads(settings.threads)
    tokenizer = AutoTokenizer.from_pretrained(settings.target)
    target = AutoModelForCausalLM.from_pretrained(settings.target, dtype=torch.float32)
    prompts = cut_prompts(tokenizer, texts()[1], settings.prompts, 96)
    counted: list[int] = []
    target.register_forward_pre_hook(lambda *_: counted.append(1))
    methods = methods_in(runs, target, tokenizer, settings.lm_lengths)
    results = []
    for mode in settings.modes:
        for method in methods:  # what is only done once
            call(target, prompts[0], {**MODES[mode], "max_new_tokens": 8}, method, counted)
            method.calls = []
        options = {**MODES[mode], "max_new_tokens": settings.new_tokens}
        for repeat in range(settings.repeats):
            for number, prompt in enumerate(prompts):
                first = (repeat + number) % len(methods)
                done = {}
                for method in methods[first:] + methods[:first]:
                    done[method.name] = call(target, prompt, options, method, counted)
                for method in methods:
                    one, text = done[method.name]
                    method.calls.append(replace(one, same=torch.equal(text, done["stock"][1])))
        results.append({"mode": mode, "methods": [figures(one, methods[0], len(prompts)) for one in methods]})
        print(f"{mode}: done", file=sys.stderr, flush=True)
    names = ("prompts", "new_tokens", "repeats", "threads", "modes", "lm_lengths")
    return {
        **circumstances(["python", *sys.argv], target.device),
        "settings": {name: getattr(settings, name) for name in names},
        "parameters": parameters(methods),
        "results": results,
    }


def parameters(methods: list[Method]) -> dict[str, int]:
    """Of each drafter, those that are its own: the target's embeddings are not counted."""
    counts = {}
    for method in methods:
        if method.drafter is not None:
            lm = method.options.get("assistant_model")
            lent = 0 if lm is None else lm.get_input_embeddings().weight.numel()
            counts[method.drafter] = (lm or method.options["assistant"]).num_parameters() - lent
    return counts


def options() -> argparse.ArgumentParser:
    """A parent parser of what is measured."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES)[1:])
    parser.add_argument("--lm-lengths", type=int, nargs="+", default=[1, 2, 3, 4], help="of the LM's drafts")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("model_cards/diffusion_drafter/compare.json"))
    return parser


def write(report: dict[str, Any], file: Path) -> None:
    """The JSON, and the tables into the README.md beside it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf8")
    write_tables(report, file.parent / "README.md")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[options()]
    )
    parser.add_argument("runs", type=Path, help="output folder of run_all.py")
    parser.add_argument("--target", default=str(PACKAGED_TARGET))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--render", action="store_true", help="only write the tables again from the JSON")
    arguments = parser.parse_args()
    if arguments.render:
        write_tables(json.loads(arguments.json.read_text(encoding="utf8")), arguments.json.parent / "README.md")
        return
    report = compare(arguments.runs, arguments)
    write(report, arguments.json)
    print(tables(report))


if __name__ == "__main__":
    main()
