"""Rounds of a target of a real shape: stock `generate`, called rounds and compiled ones, over trees of several sizes.

    python examples/experiments/rounds.py --shape qwen3-8b --json rounds.json
    python examples/experiments/rounds.py --shape qwen3-0.6b --device cpu --json rounds.json

Weights are random, and the head is right as often as it is told to be (`simulated.py`), so that nothing is downloaded.
All methods take turns in one run: read ratios. The run ends in the time that it is given, leaves out what there is no
time for, and writes its JSON whole after every method and every repeat.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from simulated import SHAPES, SimulatedHead, build_target, forward_bytes
from torch import Tensor
from transformers import StaticCache

import hf_dart
from hf_dart.bench.exact import run, timed
from hf_dart.bench.speed import in_turn
from hf_dart.cli.common import check_file, json_option, positive, say, set_threads, show, sizes, write_json
from hf_dart.hub.machine import circumstances
from hf_dart.hub.tables import STOCK, markdown
from hf_dart.models.stock_steps import CACHE

STATIC, CALLED, COMPILED = "stock, static cache", "called rounds", "compiled rounds"
_COLUMNS = ["", "nodes", "τ", "tokens/s", "ms/round", "x stock", "x one node", "of memory speed", "launches", "same"]
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
_COUNTED = 10  # tokens whose launches are counted
_COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes, for the speed of memory


@dataclass
class Method:
    """One way to generate, and what came of it.

    Attributes:
        name: STOCK, STATIC, CALLED or COMPILED.
        nodes: of its trees; None for stock's.
        options: of `generate`.
        engine: that its rounds run in.
        seconds_to_ready: of the first call, in which all is made that later ones find.
        seconds, prefill: of each call, and of the same call for one token.
        rounds, tau: forwards of the target after the prefill, and tokens per row that each brought.
        phase_ms: milliseconds per round of each phase; on a GPU, a phase ends when its work is launched.
        launches: of kernels and graphs per round; None without a GPU.
        same: whether the tokens were stock's.
    """

    name: str
    nodes: int | None
    options: dict[str, Any]
    engine: Any = None
    seconds_to_ready: float = 0.0
    seconds: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    rounds: int = 0
    tau: float = 1.0
    phase_ms: dict[str, float] = field(default_factory=dict)
    launches: float | None = None
    same: bool = True


class Bench:
    """One run: the models, the methods and the report.

    Args:
        words: the arguments of the command line.
        keep: is handed the report whenever something was added to it.
    """

    def __init__(self, words: argparse.Namespace, keep: Callable[[dict[str, Any]], object]) -> None:
        self._words, self._keep, self._end = words, keep, perf_counter() + words.seconds
        self._device = torch.device(words.device)
        say(f"building {words.shape} in {words.dtype} on {words.device}")
        self._target = build_target(words.shape, getattr(torch, words.dtype), self._device)
        self._head = SimulatedHead.from_target(self._target, draft_length=words.draft_length).aim(words.tau)
        ids = torch.arange(words.batch)[:, None] * 7 + torch.arange(words.prompt_tokens)
        ids = (ids % self._target.config.vocab_size).to(self._device)
        self._inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        self._all, self._measured = self._methods(), list[Method]()
        context = words.prompt_tokens + words.new_tokens // 2
        self.report: dict[str, Any] = {
            "settings": {name: value for name, value in vars(words).items() if name != "json"},
            **circumstances(["python", *sys.argv], self._device),
            "memory_bytes_per_second": memory_speed(self._device),
            "forward_bytes": forward_bytes(self._target, words.batch, context),
        }

    def _methods(self) -> list[Method]:
        words, found = self._words, [Method(STOCK, None, {})]
        if self._device.type == "cuda":  # where transformers compiles a forward over a cache, bound to its addresses
            static = StaticCache(config=self._target.config, max_cache_len=words.prompt_tokens + words.new_tokens)
            found.append(Method(STATIC, None, {CACHE: static}))
        engine = hf_dart.compile(self._target, self._head, progress=say, backend=words.backend)
        for nodes in words.nodes:
            options = {"assistant": self._head, "tree_config": hf_dart.TreeConfig(nodes=nodes, lookup=0)}
            found += [Method(CALLED, nodes, options), Method(COMPILED, nodes, options, engine)]
        return found

    def run(self) -> dict[str, Any]:
        """Measure all that there is time for; the report."""
        self._stock = self._call(self._all[0], self._words.new_tokens).sequences
        for one in self._all:
            if perf_counter() < self._end:
                say(f"warming up: {_named(one)}")
                one.seconds_to_ready, _ = timed(self._device, partial(self._call, one, self._words.new_tokens))
                self._time(one)
                self._measured.append(one)
                self._tell()
        for repeat in range(1, self._words.repeats):
            for one in in_turn(self._measured, repeat) if self._measured else ():
                if perf_counter() + one.seconds[-1] + one.prefill[-1] < self._end:
                    self._time(one)
            self._tell()
        for one in self._measured if self._device.type == "cuda" else ():
            if perf_counter() < self._end:
                one.launches = self._count(one)
        return self._tell()

    def _call(self, one: Method, tokens: int) -> Any:
        if CACHE in one.options:
            one.options[CACHE].reset()
        self._head.engine = one.engine
        sampled = {"do_sample": True, "top_k": 0} if self._words.sample else {"do_sample": False}
        return run(self._target, self._inputs, {**sampled, **one.options, "max_new_tokens": tokens})

    def _time(self, one: Method) -> None:
        one.prefill.append(self._call(one, 1).seconds)
        done = self._call(one, self._words.new_tokens)
        one.seconds.append(done.seconds)
        one.same = one.same and torch.equal(done.sequences, self._stock)  # the target is sure, sampled or not
        one.rounds = self._words.new_tokens - 1
        if (stats := done.stats) is not None:
            one.rounds, one.tau = stats.rounds, stats.tau
            phases = {name: spent for name, spent in stats.seconds.items() if name != "prefill"}
            one.phase_ms = {name: 1000 * spent / stats.rounds for name, spent in phases.items()}

    def _count(self, one: Method) -> float:
        """Launches per round, by two calls of which one has more rounds."""
        found = []
        for tokens in (2, 2 + _COUNTED):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as traced:
                stats = self._call(one, tokens).stats
            launches = sum(event.name in _LAUNCHES for event in traced.events())
            found.append((tokens - 1 if stats is None else stats.rounds, launches))
        (fewer, less), (rounds, more) = found
        return (more - less) / max(rounds - fewer, 1)

    def _tell(self) -> dict[str, Any]:
        self.report["results"] = [self._result(one) for one in self._measured]
        self.report["left_out"] = [_named(one) for one in self._all if one not in self._measured]
        self.report["markdown"] = as_table(self.report)
        self._keep(self.report)
        return self.report

    def _result(self, one: Method) -> dict[str, Any]:
        tokens, known = self._words.new_tokens - 1, {"options", "engine"}
        spent = max(median(one.seconds) - median(one.prefill), 1e-9)
        speed = self._words.batch * tokens / spent
        bound = self.report["memory_bytes_per_second"] / self.report["forward_bytes"]
        return {
            **{name: value for name, value in vars(one).items() if name not in known},
            "tokens_per_second": speed,
            "round_ms": 1000 * spent / one.rounds,
            "of_memory_speed": one.rounds / spent / bound,
        }


def _named(one: Method) -> str:
    return one.name + (f", {one.nodes} nodes" if one.nodes else "")


def memory_speed(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes, or a sum reads, whichever are more; the best of several.

    Of random numbers: zeros would be read and written with less power, and faster.
    """
    source = torch.rand(_COPIED[device.type] // 4, device=device)
    copied = torch.empty_like(source)
    ways: list[tuple[int, Callable[[], Tensor]]] = [(2, lambda: copied.copy_(source)), (1, source.sum)]
    return max(times * source.nbytes / max(timed(device, way)[0], 1e-9) for times, way in 5 * ways)


def as_table(report: dict[str, Any]) -> str:
    """A Markdown table of the results, what they were measured on above it."""
    settings, results = report["settings"], report["results"]
    stock = next(one["tokens_per_second"] for one in results if one["name"] == STOCK)
    single = {one["name"]: one["round_ms"] for one in results if one["nodes"] == 1}
    rows = [
        [
            one["name"],
            str(one["nodes"] or ""),
            f"{one['tau']:.2f}",
            f"{one['tokens_per_second']:.4g}",
            f"{one['round_ms']:.4g}",
            f"{one['tokens_per_second'] / stock:.2f}",
            f"{one['round_ms'] / single[one['name']]:.2f}" if one["name"] in single else "",
            f"{one['of_memory_speed']:.0%}",
            "" if one["launches"] is None else f"{one['launches']:.1f}",
            "yes" if one["same"] else "NO",
        ]
        for one in results
    ]
    lines = [
        f"{settings['shape']}, random weights, {settings['dtype']}, {report['hardware']}; "
        + ", ".join(f"{name} {number}" for name, number in report["versions"].items())
        + f"; batch {settings['batch']}, {settings['prompt_tokens']} + {settings['new_tokens']} tokens, "
        f"{'sampled' if settings['sample'] else 'greedy'}, backend {settings['backend']}; medians of up to "
        f"{settings['repeats']} interleaved repeats, after the prefill; "
        f"memory {report['memory_bytes_per_second'] / 1e9:.0f} GB/s, a forward reads "
        f"{report['forward_bytes'] / 1e9:.3f} GB.",
        "",
        *markdown(_COLUMNS, rows),
    ]
    if report["left_out"]:
        lines += ["", f"Left out after {settings['seconds']:g} s: {'; '.join(report['left_out'])}."]
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print a table, and return 1 if a method wrote other tokens than stock."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b", help="of the target")
    parser.add_argument("--tau", type=float, default=5.0, help="tokens per round that the head reaches in large trees")
    parser.add_argument("--nodes", type=sizes, default=(1, 16, 64), help="sizes of trees, such as 1,16,64")
    parser.add_argument("--draft-length", type=positive, default=8)
    parser.add_argument("--sample", action="store_true", help="draw tokens at T = 1")
    parser.add_argument("--backend", type=lambda text: None if text == "none" else text, default="inductor")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: float32 on a CPU")
    parser.add_argument("--device", default=device)
    for name, default in {"batch": 1, "prompt-tokens": 128, "new-tokens": 128, "repeats": 3, "seconds": 540}.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's choice)")
    json_option(parser)
    words = parser.parse_args(given)
    if not 1 <= words.tau <= words.draft_length + 1:
        parser.error(f"--tau is {words.tau:g}; give 1 to {words.draft_length + 1}, the draft and the token after it.")
    words.dtype = words.dtype or ("bfloat16" if words.device.startswith("cuda") else "float32")
    check_file(words.json)
    set_threads(words.threads)
    # Stock at its best: cuDNN's attention makes a plan for every length of a text, in every step.
    torch.backends.cuda.enable_cudnn_sdp(False)
    report = Bench(words, lambda report: write_json(words.json, report)).run()
    show(report["markdown"])
    return 0 if all(one["same"] for one in report["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
