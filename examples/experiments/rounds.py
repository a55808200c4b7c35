"""What a round costs on a device, beside what it has to: shapes of real targets, random weights.

    python examples/experiments/rounds.py --shape qwen3-0.6b --device cpu --json rounds.json

A run ends in the time that it is given: what costs most is done last, and left out where no time is left. After every
line of the table all that is known so far is handed on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from hf_dart.engine.compiled import compile
from hf_dart.engine.config import EngineConfig
from hf_dart.engine.fixed_round import FixedRound
from simulated import SHAPES, SimulatedHead, build_target, forward_bytes
from torch import Tensor
from transformers import StaticCache
from transformers.utils import logging

from hf_dart.bench import profiling
from hf_dart.bench.exact import run, timed
from hf_dart.bench.pair import Pair, load_pair
from hf_dart.bench.speed import in_turn
from hf_dart.cli.common import check_file, given, json_option, positive, say, set_threads, show, write_json
from hf_dart.engine.graphs import Launch
from hf_dart.engine.tier import Tier
from hf_dart.hub.machine import hardware, versions
from hf_dart.trees.config import TreeConfig
from hf_dart.trees.costs import nodes_worth
from hf_dart.view.tables import markdown

STOCK, STATIC, PLAIN, EAGER, FORWARD, CAPTURED, SAMPLED, NUCLEUS = (
    "stock generate",
    "stock, static cache",
    "captured, N = 1",
    "eager round",
    "captured forward",
    "captured round",
    "captured round, T = 1",
    "captured round, top-p",
)
_COLUMNS = [
    *("method", "τ", "tokens/s", "ms per round", "x stock", "x static", "x N = 1", "roofline"),
    *("launches", "waits", "same"),
]
_ON_CPU: dict[str, Any] = {
    **{"nodes": 16, "prompt_tokens": 64, "new_tokens": 32, "repeats": 2, "backend": None, "dtype": "float32"},
    **{"seconds": 240.0, "every_method": False, "other_taus": ()},
}
_ANYWHERE = (STOCK, EAGER, CAPTURED)  # methods that are measured on a CPU
_SIZES = {"cuda": (1, 16, 64, 128, 256), "cpu": (1, 8, 16, 32, 64)}  # of trees whose rounds cost something
_BATCHES = (1, 8, 64)  # for which trees are sized by it
_WARM_UP = 4  # tokens, where nothing is compiled
_COUNTED = 10  # tokens whose launches are counted
_COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes, for the bandwidth
_TIMED = {"cuda": 20, "cpu": 3}  # calls, for a phase
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@dataclass(frozen=True)
class Settings:
    """What is measured; `on` fills in what suits a device.

    Args:
        shape: of the target, one of `simulated.SHAPES`.
        tau: tokens per round that the head is made to reach.
        other_taus: such that the captured round is measured at, too.
        nodes: of the tree.
        draft_length: of the head.
        batch, prompt_tokens, new_tokens: of each call.
        repeats: how often each method is timed.
        backend: of `torch.compile`; None compiles nothing of ours.
        engine: other fields of `EngineConfig`, by name.
        dtype, device: of target and head.
        seconds: what all of it may take, but for what is under way then.
        every_method: also those that say little on a CPU.
        costs: measure rounds of trees of several sizes, on a CPU those of the packaged pair beside them.

    Raises:
        ValueError: they do not go together.
    """

    shape: str = "qwen3-8b"
    tau: float = 5.0
    other_taus: tuple[float, ...] = (3.0, 7.0)
    nodes: int = 64
    draft_length: int = 8
    batch: int = 1
    prompt_tokens: int = 128
    new_tokens: int = 256
    repeats: int = 3
    backend: str | None = "inductor"
    engine: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    device: str = "cuda"
    seconds: float = 540.0
    every_method: bool = True
    costs: bool = True

    @classmethod
    def on(cls, device: str = "cuda", **given: Any) -> Settings:
        """For a device, with some of them given: on a CPU less, in float32, and nothing is compiled."""
        return cls(device=device, **{**(_ON_CPU if device.startswith("cpu") else {}), **given})

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"--shape is {self.shape!r}; give one of {', '.join(SHAPES)}.")
        longest = min(self.draft_length + 1, self.nodes)
        if not 1 <= self.tau <= longest:
            raise ValueError(f"--tau is {self.tau:g}; give 1 to {longest}, the longest path of the tree.")
        known = {one.name for one in fields(EngineConfig)} - {"backend"}
        if unknown := self.engine.keys() - known:
            raise ValueError(f"--engine names {min(unknown)!r}; give some of {', '.join(sorted(known))}.")
        _ = self.config  # raises what is wrong with their values
        if self.new_tokens < 2:
            raise ValueError(f"--new-tokens is {self.new_tokens}; give 2 or more.")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError("There is no CUDA device; give --device cpu.")

    @property
    def config(self) -> EngineConfig:
        """Of the engine."""
        return EngineConfig(backend=self.backend, **self.engine)


@dataclass
class Measurement:
    """One method.

    Attributes:
        seconds: of each call, and of the same calls for one token, which is their prefill.
        tau_asked: what the head is made to reach; None for methods without one.
        seconds_to_ready: of the first call, in which all is made that later ones find.
        rounds, tau: forwards after the prefill that text came of, and tokens of each row per forward.
        same: were the tokens stock's?
        launches, waits: per round, of kernels or graphs, and of the host for the device; None where it cannot tell.
    """

    method: str
    options: dict[str, Any]
    tau_asked: float | None = None
    seconds_to_ready: float = 0.0
    seconds: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    rounds: int = 0
    tau: float = 1.0
    same: bool = True
    launches: float | None = None
    waits: float | None = None

    def speed(self, tokens: int) -> float:
        """Tokens per second after the prefill, of so many."""
        return tokens / max(median(self.seconds) - median(self.prefill), 1e-9)


class _Left:
    """How much of the time is left."""

    def __init__(self, seconds: float) -> None:
        self._end = perf_counter() + seconds

    def allows(self, seconds: float) -> bool:
        """May something be begun that takes so long?"""
        return perf_counter() + seconds <= self._end


def measure(
    settings: Settings,
    progress: Callable[[str], object] = lambda line: None,
    keep: Callable[[dict[str, Any]], object] = lambda report: None,
) -> dict[str, Any]:
    """Time all methods in turns, then the parts of the captured round; ready for JSON.

    Args:
        progress: is told what is done next.
        keep: is handed the report whenever something was added to it.
    """
    with _without_cudnn_attention():
        return _Bench(settings, progress, keep).run()


@contextmanager
def _without_cudnn_attention() -> Iterator[None]:
    """Stock is measured at its best: cuDNN's attention makes a plan for every length of a text, in every step."""
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)


