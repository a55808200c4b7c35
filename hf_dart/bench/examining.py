"""`hf-dart doctor`: what a set-up lacks, check by check, and the settings that would gain most there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch
from packaging.requirements import Requirement

from hf_dart.bench import profiling, speed, suites
from hf_dart.bench.exact import run
from hf_dart.bench.pair import Pair, load_quietly, shown_name, target_of, thinking_of, with_head
from hf_dart.decoding.api import attach
from hf_dart.drafters.lookup import LookupDrafter
from hf_dart.errors import UserError, as_user_error, sentence
from hf_dart.hub.download import optional_json
from hf_dart.hub.facts import TRAINING_RECORD
from hf_dart.hub.machine import hardware, versions
from hf_dart.hub.publish import BENCH
from hf_dart.hub.tables import OURS, STOCK, Verdict, markdown
from hf_dart.models.attention import TreeAttention
from hf_dart.models.features import vocabulary_size
from hf_dart.models.packed_weights import free_memory, packable, packed_copy, packed_linear, packs, seconds, weights_of
from hf_dart.models.tokenizers import template_hash

Check = dict[str, Any]

_PROMPTS = {"code": 4, "chat": 3, "math": 3}
_COSTED = "with the costs of this machine"
_COPIES = f"{OURS}, copies alone"
_LEAST_GAIN, _SETTINGS = 1.03, 3
_KEPT = 0.7  # of a promised acceptance length: other text may cost the rest


def examine(
    target: str | None, head: str | None, dtype: str | None, new_tokens: int = 48, **options: Any
) -> dict[str, Any]:
    """Check a target and its drafter (of `load_pair`) on this machine, as far as they can be loaded, on ten prompts.

    Returned for JSON are passed; checks: name, good, found and remedy of each; settings: what would gain most, as code.
    """
    checks, settings, part = [*_machine()], [], "target"
    try:
        target = target or target_of(head)
        model, tokenizer = load_quietly(target, dtype, **options)
        checks += [_check(part, True, shown_name(target, part), ""), *_model(model)]
        part = "trial"
        with as_user_error():
            attach(model)
        checks.append(_check(part, True, f"trees are verified exactly, by {TreeAttention(model).name}", ""))
        part = "drafter"
        pair = with_head(model, tokenizer, target, head)
    except UserError as error:
        found, _, remedy = sentence(error).partition("; ")
        checks.append(_check(part, False, found, remedy or f"give another {part}, or a folder or Hub id that is there"))
    else:
        checks += [_check(part, True, f"{pair.head_name} ({type(pair.head).__name__})", ""), *_fit(pair)]
        settings = _measure(pair, new_tokens, checks)
    return {"passed": all(one["good"] for one in checks), "checks": checks, "settings": settings}


def as_page(report: dict[str, Any]) -> str:
    """Return what `examine` found in Markdown: a row for each check, and the settings as code."""
    rows = [[one["name"], "ok" if one["good"] else "LOOK", one["found"], one["remedy"]] for one in report["checks"]]
    gains = [f"{one['code']}  # {one['gain']:.2f} times as fast as now" for one in report["settings"]]
    settings = ["", "What would gain most, as measured here on greedy text:", "", *gains] if gains else []
    return "\n".join([*markdown(["check", "", "found", "remedy"], rows), *settings])


def _check(name: str, good: bool, found: str, remedy: str) -> Check:
    return {"name": name, "good": good, "found": found, "remedy": "" if good else remedy}


def _machine() -> Iterator[Check]:
    try:
        lines = requires("hf-dart") or []
    except PackageNotFoundError:  # run from its source, without having been installed
        lines = []
    wanted = [Requirement(line) for line in lines if ";" not in line]  # those are extras
    wrong = [str(one) for one in wanted if not _is_there(one)]
    found = ", ".join(f"{name} {number}" for name, number in versions().items())
    yield _check("versions", not wrong, found, f"pip install {' '.join(map(repr, wrong))}")
    cores, threads = _cores(), torch.get_num_threads()
    yield _check("threads", threads <= cores, f"{threads} on {cores} cores", f"torch.set_num_threads({cores})")
    yield _check("other load", _load() < 0.5 * cores, f"{_load():.1f} on {cores} cores", "stop other programs")


def _is_there(wanted: Requirement) -> bool:
    try:
        return wanted.specifier.contains(version(wanted.name), prereleases=True)
    except PackageNotFoundError:
        return False


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _model(model: Any) -> Iterator[Check]:
    dtype = str(model.dtype).removeprefix("torch.")
    on_cpu = model.device.type == "cpu"
    idle = on_cpu and torch.accelerator.is_available()
    yield _check("device", not idle, f"{hardware(model.device)} ({model.device.type})", "device_map='auto'")
    size, free = sum(weight.nbytes for weight in weights_of(packable(model))), free_memory() or 0
    found = f"{model.get_memory_footprint() / 2**30:.1f} GiB of weights, {size / 2**30:.1f} more if packed for trees"
    remedy = "free memory, or take a smaller dtype: trees are verified with plain weights, which is slower"
    yield _check("memory", size <= free // 2 or not free, f"{found}; {free / 2**30:.1f} free", remedy)
    times, found, narrow = 1.0, dtype, model.dtype in (torch.bfloat16, torch.float16)
    if on_cpu and (narrow or model.dtype == torch.float32):
        other = torch.float32 if narrow else torch.bfloat16
        times = product_seconds(model.dtype) / product_seconds(other)
        found += f"; products take {times:.1f} of {str(other).removeprefix('torch.')}'s time"
    yield _check("dtype", times < 1.2 or not narrow, found, "dtype='float32'")
    own = TreeAttention(model).own
    slow = own == "eager" and model._supports_sdpa
    yield _check("attention", not slow, own, "attn_implementation='sdpa'")


def _fit(pair: Pair) -> Iterator[Check]:
    """Tell what a drafter that was loaded fits, of which the template alone may differ."""
    config = vars(pair.head).get("config")
    known = getattr(config, "tokenizer_hash", None)
    yield _check("tokenizer", True, "the drafter names none" if known is None else "as that of the training", "")
    drafted, known_tokens = getattr(config, "draft_vocab_size", None), vocabulary_size(pair.model)
    yield _check("vocabulary", True, f"{known_tokens} tokens, {drafted or 'all'} of which are drafted", "")
    known, template = getattr(config, "chat_template_hash", None), pair.tokenizer.chat_template
    same = known is None or (isinstance(template, str) and template_hash(template) == known)
    found = "the drafter names none" if known is None else f"{'as' if same else 'other than'} that of the training"
    yield _check("chat template", same, found, "give the tokenizer the template of the training, or adapt the head")


def product_seconds(dtype: torch.dtype) -> float:
    """Seconds of a layer's product for four tokens on the CPU, as trees compute it, the least of several."""
    rows, weight = torch.ones(4, 1024, dtype=dtype), torch.ones(4096, 1024, dtype=dtype)
    product, stored = (packed_linear, packed_copy(weight)) if packs(dtype) else (torch.nn.functional.linear, weight)
    return min(seconds(product, rows, [stored]) for _ in range(8))


