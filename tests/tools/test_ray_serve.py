"""Two replicas of `hf-dart serve` under Ray Serve: stock's texts from both, and one for each conversation."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.serving import ask

from hf_dart.bench.pair import Pair

for package in ("ray", "mmh3"):
    pytest.importorskip(package)
openai = pytest.importorskip("openai")
PROGRAM = Path(__file__).parents[2] / "examples" / "ray_serve" / "replicas.py"
# Seconds that Ray waits for its own processes, which a busy machine with few cores starts slowly.
PATIENT = {
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_gcs_server_request_timeout_seconds": "600",
    "RAY_health_check_timeout_ms": "600000",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "600",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "600",
}


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def answers(address: str, process: subprocess.Popen[bytes]) -> bool:
    try:
        return ask(address, "/health", method="GET")[0] == 200
    except OSError:
        assert process.poll() is None, "replicas.py has ended"
        return False


@pytest.mark.load
def test_two_replicas(pair: Pair) -> None:
    """On a cluster of this machine alone, or the one that RAY_ADDRESS names."""
    port = free_port()
    words = [sys.executable, PROGRAM, "--replicas", "2", "--threads", "1", "--host", "127.0.0.1", "--port", str(port)]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen([*map(str, words)], env={**PATIENT, **os.environ}) as process:
        try:
            while not answers(address, process):
                time.sleep(2)
            seen = asked(pair, address)
        finally:
            process.send_signal(signal.SIGINT)
    assert {len(replicas) for replicas in seen.values()} == {1}, "a conversation has one replica"
    assert len(set().union(*seen.values())) == 2


def asked(pair: Pair, address: str) -> dict[str, set[str]]:
    """The replicas that answered each of some conversations of three turns, every text of which is stock's."""
    seen, known = defaultdict(set), set[str]()
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600)
    for number in range(1000):  # the router hears of replicas one by one, and sends sessions elsewhere then
        first = client.completions.with_raw_response.create(
            model=pair.target_name, prompt="import", max_tokens=1, extra_headers={"x-session-id": f"first {number}"}
        )
        known.add(first.headers["x-replica"])
        if len(known) == 2:
            break
        time.sleep(0.1)
    for turn in range(3):
        for session in range(6):
            prompt = f"import os\n\ndef part_{session}(path):\n" + "    path = path.strip()\n" * turn
            given: dict[str, Any] = {"prompt": prompt, "max_tokens": 16, "temperature": 1, "seed": session}
            answer = client.completions.with_raw_response.create(
                model=pair.target_name, user=f"user {session}", extra_headers={"x-session-id": str(session)}, **given
            )
            seen[str(session)].add(answer.headers["x-replica"])
            ids = torch.tensor([pair.tokenizer(prompt)["input_ids"]])
            torch.manual_seed(session)
            stock = type(pair.model).generate(
                pair.model, ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, max_new_tokens=16
            )
            text = pair.tokenizer.decode(stock[0, ids.shape[1] :], skip_special_tokens=True)
            assert answer.parse().choices[0].text == text
    return seen