class _Bench:
    """One run of the benchmark.

    Args: as for `measure`.
    """

    def __init__(
        self, settings: Settings, progress: Callable[[str], object], keep: Callable[[dict[str, Any]], object]
    ) -> None:
        self._settings, self._progress, self._keep = settings, progress, keep
        self._left = _Left(settings.seconds)
        logging.set_verbosity_error()
        self._device = torch.device(settings.device)
        progress(f"building {settings.shape} in {settings.dtype} on {settings.device}")
        target = self._target = build_target(settings.shape, getattr(torch, settings.dtype), self._device)
        head = self._head = SimulatedHead.from_target(target, draft_length=settings.draft_length).aim(settings.tau)
        first = torch.arange(settings.batch)[:, None] * 7 + torch.arange(settings.prompt_tokens)
        self._inputs = {"input_ids": (first % target.config.vocab_size).to(self._device)}
        self._inputs["attention_mask"] = torch.ones_like(self._inputs["input_ids"])
        self._engine = compile(target, head, progress=progress, **asdict(settings.config))
        # One cache for all calls: what transformers compiles for a static cache is bound to its addresses.
        static = StaticCache(config=target.config, max_cache_len=settings.prompt_tokens + settings.new_tokens)
        self._methods = _methods(head, static, settings)
        self._measured: list[Measurement] = []
        self._report: dict[str, Any] = {
            "settings": asdict(settings),
            "engine": asdict(settings.config),
            "versions": versions(),
            "hardware": hardware(self._device),
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        }

    def run(self) -> dict[str, Any]:
        """All that there is time for."""
        settings, tokens = self._settings, self._settings.new_tokens
        self._report["bandwidth_bytes_per_second"] = memory_bandwidth(self._device)
        context = settings.prompt_tokens + tokens // 2
        self._report["forward_bytes"] = forward_bytes(self._target, settings.batch, context)
        if settings.costs and self._device.type == "cpu":  # what a CPU's reader wants to know most
            self._cost()
        self._progress("stock's text")
        first = run(self._target, self._inputs, _greedy(tokens))
        self._expected = first.sequences
        for one in self._methods:
            if not self._left.allows(first.seconds):
                continue
            self._progress(f"warming up: {one.method}")
            begun = perf_counter()
            self._warm_up(one)
            one.seconds_to_ready = perf_counter() - begun
            self._time(one)
            self._measured.append(one)
            self._tell()
        for repeat in range(1, settings.repeats if self._measured else 1):
            self._progress(f"repeat {repeat + 1} of {settings.repeats}")
            for one in in_turn(self._measured, repeat):
                if self._left.allows(one.seconds[-1] + one.prefill[-1]):
                    self._time(one)
            self._tell()
        self._look_inside()
        if settings.costs and self._device.type != "cpu":
            self._cost()
        return self._tell()

    def _tell(self) -> dict[str, Any]:
        self._report["results"] = _results(self._settings, self._measured, self._report)
        self._report["left_out"] = [one.method for one in self._methods if one not in self._measured]
        self._keep(self._report)
        return self._report

    def _warm_up(self, one: Measurement) -> None:
        compiles = self._settings.backend is not None or self._device.type == "cuda"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Of this call the target's forward alone")  # as is meant
            run(self._target, self._inputs, self._options(one, self._settings.new_tokens if compiles else _WARM_UP))

    def _time(self, one: Measurement) -> None:
        one.prefill.append(run(self._target, self._inputs, self._options(one, 1)).seconds)
        done = run(self._target, self._inputs, self._options(one, self._settings.new_tokens))
        one.seconds.append(done.seconds)
        one.same = one.same and torch.equal(done.sequences, self._expected)
        one.rounds, one.tau = self._settings.new_tokens - 1, 1.0
        if done.stats is not None:
            # A round that was on its way when the text ended is none that a longer text would have.
            idle = sum(not any(emitted) for emitted in done.stats.committed)
            one.rounds = done.stats.rounds - idle
            one.tau = done.stats.tokens / (done.stats.row_rounds - idle * self._settings.batch)

    def _options(self, one: Measurement, tokens: int) -> dict[str, Any]:
        """Options of the next call, of so many tokens; its static cache is emptied, and its head made ready."""
        if "past_key_values" in one.options:
            one.options["past_key_values"].reset()
        if one.tau_asked is not None:
            self._head.aim(one.tau_asked)
            self._head.engine = None if one.method == EAGER else self._engine
        return {**_greedy(tokens), **one.options}

    def _cost(self) -> None:
        """Rounds of trees of several sizes; on a CPU with the packaged pair, too, on the same machine.

        On a GPU they are captured, which takes no time to speak of where nothing is compiled.
        """
        on_gpu, context = self._device.type == "cuda", self._settings.prompt_tokens
        wanted: dict[str, Any] = {"rounds": 6, "repeats": 2, "sizes": _SIZES[self._device.type]}
        self._head.engine = None
        if on_gpu:
            compile(self._target, self._head, backend=None)
        pairs = {self._settings.shape: Pair(self._target, self._head.aim(self._settings.tau), None, "", "")}
        for name in (self._settings.shape, *(() if on_gpu else ("packaged pair",))):
            if not self._left.allows(0):
                return
            self._progress(f"costs of rounds: {name}")
            pair = pairs.get(name) or load_pair()
            found = profiling.measure(pair, context=context, progress=self._progress, **wanted)
            config = TreeConfig(verify_costs=found.verify, draft_cost=found.draft)
            worth = {str(batch): nodes_worth(config.round_cost(batch, "cuda", most=64)) for batch in _BATCHES}
            costs = {"draft": found.draft, "verify": {f"{nodes:.0f}": cost for nodes, cost in found.verify}}
            self._report.setdefault("costs", {})[name] = {**costs, "nodes_worth": worth}
            self._keep(self._report)

    def _look_inside(self) -> None:
        """Launches and waits per round, and the captured round by its parts and its kernels."""
        if self._device.type == "cuda":
            for one in self._measured:
                if self._left.allows(0):
                    self._count(one)
        tiers = [tier for tier in self._engine.tiers if tier and tier.shape.depth and not tier.shape.sampled]
        if tiers and self._left.allows(0):
            self._head.engine = self._engine
            self._report["phase_ms"] = phase_ms(tiers[-1])
            self._report["kernels"] = kernels_of(tiers[-1])

    def _count(self, one: Measurement) -> None:
        """Launches and waits per round, by calls of a few tokens more and less."""
        found = []
        for length in (2, 2 + _COUNTED):
            options = self._options(one, length)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as traced:
                self._target.generate(**self._inputs, **options)
            names = [event.name for event in traced.events()]
            stats = None if one.tau_asked is None else self._head.last_stats
            rounds = length - 1 if stats is None else stats.rounds
            found.append([rounds, *(sum(name in wanted for name in names) for wanted in (_LAUNCHES, _WAITS))])
        rounds, launches, waits = (more - less for less, more in zip(*found, strict=True))
        if rounds > 0:
            one.launches, one.waits = launches / rounds, waits / rounds


