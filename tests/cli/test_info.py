"""`hf-dart info`: what is known of a model, by its config alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.sentences import assert_command_says
from transformers import LlamaConfig, T5Config

from hf_dart.cli import main


def test_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "packaged"]) == 0
    told = capsys.readouterr().out
    assert "qwen3, 8 layers of 256, 6144 tokens\nfits: " in told
    assert "by architecture and sizes" not in told
    assert "best first:\n  packaged (model_cards/demo_pair)\n" in told
    LlamaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=100).save_pretrained(tmp_path / "llama")
    assert main(["info", str(tmp_path / "llama")]) == 0
    told = capsys.readouterr().out
    assert "published: nothing that is known here" in told
    assert f"hf-dart train --target {tmp_path / 'llama'} --train_data" in told
    T5Config(num_layers=2).save_pretrained(tmp_path)
    for folder, says in ((tmp_path, "is a t5, no causal language"), (tmp_path / "none", "Cannot read the config")):
        assert_command_says(["info", str(folder)], says, capsys)
