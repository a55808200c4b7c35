"""lm-eval's HFLM, which calls `generate` itself: the same answers as without a head."""

from __future__ import annotations

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dart import DartHead, attach
from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET

PROMPTS = ["import os\n", "def read(path):\n    ", "class Table:\n", "for name in sorted("]
WANTED = {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_generate_until(batch_size: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(PACKAGED_TARGET, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(PACKAGED_TARGET)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    questions = [
        Instance("generate_until", {}, (prompt, dict(WANTED)), number) for number, prompt in enumerate(PROMPTS)
    ]
    stock = harness.generate_until(questions, disable_tqdm=True)
    head = DartHead.from_pretrained(str(PACKAGED_HEAD), target=model)
    attach(model, head)
    assert harness.generate_until(questions, disable_tqdm=True) == stock
    assert any(stock)
    assert head.last_stats is not None
    assert head.last_stats.accepted > 0