def _measure(pair: Pair, new_tokens: int, checks: list[Check]) -> list[dict[str, Any]]:
    """Add the checks that only runs can make; return the settings that would gain most."""
    flags, opened = thinking_of(pair), suites.open_suite
    prompts = [one for name, count in _PROMPTS.items() for one in opened(name, pair.tokenizer, count, flags=flags)[""]]
    methods: dict[str, dict[str, Any]] = {OURS: {"assistant": pair.head}, _COPIES: {"assistant": LookupDrafter()}}
    code = {_COPIES: "drafter = hf_dart.LookupDrafter()", STOCK: "model.generate(..., assistant=None)"}
    if pair.head.draft_length:
        costs = profiling.measure(pair, rounds=8, repeats=2, sizes=(1, 4, 16, 64)).tree
        curve = ", ".join(f"{size:g}: {cost:.2f}" for size, cost in costs["verify_costs"])
        found = f"of rounds by nodes: {curve}; of a draft: {costs['draft_cost']:.2f}"
        checks.append(_check("costs", True, found, ""))
        methods[_COSTED] = {"assistant": pair.head, "tree_config": replace(pair.head.tree_config, **costs)}
        code[_COSTED] = f"drafter.tree_config = dataclasses.replace(drafter.tree_config, **{costs})"
    settings = speed.Settings(len(prompts), max(map(len, prompts)), new_tokens, repeats=1, batches=(1,))
    greedy = {"greedy": speed.MODES["greedy"]}
    measured = speed.measure(pair, prompts, settings, methods, greedy)
    spent = {one.method: sum(one.seconds) for one in measured}
    verdict = sum((one.verdict for one in measured), Verdict())
    checks.append(_check("same text", verdict.identical, str(verdict), "run hf-dart audit, and open an issue"))
    stats = next(one.stats for one in measured if one.method == OURS)
    tau, promised = stats.tau, _promised(pair.head)
    told = "nothing is promised" if promised is None else f"{promised:.2f} promised"
    if promised is not None and 2 * stats.paused_rounds > stats.rounds:  # of which most say nothing of the drafts
        nodes = 2 + stats.drafted // max(stats.rounds - stats.plain_rounds, 1)
        free = {OURS: {"assistant": pair.head, "tree_config": replace(pair.head.tree_config, nodes=nodes, lookup=0)}}
        tau = speed.measure(pair, prompts, settings, free, greedy)[-1].stats.tau
        told += f"; {stats.tau:.2f} in all rounds, of which most were not drafted"
    remedy = "look at template, thinking and language, or adapt the head (docs/lora.md)"
    good = promised is None or tau >= _KEPT * promised
    checks.append(_check("acceptance length", good, f"{tau:.2f} on {len(prompts)} greedy prompts; {told}", remedy))
    ratio = spent[STOCK] / spent[OURS]
    checks.append(_check("speed", ratio >= 1, f"{ratio:.2f} times stock's", "see the settings that would gain most"))

    gains = [(spent[OURS] / spent[name], line) for name, line in code.items()]
    if _load() < 0.5 * _cores():  # else the other programs decide
        gains += _of_threads(pair, prompts[:2], new_tokens)
    best = sorted((one for one in gains if one[0] > _LEAST_GAIN), reverse=True)[:_SETTINGS]
    return [{"gain": gain, "code": line} for gain, line in best]


