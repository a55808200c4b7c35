"""`hf-dart bench engine` on a CPU: every method runs, the head reaches what it is told, and all write the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_dart.bench.engine import CAPTURED, EAGER, FORWARD, NUCLEUS, PLAIN, SAMPLED, STATIC, STOCK, memory_bandwidth
from hf_dart.bench.simulated import build_target, forward_bytes
from hf_dart.cli import main

_TINY = ["bench", "engine", "--shape", "tiny", "--dtype", "float32", "--device", "cpu", "--backend", "none"]
_TINY += ["--repeats", "1", "--draft-length", "4"]


def test_all_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine.json"
    words = [
        "--tau",
        "3.5",
        "--nodes",
        "8",
        "--batch",
        "2",
        "--prompt-tokens",
        "12",
        "--new-tokens",
        "30",
        "--draft-rank",
        "16",
    ]
    assert main([*_TINY, *words, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    results = {one["method"]: one for one in report["results"]}
    assert list(results) == [STOCK, STATIC, PLAIN, EAGER, FORWARD, CAPTURED, SAMPLED, NUCLEUS]
    assert all(one["same_tokens"] for one in results.values())
    assert all(one["tokens_per_second"] > 0 and one["roofline"] > 0 for one in results.values())
    for method in (EAGER, FORWARD, CAPTURED, SAMPLED, NUCLEUS):
        assert results[method]["tau"] == pytest.approx(3.5, abs=0.5)
    assert results[CAPTURED]["rounds"] == results[EAGER]["rounds"]
    assert results[PLAIN]["tau"] == 1
    phases = report["phase_ms"]
    assert set(phases) == {"draft", "draft + grow", "verify", "verify + walk", "commit", "round"}
    assert min(phases.values()) > 0
    assert report["bandwidth_bytes_per_second"] > 1e8
    out = capsys.readouterr()
    assert f"| {CAPTURED} | {results[CAPTURED]['tau']:.2f} |" in out.out
    assert "drafts scored at rank 16" in out.out
    assert "preparing forwards of 8 nodes for 2 row(s)" in out.err
    assert "preparing rounds of 16 nodes in all for 2 row(s)" in out.err


def test_what_a_forward_reads() -> None:
    target = build_target("tiny", torch.float32, torch.device("cpu"))
    hidden, vocabulary, layer = 64, 512, 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64 + 2 * 16
    weights = vocabulary * hidden + 2 * layer + hidden
    assert forward_bytes(target, batch=3, context=10) == 4 * (weights + 3 * 10 * 2 * 2 * 2 * 16)
    assert memory_bandwidth(torch.device("cpu")) > 1e8


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--shape gpt5", "give one of qwen3-0.6b"),
        ("--tau 6", "--tau is 6; give 1 to 5"),
        ("--new-tokens 1", "--new-tokens is 1"),
        ("--draft-rank 65", "--draft-rank is 65; give 1 to 64"),
    ],
)
def test_mistakes(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_TINY, *words.split()]) == 2
    assert sentence in capsys.readouterr().err
