"""`hf-dart bench`: a small run whose figures have to hang together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_dart.bench.baselines import LOOKUP, STOCK
from hf_dart.bench.speed import MODES
from hf_dart.cli import main
from hf_dart.view.tables import OURS


def test_smoke_run_writes_figures_that_hang_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main(["bench", "--smoke", "--json", str(file)]) == 0
    shown = capsys.readouterr()
    assert "| x stock |" in shown.out
    case = "pytest's source, float32, prompts of up to 24 tokens"
    assert shown.err.splitlines()[0] == case
    # 10 measurements of two prompts each, and 8 of one batch; once to warm up, and twice all.
    assert "74/74" in shown.err

    report = json.loads(file.read_text(encoding="utf8"))
    assert report["dtype"] == "float32"
    assert report["threads"] == torch.get_num_threads()
    assert report["command"].startswith("hf-dart bench --smoke")
    assert set(report["versions"]) == {"python", "hf-dart", "torch", "transformers"}
    results = {(one["batch"], one["mode"], one["method"]): one for one in report["results"]}
    assert len(results) == len(report["results"])
    expected = {(batch, mode, method) for batch in (1, 2) for mode in MODES for method in (STOCK, OURS)}
    expected |= {(1, mode, LOOKUP) for mode, options in MODES.items() if not options["do_sample"]}
    assert set(results) == expected

    for (batch, mode, method), one in results.items():
        stock = results[batch, mode, STOCK]
        assert len(one["seconds"]) == 2
        speeds = one["tokens_per_second"]
        assert speeds["min"] <= speeds["median"] <= speeds["max"]
        assert speeds["max"] == pytest.approx(one["tokens"] / min(one["seconds"]))
        assert one["peak_memory_bytes"] > 2**20
        assert 0 <= one["repeated_4grams"] < 1
        ratios = [
            stock_s / s * one["tokens"] / stock["tokens"]
            for stock_s, s in zip(stock["seconds"], one["seconds"], strict=True)
        ]
        assert one["ratio"]["min"] == pytest.approx(min(ratios))
        assert one["ratio"]["max"] == pytest.approx(max(ratios))
        if method == STOCK:
            assert one["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
            assert "tau" not in one
        else:
            assert one["identical"]
            assert one["compared"]["rows"] == 2 * 2  # prompts x repeats
            if not one["compared"]["near_ties"]:
                assert one["tokens"] == stock["tokens"]
        if method == OURS:
            # Every token but each row's first, which the prefill gives, was committed by a round.
            assert one["tau"] > 1
            assert sum(one["accepted_per_depth"]) > 0
            assert 0 < one["acceptance_rate"] < 1
            assert set(one["round_ms"]) == {"draft", "grow", "verify", "walk", "commit", "rest"}
            whole = sum(one["round_ms"].values()) * one["rounds"] / 1000 + one["prefill_seconds"]
            assert whole == pytest.approx(sum(one["seconds"]))
            forward = one["round_ms"]["draft"] + one["round_ms"]["verify"]
            assert one["not_forward"] == pytest.approx(1 - forward / sum(one["round_ms"].values()))