def _promised(head: Any) -> float | None:
    """Return the acceptance length of the bench that lies with a head, or of the last evaluation of its training."""
    name = getattr(head, "name_or_path", "")
    if not name:
        return None
    bench, greedy = optional_json(name, BENCH) or {}, {"method": OURS, "mode": "greedy", "batch": 1}.items()
    taus = [one["tau"] for one in bench.get("results", ()) if greedy <= one.items() and "tau" in one]
    trained = (optional_json(name, TRAINING_RECORD) or {}).get("evaluation") or {}
    return sum(taus) / len(taus) if taus else trained.get("eval_tau")


def _of_threads(pair: Pair, prompts: list[list[int]], new_tokens: int) -> list[tuple[float, str]]:
    """Time drafted calls with other numbers of threads; return what each gains, and how to set it."""
    now, cores = torch.get_num_threads(), _cores()
    options = {**speed.MODES["greedy"], "max_new_tokens": new_tokens, "assistant": pair.head}
    options["tokenizer"] = pair.tokenizer
    inputs = [speed.pad_left([ids], speed.pad_token(pair), pair.model.device) for ids in prompts]
    spent = dict.fromkeys((now, 1, max(cores // 2, 1), cores), float("inf"))
    try:
        for threads in [*spent] * 2:
            torch.set_num_threads(threads)
            spent[threads] = min(spent[threads], sum(run(pair.model, one, options).seconds for one in inputs))
    finally:
        torch.set_num_threads(now)
    return [(spent[now] / one, f"torch.set_num_threads({threads})") for threads, one in spent.items() if threads != now]
