"""A thousand requests, half of them with faults: no 500, none lost, each text as alone, memory within a bound.

As a program it prints what there was: `PYTHONPATH=tests python tests/serve/test_load.py --requests 1000`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch
from support.serving import ask, begun, command

from hf_dart.hub.machine import circumstances

ROUTE = "/v1/completions"
PROMPTS = ["import os\n", "def read(path):\n", "class Table:\n    ", "for name in sorted("]
MALFORMED: list[Any] = [
    b"{", b"\xff", b"[" * 5000, b'{"prompt": NaN}', {}, {"prompt": {}}, {"prompt": ""}, {"prompt": "x", "top_p": 9},
    {"prompt": "x", "tools": [1]}, {"prompt": "x" * 9000}, {"prompt": [10**9]}, {"prompt": "x", "n": 100},
    {"prompt": "x", "model": "none"}, {"prompt": "x", "stop": [1]}, {"messages": []}, [1], "x",
    b'{"prompt": "x", "\\ud800": 1}', {"prompt": "x", "repetition_penalty": 1e-300},
    {"prompt": "x", "messages": [], "response_format": {"type": "json_schema"}},
]  # fmt: skip


def wanted(number: int) -> dict[str, Any]:
    random = Random(number % 40)
    body = {"prompt": random.choice(PROMPTS), "max_tokens": random.choice([4, 12, 24]), "seed": number % 40}
    return body | {"temperature": random.choice([0, 1])}


class Load:
    """Requests to one server, and what came of them."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.alone = {number: self.text(wanted(number))[1] for number in range(40)}
        self.found: Counter[str] = Counter()

    def text(self, body: Any) -> tuple[int, str]:
        status, answer, _ = ask(self.address, ROUTE, body)
        if status != 200:
            return status, answer
        if isinstance(body, dict) and body.get("stream"):
            assert answer.endswith("data: [DONE]\n\n")
            parts = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
            return status, "".join(choice["text"] for part in parts for choice in part["choices"])
        return status, json.loads(answer)["choices"][0]["text"]

    def one(self, number: int) -> None:
        random = Random(number)
        kind = random.choice(["good"] * 5 + ["malformed", "too large", "leaves", "slow reader", "half sent"])
        begun = time.monotonic()
        try:
            outcome = getattr(self, kind.replace(" ", "_"))(number, random)
        except (OSError, HTTPException) as error:
            outcome = f"lost: {error!r}"
        self.found[f"{kind}: {outcome}"] += 1
        assert time.monotonic() - begun < 120

    def good(self, number: int, random: Random) -> str:
        while True:
            status, text = self.text({**wanted(number), "stream": random.random() < 0.5})
            if status != 429:
                return "as alone" if (status, text) == (200, self.alone[number % 40]) else f"{status}: {text}"
            time.sleep(0.2)

    def malformed(self, number: int, random: Random) -> str:
        return str(ask(self.address, random.choice([ROUTE, "/v1/chat/completions", "/v1/responses"]),
                       random.choice(MALFORMED))[0])  # fmt: skip

    def too_large(self, number: int, random: Random) -> str:
        return str(ask(self.address, ROUTE, iter([b" " * 2**20] * 5))[0])

    def leaves(self, number: int, random: Random) -> str:
        with begun(self.address, {**wanted(number), "max_tokens": 1500, "stream": random.random() < 0.5}):
            time.sleep(random.random() / 2)
        return "left"

    def half_sent(self, number: int, random: Random) -> str:
        with begun(self.address, wanted(number), 20):
            time.sleep(random.random() / 2)
        return "left"

    def slow_reader(self, number: int, random: Random) -> str:
        with begun(self.address, {**wanted(number), "stream": True}) as connection:
            got = b""
            while not re.search(rb"\[DONE\]|429 |40\d ", got):
                more = connection.recv(64)
                if not more:
                    return f"ended after {got[-100:]!r}"
                got += more
                time.sleep(0.002)
        return "200" if b" 200 " in got else "429"


def run(requests: int, at_once: int = 24) -> dict[str, Any]:
    """Load a server of the packaged pair, and return what there was."""
    log, options = list[str](), ("--seats", "4", "--waiting", "12")
    with ThreadPoolExecutor(at_once + 1) as pool, command(*options) as (process, address):
        reader, memory = pool.submit(log.extend, process.stderr), psutil.Process(process.pid).memory_info
        load = Load(address)
        figures, began = {"begun": memory().rss}, time.monotonic()
        list(pool.map(load.one, range(requests // 4)))
        figures["a quarter"] = memory().rss
        list(pool.map(load.one, range(requests // 4, requests)))
        seconds = time.monotonic() - began
        end = time.monotonic() + 30
        while (health := json.loads(ask(address, "/health", method="GET")[1]))["running"] + health["waiting"]:
            assert time.monotonic() < end, health
        figures["end"] = memory().rss
        after = load.text(wanted(1)) == (200, load.alone[1])
        process.terminate()
        reader.result(60)
    log = [line for line in log if line.strip()]
    return {"found": dict(load.found), "memory": figures, "log": log, "goes on": after, "seconds": seconds}


@pytest.mark.load
def test_a_thousand_requests_with_faults() -> None:
    ran = run(1000)
    found = Counter(ran["found"])
    assert found.total() == 1000
    kinds = {"good: as alone", "malformed: 400", "malformed: 404", "malformed: 429", "too large: 413", "leaves: left",
             "half sent: left", "slow reader: 200", "slow reader: 429", "too large: 429"}  # fmt: skip
    assert found.keys() <= kinds, found
    assert found["good: as alone"] > 400
    assert not [line for line in ran["log"] if "Traceback" in line or re.search(r"/v1/\S+ 5\d\d", line)]
    assert ran["goes on"]
    assert ran["memory"]["end"] < ran["memory"]["a quarter"] + 150 * 2**20


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    ran = run(given.requests)
    log = ran.pop("log")
    ran |= {"lines of log": len(log), **circumstances(["python", *sys.argv], torch.device("cpu"))}
    ran["threads"] = 1  # of the server
    print(json.dumps(ran, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(ran, indent=2) + "\n", encoding="utf8")
    print(*[line for line in log if not line.startswith("20")], sep="")
