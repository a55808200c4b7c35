"""What a round costs on a device, beside what it has to: `hf-dart bench engine`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from hf_dart.bench.exact import run, timed
from hf_dart.bench.simulated import SHAPES, SimulatedHead, build_target, forward_bytes
from hf_dart.bench.speed import in_turn
from hf_dart.decoding.proposal import Proposal
from hf_dart.engine.compiled import compile
from hf_dart.engine.compiling import compiled
from hf_dart.engine.config import EngineConfig
from hf_dart.engine.fixed_round import FixedRound
from hf_dart.engine.graphs import Launch
from hf_dart.engine.tier import Tier
from hf_dart.hub.machine import hardware, versions
from hf_dart.trees.config import TreeConfig
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
_COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes, for the bandwidth
_TIMED = {"cuda": 20, "cpu": 3}  # calls, for a phase
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Args:
        shape: of the target, one of `simulated.SHAPES`.
        tau: tokens per round that the head is made to reach.
        nodes: of the tree.
        draft_length: of the head.
        draft_rank: of the LM head that scores drafts (`DartHead.reduce_rank`); None is the target's.
        batch, prompt_tokens, new_tokens: of each call.
        repeats: how often each method is timed.
        backend: of `torch.compile`; None compiles nothing of ours.
        dtype, device: of target and head.

    Raises:
        ValueError: they do not go together.
    """

    shape: str = "qwen3-8b"
    tau: float = 5.0
    nodes: int = 64
    draft_length: int = 8
    draft_rank: int | None = None
    batch: int = 1
    prompt_tokens: int = 128
    new_tokens: int = 256
    repeats: int = 3
    backend: str | None = "inductor"
    dtype: str = "bfloat16"
    device: str = "cuda"

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"--shape is {self.shape!r}; give one of {', '.join(SHAPES)}.")
        if not 1 <= self.tau <= min(self.draft_length + 1, self.nodes):
            raise ValueError(
                f"--tau is {self.tau:g}; give 1 to {min(self.draft_length + 1, self.nodes)}, the longest path of the "
                "tree."
            )
        width = SHAPES[self.shape][0]
        if self.draft_rank is not None and self.draft_rank > width:
            raise ValueError(f"--draft-rank is {self.draft_rank}; give 1 to {width}, the width of the LM head.")
        if self.new_tokens < 2:
            raise ValueError(f"--new-tokens is {self.new_tokens}; give 2 or more.")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError("There is no CUDA device; give --device cpu.")


@dataclass
class Measurement:
    """One method.

    Attributes:
        seconds: of each call, and of the same calls for one token, which is their prefill.
        rounds, tau: forwards after the prefill and tokens of each row per forward.
        same: were the tokens stock's?
        launches, waits: per round, of kernels or graphs, and of the host for the device; None where it cannot tell.
    """

    method: str
    options: dict[str, Any]
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


def measure(settings: Settings, progress: Callable[[str], object] = lambda line: None) -> dict[str, Any]:
    """Time all methods in turns, then the parts of the captured round; ready for JSON."""
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    progress(f"building {settings.shape} in {settings.dtype} on {settings.device}")
    target = build_target(settings.shape, dtype, device)
    head = SimulatedHead.from_target(target, draft_length=settings.draft_length).aim(settings.tau)
    head.reduce_rank(settings.draft_rank)
    first = torch.arange(settings.batch)[:, None] * 7 + torch.arange(settings.prompt_tokens)
    inputs = {"input_ids": (first % target.config.vocab_size).to(device)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])

    engine = compile(target, head, backend=settings.backend, progress=progress)
    # One cache for all calls: what transformers compiles for a static cache is bound to its addresses.
    static = StaticCache(config=target.config, max_cache_len=settings.prompt_tokens + settings.new_tokens)
    methods = _methods(head, static, settings)
    expected = run(target, inputs, _greedy(settings.new_tokens)).sequences
    for one in methods:
        progress(f"warming up: {one.method}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Of this call the target's forward alone")  # as is meant
            _time(one, target, inputs, settings.new_tokens, engine, expected)
        one.seconds.clear()
        one.prefill.clear()
    for repeat in range(settings.repeats):
        progress(f"repeat {repeat + 1} of {settings.repeats}")
        for one in in_turn(methods, repeat):
            _time(one, target, inputs, settings.new_tokens, engine, expected)
    if device.type == "cuda":
        for one in methods:
            _count(one, target, inputs, settings.new_tokens, engine)
    head.engine = engine
    tiers = [tier for tier in engine.tiers if tier and tier.shape.depth and not tier.shape.sampled]
    phases = phase_ms(tiers[-1], settings.backend) if tiers else {}
    context = settings.prompt_tokens + settings.new_tokens // 2
    return _report(settings, methods, phases, memory_bandwidth(device), forward_bytes(target, settings.batch, context))


