"""Drafts in long texts: acceptance, time per token and peak memory over lengths, with and without a `draft_window`.

    python examples/experiments/lengths.py --lengths 1k,2k,4k,8k --windows 512 --json lengths.json
    python examples/experiments/lengths.py --target google/gemma-3-270m --head examples/gemma3_270m/head

Prompts of each length are cut from the texts (pytest's source by default), one after the other. All methods take turns
in one run; a token's time is processor time, of one thread unless --threads says otherwise, after the first one, and
memory is what a call holds beyond what was held before it. Heads draft trees of 12 nodes in every round. An EAGLE-3
head of random weights shows what drafts of a published kind cost.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from time import process_time
from typing import Any

from peak_memory import peak_bytes, reset_peak
from transformers import DynamicCache

from hf_dart import EagleDrafter, LookupDrafter
from hf_dart.bench import report, speed, suites
from hf_dart.bench.exact import Run, compare, run
from hf_dart.bench.pair import load_head
from hf_dart.cli.common import (
    check_file,
    json_option,
    load,
    pair_options,
    positive,
    say,
    show,
    sizes,
    text_option,
    write_json,
)
from hf_dart.errors import UserError, read_text
from hf_dart.hub.loading import PACKAGED
from hf_dart.hub.tables import STOCK, headline, markdown
from hf_dart.models.stock_steps import CACHE

MODE = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0}
_NAMES = ["prompt", "method", "τ", "ms/token", "x stock", "draft ms/round", "peak MiB", "same text"]


def drafters(pair: Any, head: str | None, windows: Sequence[int]) -> dict[str, Any]:
    """The drafters that are measured, by their names; heads with one of the windows, or none."""
    found: dict[str, Any] = {"copies": LookupDrafter()}
    for window in (None, *windows):
        heads = {"EAGLE-3 of random weights": EagleDrafter.from_target(pair.model)}
        if pair.head.draft_length:
            heads = {"head": load_head(head or PACKAGED, pair.model, pair.tokenizer), **heads}
        for name, drafter in heads.items():
            drafter.draft_window, drafter.tree_config = window, replace(drafter.tree_config, nodes=12)
            found[name if window is None else f"{name}, window {window}"] = drafter
    return found


def cut(tokenizer: Any, files: list[Path], count: int, length: int) -> list[list[int]]:
    """`count` prompts of `length` tokens, from places evenly spaced in files that are read one after the other."""
    ids = tokenizer("".join(map(read_text, files)), add_special_tokens=False, verbose=False)["input_ids"]
    step = len(ids) // count
    if length > step:
        raise UserError(f"The text has {len(ids)} tokens, too few for {count} prompts of {length}; ask for fewer.")
    return [ids[start : start + length] for start in range(0, step * count, step)]


class Clock:
    """Streamer that notes when the prompt, each token and the end came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:
        self.times.append(process_time())

    def end(self) -> None:
        self.times.append(process_time())

    def per_token(self, tokens: int) -> float:
        """Seconds for each of so many tokens but the first."""
        return (self.times[-1] - self.times[1]) / (tokens - 1)


def measured(pair: Any, methods: dict[str, dict[str, Any]], prompts: list[list[int]], given: Any) -> list[dict]:
    """What each method took for these prompts, of one length."""
    device, pad = pair.model.device, speed.pad_token(pair)
    inputs = [speed.pad_left([prompt], pad, device) for prompt in prompts]
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    runs: dict[str, list[Run]] = {name: [] for name in methods}
    peaks = dict.fromkeys(methods, 0)
    for repeat in range(given.repeats):
        for name in speed.in_turn([*methods], repeat):
            taken = []
            for one in inputs:
                options = {**MODE, **methods[name], "max_new_tokens": given.new_tokens}
                if CACHE in options:
                    options[CACHE] = DynamicCache(config=pair.model.config)
                with suppress(AttributeError, OSError):
                    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls have freed does not count
                reset_peak(device)
                before, clock = peak_bytes(device), Clock()
                done = run(pair.model, one, {**options, "streamer": clock})
                peaks[name] = max(peaks[name], peak_bytes(device) - before)
                taken.append(clock.per_token(done.generated.shape[1]))
                runs[name].append(done)
            seconds[name].append(mean(taken))
    found = []
    for name, own in runs.items():
        stats = [one.stats for one in own if one.stats is not None]
        ratios = [stock / ours for stock, ours in zip(seconds[STOCK], seconds[name], strict=True)]
        one = {"prompt": len(prompts[0]), "method": name, "ms_per_token": 1000 * median(seconds[name])}
        one |= {"ratio": report.spread(ratios), "peak_bytes": peaks[name]}
        one["identical"] = all(compare(*both).identical for both in zip(runs[STOCK], own, strict=True))
        if stats:
            rounds = sum(one.rounds for one in stats)
            one["tau"] = mean(one.tau for one in stats)
            one["draft_ms"] = 1000 * sum(one.processor_seconds["draft"] for one in stats) / rounds
        found.append(one)
    return found


def table(results: list[dict]) -> str:
    """One row per length and method."""
    rows = [
        [
            str(one["prompt"]), one["method"], f"{one['tau']:.2f}" if "tau" in one else "",
            f"{one['ms_per_token']:.1f}", f"{one['ratio']['median']:.2f}",
            f"{one['draft_ms']:.2f}" if "draft_ms" in one else "", f"{one['peak_bytes'] / 2**20:.0f}",
            "yes" if one["identical"] else "no",
        ]
        for one in results
    ]  # fmt: skip
    return "\n".join(markdown(_NAMES, rows))


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[pair_options()]
    )
    text_option(parser)
    parser.add_argument("--lengths", type=sizes, default=sizes("1k,2k,4k"), help="of prompts (default: 1k,2k,4k)")
    parser.add_argument("--windows", type=sizes, default=(512,), help="draft_window of heads (default: 512)")
    parser.add_argument("--prompts", type=positive, default=2, help="of each length (default: %(default)s)")
    parser.add_argument("--new-tokens", type=positive, default=64, help="default: %(default)s")
    parser.add_argument("--repeats", type=positive, default=2, help="default: %(default)s")
    json_option(parser)
    parser.set_defaults(threads=1)
    given = parser.parse_args(words)
    check_file(given.json)
    pair = load(given)
    text, files = suites.texts(given.text)
    methods: dict[str, dict[str, Any]] = {STOCK: {}, f"{STOCK}, cache passed in": {CACHE: None}}
    for name, drafter in drafters(pair, given.head, given.windows).items():
        methods[name] = {"assistant": drafter}
    methods["copies, cache passed in"] = {"assistant": LookupDrafter(), CACHE: None}
    settings = speed.Settings(given.prompts, max(given.lengths), given.new_tokens, given.repeats, (1,))
    content = report.circumstances(pair, settings, text, ["python", "examples/experiments/lengths.py", *words])
    content["results"] = []
    measured(pair, methods, cut(pair.tokenizer, files, 1, 32), given)  # warms up
    for length in given.lengths:
        prompts = cut(pair.tokenizer, files, given.prompts, length)
        say(f"prompts of {length} tokens")
        content["results"] += measured(pair, methods, prompts, given)
        content["markdown"] = "\n".join([headline(content), "", table(content["results"])])
        write_json(given.json, content)
    show(content["markdown"])
    return 0 if all(one["identical"] for one in content["results"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
