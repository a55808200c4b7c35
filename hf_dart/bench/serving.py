"""Servers side by side: the same requests of so many clients to each, at moments that are drawn from a seed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from itertools import chain, product
from pathlib import Path
from random import Random
from socket import socket
from statistics import median, quantiles
from tempfile import TemporaryFile
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch

from hf_dart.errors import UserError
from hf_dart.hub.tables import markdown

_COLUMNS = ("clients", "server", "first token (median)", "p95", "tokens/s", "tokens/CPU s", "failed", "as alone")


@dataclass(frozen=True)
class Settings:
    """Size of a run."""

    clients: tuple[int, ...] = (1, 4, 8, 16)  # numbers of clients that ask at once
    requests: int = 2  # of each client, one after the other
    new_tokens: int = 64  # of each answer at most
    temperature: float = 0.0  # of all requests; 0 is greedy
    pause: float = 0.1  # seconds between two requests of a client, on average
    seed: int = 0  # of the pauses; prompts have seeds of their own


@dataclass(frozen=True)
class Answer:
    """One answer: seconds to its first token, tokens, and its text; `error` says what went wrong."""

    first: float = 0.0
    tokens: int = 0
    text: str = ""
    error: str | None = None


@contextmanager
def running(command: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Run a server, and yield its port and process id once it answers, which it has to in five minutes."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryFile() as output:
        words = [*command, "--host", "127.0.0.1", "--port", str(port)]
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # transformers' server has no option for them
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=os.environ | threads)
        try:
            end = time.monotonic() + 300
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > end:
                    output.seek(0)
                    last = output.read().decode(errors="replace").strip().rpartition("\n")[2]
                    raise UserError(f"{shlex.join(command)} does not answer ({last:.300}); run it by itself.")
                time.sleep(0.1)
            yield port, process.pid
        finally:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (OSError, HTTPException):
        return False


def ask(port: int, body: dict[str, Any]) -> Answer:
    """Ask for a completion as a stream, and take the times."""
    begun, first, tokens, text = time.perf_counter(), 0.0, 0, ""
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    request = Request(f"http://127.0.0.1:{port}/v1/completions", content, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=600) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                part = json.loads(line.removeprefix(b"data: "))
                if "error" in part:
                    return Answer(error=str(part["error"])[:200])
                text += "".join(choice["text"] for choice in part["choices"])
                first = first or (time.perf_counter() - begun if text else 0.0)
                tokens = (part.get("usage") or {}).get("completion_tokens", tokens)
    except HTTPError as error:
        return Answer(error=f"{error.code} {error.read().decode(errors='replace'):.200}")
    except (OSError, HTTPException, ValueError) as error:
        return Answer(error=f"{type(error).__name__}: {error}")
    return Answer(first, tokens, text, None if tokens else "no tokens were counted")


def measure(
    commands: dict[str, list[str]],  # that start the servers, by their names
    model: str,  # as requests name it
    prompts: list[str],  # of the requests, in turn, each with a seed of its own
    settings: Settings,
) -> dict[str, list[dict[str, Any]]]:
    """Measure servers that run at a time, one after the other with each number of clients."""
    common = {"model": model, "max_tokens": settings.new_tokens, "temperature": settings.temperature}
    bodies = [{**common, "prompt": prompt, "seed": seed} for seed, prompt in enumerate(prompts)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    with ExitStack() as stack:
        places = {name: stack.enter_context(running(command)) for name, command in commands.items()}
        alone = {name: [ask(port, body).text for body in bodies] for name, (port, _) in places.items()}
        for clients, (name, place) in product(settings.clients, places.items()):
            found[name].append({"clients": clients, **_loaded(*place, bodies, alone[name], clients, settings)})
    return found


def _loaded(
    port: int, process: int, bodies: list[dict[str, Any]], alone: list[str], clients: int, settings: Settings
) -> dict[str, Any]:
    """Return the figures of one server with so many clients; `alone` are the texts of `bodies` without others."""

    def client(number: int, waits: list[float]) -> list[tuple[Answer, str]]:
        answers = []
        for count, wait in enumerate(waits):
            time.sleep(wait)
            which = (number * settings.requests + count) % len(bodies)
            answers.append((ask(port, bodies[which]), alone[which]))
        return answers

    before, begun = _cpu_seconds(process), time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = [*chain(*pool.map(client, range(clients), pauses(settings, clients)))]
    seconds, used = time.perf_counter() - begun, _cpu_seconds(process) - before
    good = [(one, text) for one, text in answers if one.error is None]
    firsts, tokens = [one.first for one, _ in good] or [0.0], sum(one.tokens for one, _ in good)
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "errors": sorted({one.error for one, _ in answers if one.error is not None}),
        "first_token_median": median(firsts),
        "first_token_p95": quantiles(firsts, n=20, method="inclusive")[-1] if len(firsts) > 1 else firsts[0],
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / used if used else None,
        "as_alone": sum(one.text == text for one, text in good),
    }


def pauses(settings: Settings, clients: int) -> list[list[float]]:
    """Draw for each client how many seconds it waits before each of its requests."""
    random = Random(settings.seed)
    return [[random.expovariate(1 / settings.pause) for _ in range(settings.requests)] for _ in range(clients)]


def _cpu_seconds(process: int) -> float:
    """Processor seconds that a process has used; 0 where the system has no /proc."""
    stat = Path(f"/proc/{process}/stat")
    if not stat.exists():
        return 0.0
    user, system = stat.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def commands(ours: Sequence[str], target: str, dtype: str, device: str) -> dict[str, list[str]]:
    """Return the command of each server, by its name; `ours` are options of `hf-dart serve`."""
    theirs = [sys.executable, "-m", "transformers.cli.transformers", "serve", target]
    theirs += ["--dtype", dtype, "--device", device]
    # Each request comes several times: a memory would copy the answer that it had before.
    return {
        "hf-dart serve": [sys.executable, "-m", "hf_dart.cli", "serve", "--memory", "0", *ours],
        "transformers serve": theirs,
        "transformers serve --continuous-batching": [*theirs, "--continuous-batching"],
    }


def as_table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return a table of what `measure` gave of each server, numbers of clients side by side."""
    rows = []
    for at_once in zip(*results.values(), strict=True):
        for name, one in zip(results, at_once, strict=True):
            cpu, requests, failed = one["tokens_per_cpu_second"], one["requests"], one["failed"]
            times = [f"{one[figure]:.2f} s" for figure in ("first_token_median", "first_token_p95")]
            speeds = [f"{one['tokens_per_second']:.0f}", "" if cpu is None else f"{cpu:.0f}"]
            counts = [f"{failed} of {requests}", f"{one['as_alone']} of {requests - failed}"]
            rows.append([str(one["clients"]), name, *times, *speeds, *counts])
    return "\n".join(markdown(_COLUMNS, rows))