def _greedy(tokens: int) -> dict[str, Any]:
    return {"do_sample": False, "max_new_tokens": tokens}


def _methods(head: SimulatedHead, static: StaticCache, settings: Settings) -> list[Measurement]:
    tree = TreeConfig(nodes=settings.nodes, lookup=0)
    return [
        Measurement(STOCK, {}),
        Measurement(STATIC, {"past_key_values": static}),  # which transformers compiles on a GPU
        Measurement(PLAIN, {"assistant": head, "tree_config": TreeConfig(nodes=1, lookup=0)}),
        Measurement(EAGER, {"assistant": head, "tree_config": tree}),
        # No captured round has this processor, which changes nothing here.
        Measurement(FORWARD, {"assistant": head, "tree_config": tree, "remove_invalid_values": True}),
        Measurement(CAPTURED, {"assistant": head, "tree_config": tree}),
        # The text is the same, since the target is sure of every token.
        Measurement(SAMPLED, {"assistant": head, "tree_config": tree, "do_sample": True, "top_k": 0}),
        # All scores are sorted for it, in every row that is sampled from.
        Measurement(NUCLEUS, {"assistant": head, "tree_config": tree, "do_sample": True, "top_k": 0, "top_p": 0.95}),
    ]


def _time(
    one: Measurement,
    target: PreTrainedModel,
    inputs: dict[str, Tensor],
    tokens: int,
    engine: Any,
    expected: Tensor,
) -> None:
    one.prefill.append(run(target, inputs, _options(one, 1, engine)).seconds)
    done = run(target, inputs, _options(one, tokens, engine))
    one.seconds.append(done.seconds)
    one.same = one.same and torch.equal(done.sequences, expected)
    one.rounds = tokens - 1 if done.stats is None else done.stats.rounds
    one.tau = 1.0 if done.stats is None else done.stats.tau


def _options(one: Measurement, tokens: int, engine: Any) -> dict[str, Any]:
    """Options of the next call, of so many tokens; its static cache is emptied, and its head given the engine."""
    if "past_key_values" in one.options:
        one.options["past_key_values"].reset()
    if "assistant" in one.options:
        one.options["assistant"].engine = None if one.method == EAGER else engine
    return {**_greedy(tokens), **one.options}