def _greedy(tokens: int) -> dict[str, Any]:
    return {"do_sample": False, "max_new_tokens": tokens}


def _methods(head: SimulatedHead, static: StaticCache, settings: Settings) -> list[Measurement]:
    drafts = {"assistant": head, "tree_config": TreeConfig(nodes=settings.nodes, lookup=0)}
    plain = {"assistant": head, "tree_config": TreeConfig(nodes=1, lookup=0)}
    sampled = {**drafts, "do_sample": True, "top_k": 0}
    tau = settings.tau
    methods = [
        Measurement(STOCK, {}),
        Measurement(CAPTURED, drafts, tau),
        Measurement(EAGER, drafts, tau),
        Measurement(STATIC, {"past_key_values": static}),  # which transformers compiles on a GPU
        Measurement(PLAIN, plain, tau),
        # The text is the same, since the target is sure of every token.
        Measurement(SAMPLED, sampled, tau),
        Measurement(NUCLEUS, {**sampled, "top_p": 0.95}, tau),
        # No captured round has this processor, which changes nothing here.
        Measurement(FORWARD, {**drafts, "remove_invalid_values": True}, tau),
        *(Measurement(f"{CAPTURED}, τ = {other:g}", drafts, other) for other in settings.other_taus),
    ]
    longest = min(settings.draft_length + 1, settings.nodes)
    methods = [one for one in methods if one.tau_asked is None or one.tau_asked <= longest]
    return [one for one in methods if settings.every_method or one.method in _ANYWHERE]


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    """What a call takes on its device, by the device's own clock if it has one."""
    if device.type != "cuda":
        return timed(device, call)[0]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1000


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes, or a sum reads, whichever are more; the best of several.

    Of random numbers: zeros would be read and written with less power, and faster.
    """
    source = torch.rand(_COPIED[device.type] // 4, dtype=torch.float32, device=device)
    copied = torch.empty_like(source)
    ways: list[tuple[int, Callable[[], Tensor]]] = [(2, lambda: copied.copy_(source)), (1, source.sum)]
    return max(times * source.nbytes / max(_seconds(device, way), 1e-9) for times, way in 5 * ways)


@torch.no_grad()
def phase_ms(tier: Tier) -> dict[str, float]:
    """Milliseconds of the parts of a round, each launched alone as it was compiled, after the text that a tier holds.

    What the tier holds is overwritten.
    """
    this, device = tier.round, tier.state.roots.device
    propose, accept, commit = this.parts()
    with this.verifier.packed():
        tree = propose()
        verdict = list(accept(tree))
    verdict[2] = torch.zeros_like(verdict[2])  # nothing moves on, however often
    steps: dict[str, Callable[[], object]] = {
        "draft + grow": propose,
        "verify + walk": partial(accept, tree),
        "commit": partial(commit, *verdict),
    }
    spent = {name: _ms(Launch(_within(this, step), device), device) for name, step in steps.items()}
    return {**spent, "round": _ms(tier.launch, device)}


def _within(this: FixedRound, step: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        with torch.inference_mode(False), torch.no_grad(), this.verifier.packed():
            step()

    return call


def _ms(launch: Callable[[], None], device: torch.device) -> float:
    calls = _TIMED[device.type]

    def again() -> None:
        for _ in range(calls):
            launch()

    launch()
    return 1000 * _seconds(device, again) / calls


def kernels_of(tier: Tier) -> list[dict[str, Any]]:
    """The kernels of one launch of a round and their milliseconds, the longest first; none where there is no CUDA.

    The tier's rows are taken to have ended: there may be no room for another round, which computes as much.
    """
    if not tier.state.roots.is_cuda:
        return []
    tier.state.ended.fill_(True)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as traced:
        tier.launch()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in traced.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name[:160], []).append(event.device_time_total / 1000)
    kernels = [{"kernel": name, "count": len(times), "ms": sum(times)} for name, times in found.items()]
    return sorted(kernels, key=lambda one: -one["ms"])


def _results(settings: Settings, measured: list[Measurement], report: dict[str, Any]) -> list[dict[str, Any]]:
    tokens = settings.batch * (settings.new_tokens - 1)
    speeds = {one.method: one.speed(tokens) for one in measured}
    bandwidth, size = report["bandwidth_bytes_per_second"], report["forward_bytes"]

    def over(one: Measurement, other: str) -> float | None:
        return speeds[one.method] / speeds[other] if other in speeds else None

    return [
        {
            "method": one.method,
            "tau": one.tau,
            "rounds": one.rounds,
            "tokens_per_second": speeds[one.method],
            "round_ms": 1000 * tokens / settings.batch / speeds[one.method] / one.rounds,
            "x_stock": over(one, STOCK),
            "x_static": over(one, STATIC),
            "x_plain": over(one, PLAIN),
            "roofline": speeds[one.method] / (settings.batch * one.tau * bandwidth / size),
            "same_tokens": one.same,
            "launches_per_round": one.launches,
            "waits_per_round": one.waits,
            "seconds_to_ready": one.seconds_to_ready,
            "seconds": one.seconds,
            "prefill_seconds": one.prefill,
        }
        for one in measured
    ]


def as_table(report: dict[str, Any]) -> str:
    """Two Markdown tables of what `measure` gives, what they were measured on above them."""
    settings = report["settings"]
    switches = "".join(f"{name} {value}, " for name, value in settings["engine"].items())
    rows = [
        [
            one["method"],
            f"{one['tau']:.2f}",
            f"{one['tokens_per_second']:.{0 if one['tokens_per_second'] >= 100 else 2}f}",
            f"{one['round_ms']:.2f}",
            *("" if one[name] is None else f"{one[name]:.2f}" for name in ("x_stock", "x_static", "x_plain")),
            f"{one['roofline']:.0%}",
            *("" if one[name] is None else f"{one[name]:.1f}" for name in ("launches_per_round", "waits_per_round")),
            "yes" if one["same_tokens"] else "NO",
        ]
        for one in report["results"]
    ]
    lines = [
        f"{settings['shape']} with random weights and a head of simulated acceptance, {settings['dtype']}, "
        f"{report['hardware']}; " + ", ".join(f"{name} {number}" for name, number in report["versions"].items()),
        f"batch {settings['batch']}, {settings['prompt_tokens']} + {settings['new_tokens']} tokens, tree of "
        f"{settings['nodes']} nodes, {switches}backend {settings['backend']}; medians of up to "
        f"{settings['repeats']} interleaved repeats; memory runs at "
        f"{report['bandwidth_bytes_per_second'] / 1e9:.0f} GB/s, a forward reads "
        f"{report['forward_bytes'] / 1e9:.3f} GB",
        "",
        *markdown(_COLUMNS, rows),
    ]
    if report["left_out"]:
        lines += ["", f"Left out, since the {settings['seconds']:g} s were over: {', '.join(report['left_out'])}."]
    phases = report.get("phase_ms")
    if phases:
        times = [f"{spent:.3f}" for spent in phases.values()]
        lines += ["", *markdown([f"{name} ms" for name in phases], [times]), ""]
        lines.append("Parts of the captured round, each launched alone.")
    costs = report.get("costs")
    if costs:
        lines += ["", *costs_table(costs), ""]
        lines.append(
            "Rounds that verify so many nodes, over one that verifies a single node without a draft; and the size at "
            "which trees of usual drafts bring most for that."
        )
    lines += [
        "",
        "`tokens/s` is of all rows after the prefill. `roofline`: over τ · bandwidth / bytes of a forward. `launches` "
        "and `waits` (of the host for the device) are per round; empty where the device does not tell.",
    ]
    return "\n".join(lines)


def costs_table(costs: dict[str, Any]) -> list[str]:
    """The lines of the Markdown table of `costs` in a report."""
    rows = [["a draft", *(f"{one['draft']:.2f}" for one in costs.values())]]
    for size in next(iter(costs.values()))["verify"]:
        rows.append([f"{size} nodes", *(f"{one['verify'][size]:.2f}" for one in costs.values())])
    for batch in next(iter(costs.values()))["nodes_worth"]:
        rows.append([f"nodes at batch {batch}", *(str(one["nodes_worth"][batch]) for one in costs.values())])
    return markdown(["", *costs], rows)


_NUMBERS = {
    "nodes": "of the tree (default: 64, on a CPU 16)",
    "draft-length": "of the head (default: 8)",
    "batch": "default: 1",
    "prompt-tokens": "default: 128, on a CPU 64",
    "new-tokens": "default: 256, on a CPU 32",
    "repeats": "default: 3, on a CPU 2",
    "seconds": "that it may take, but for what is under way then (default: 540, on a CPU 240)",
}


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print a table, and return 1 if a method wrote other tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b (default) or tiny")
    parser.add_argument("--tau", type=float, help="tokens per round that the head is made to reach (default: 5)")
    for name, text in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=positive, help=text)
    parser.add_argument(
        "--backend", help="of torch.compile; none compiles nothing of ours (default: inductor, on a CPU none)"
    )
    parser.add_argument(
        "--engine",
        nargs="+",
        type=_option,
        metavar="NAME=VALUE",
        help="other options of hf_dart.compile, such as lag=1 first_tier=1024",
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16, on a CPU float32"
    )
    parser.add_argument("--every-method", action="store_true", help="also those that say little on a CPU")
    parser.add_argument("--device", help="default: cuda")
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's choice)")
    json_option(parser)
    arguments = parser.parse_args(words)
    check_file(arguments.json)
    set_threads(arguments.threads)
    names = ("shape", "tau", *(name.replace("-", "_") for name in _NUMBERS), "backend", "dtype", "device")
    asked = given(arguments, names)
    if arguments.backend == "none":
        asked["backend"] = None
    if arguments.engine:
        asked["engine"] = dict(arguments.engine)
    if arguments.every_method:
        asked["every_method"] = True
    settings = Settings.on(**asked)
    content = measure(settings, say, lambda report: write_json(arguments.json, report))
    show(as_table(content))
    write_json(arguments.json, content)
    return 0 if all(one["same_tokens"] for one in content["results"]) else 1


def _option(text: str) -> tuple[str, Any]:
    """A name and its value, as JSON where it is that."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as lag=1")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


if __name__ == "__main__":
    sys.exit(main())