def _count(one: Measurement, target: PreTrainedModel, inputs: dict[str, Tensor], tokens: int, engine: Any) -> None:
    """Launches and waits per round, those of the prefill left out."""
    found = []
    for length in (1, tokens):
        options = _options(one, length, engine)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            target.generate(**inputs, **options)
        names = [event.name for event in profile.events()]
        found.append([sum(name in wanted for name in names) for wanted in (_LAUNCHES, _WAITS)])
    one.launches, one.waits = ((whole - start) / one.rounds for start, whole in zip(*found, strict=True))


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes, or a sum reads, whichever are more; the best of several."""
    source = torch.zeros(_COPIED[device.type] // 4, dtype=torch.float32, device=device)
    copied = torch.empty_like(source)
    ways: list[tuple[int, Callable[[], Tensor]]] = [(2, lambda: copied.copy_(source)), (1, source.sum)]
    return max(times * source.nbytes / timed(device, way)[0] for times, way in 5 * ways)


@torch.no_grad()
def phase_ms(tier: Tier, backend: str | None) -> dict[str, float]:
    """Milliseconds of the parts of a round, each launched alone, after the text that the tier holds.

    What a tier holds is overwritten.
    """
    state, shape, this = tier.state, tier.shape, tier.round
    with this.verifier.packed():
        tree = this.propose()
        verdict = list(this.accept(tree))
    verdict[2] = torch.zeros_like(verdict[2])

    def draft() -> Proposal:
        return this.head.propose(tier.draft.ahead(), state.features, state.next_tokens, state.counts, shape.depth)

    steps: dict[str, Callable[[], object]] = {
        "draft": compiled(draft, backend),
        "draft + grow": compiled(this.propose, backend),
        "verify": partial(compiled(this.verify, backend), tree),
        "verify + walk": partial(compiled(this.accept, backend), tree),
        "commit": partial(this.commit, *verdict),
    }
    spent = {name: _ms(_within(this, step), state.roots.device) for name, step in steps.items()}
    spent["round"] = _ms(tier.launch, state.roots.device, made=True)
    return spent


def _within(this: FixedRound, step: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        with this.verifier.packed():
            step()

    return call


def _ms(step: Callable[[], None], device: torch.device, made: bool = False) -> float:
    launch = step if made else Launch(step, device)
    calls = _TIMED[device.type]
    launch()
    return 1000 * timed(device, lambda: [launch() for _ in range(calls)])[0] / calls


def _report(
    settings: Settings, methods: list[Measurement], phases: dict[str, float], bandwidth: float, size: int
) -> dict[str, Any]:
    tokens = settings.batch * (settings.new_tokens - 1)
    speeds = {one.method: one.speed(tokens) for one in methods}
    return {
        "settings": asdict(settings),
        "engine": asdict(EngineConfig(backend=settings.backend)),
        "versions": versions(),
        "hardware": hardware(torch.device(settings.device)),
        "bandwidth_bytes_per_second": bandwidth,
        "forward_bytes": size,
        "phase_ms": phases,
        "results": [
            {
                "method": one.method,
                "tau": one.tau,
                "rounds": one.rounds,
                "tokens_per_second": speeds[one.method],
                "round_ms": 1000 * tokens / settings.batch / speeds[one.method] / one.rounds,
                "x_stock": speeds[one.method] / speeds[STOCK],
                "x_static": speeds[one.method] / speeds[STATIC],
                "x_plain": speeds[one.method] / speeds[PLAIN],
                "roofline": speeds[one.method] / (settings.batch * one.tau * bandwidth / size),
                "same_tokens": one.same,
                "launches_per_round": one.launches,
                "waits_per_round": one.waits,
                "seconds": one.seconds,
                "prefill_seconds": one.prefill,
            }
            for one in methods
        ],
    }


def as_table(report: dict[str, Any]) -> str:
    """Two Markdown tables of what `measure` gives, what they were measured on above them."""
    settings = report["settings"]
    scored = "" if settings["draft_rank"] is None else f"drafts scored at rank {settings['draft_rank']}, "
    rows = [
        [
            one["method"],
            f"{one['tau']:.2f}",
            f"{one['tokens_per_second']:.0f}",
            f"{one['round_ms']:.2f}",
            *(f"{one[name]:.2f}" for name in ("x_stock", "x_static", "x_plain")),
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
        f"{settings['nodes']} nodes, {scored}backend {settings['backend']}; medians of "
        f"{settings['repeats']} interleaved repeats; memory runs at "
        f"{report['bandwidth_bytes_per_second'] / 1e9:.0f} GB/s, a forward reads "
        f"{report['forward_bytes'] / 1e9:.3f} GB",
        "",
        *markdown(_COLUMNS, rows),
    ]
    phases = report["phase_ms"]
    if phases:
        rest = 1 - phases["verify"] / phases["round"]
        times = [*(f"{spent:.3f}" for spent in phases.values()), f"{rest:.0%}"]
        lines += [
            "",
            *markdown([*(f"{name} ms" for name in phases), "not verified"], [times]),
            "",
            "Parts of the captured round, each launched alone. `not verified`: all but the target's forward.",
        ]
    lines += [
        "",
        "`tokens/s` is of all rows after the prefill. `roofline`: over τ · bandwidth / bytes of a forward. `launches` "
        "and `waits` (of the host for the device) are per round; empty where the device does not tell.",
    ]
    return "\n".join(lines)
