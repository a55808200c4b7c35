"""What many tests run: ways to decode, batches of prompts, a drafter that is mostly right."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from support.compare import stock_run
from support.tiny import VOCABULARY, WINDOW, ReplayDrafter, prompts

FAMILIES = ["llama", "qwen3", "gemma3", "mistral", "gpt2", "qwen3_moe", "deepseek_v3"]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "T=1": {"do_sample": True, "top_k": 0},
    "top-p, penalty": {"do_sample": True, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.2},
    "several EOS": {"do_sample": True, "temperature": 0.7, "eos_token_id": [3, 11, 19, 27], "pad_token_id": 0},
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "T=1": {"do_sample": True, "top_k": 0},
    "T=.7, top-k": {"do_sample": True, "temperature": 0.7, "top_k": 12},
    "top-p": {"do_sample": True, "top_k": 0, "top_p": 0.8},
    "min-p": {"do_sample": True, "top_k": 0, "min_p": 0.05},
    "typical": {"do_sample": True, "top_k": 0, "typical_p": 0.8},
    "epsilon": {"do_sample": True, "top_k": 0, "epsilon_cutoff": 0.02},
    "eta": {"do_sample": True, "top_k": 0, "eta_cutoff": 0.02},
    "top-h": {"do_sample": True, "top_k": 0, "top_h": 0.5},
}
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 24}
GREEDY = {"do_sample": False, "max_new_tokens": 24}


def batch(size: int, attention: str) -> dict[str, Tensor]:
    """Prompts that begin inside the sliding window and end after it."""
    if size == 1:
        return prompts([7])
    # Under eager attention stock itself gives NaN for padded rows in float64: its softmax is in fp32.
    return prompts([WINDOW - 1] * 4 if attention == "eager" else [9, 3, 7, 13])


def replay(
    model: Any, inputs: dict[str, Tensor], *, misses: list[float], seed: int = 0, draft_length: int = 6, **options: Any
) -> ReplayDrafter:
    """A drafter that knows stock's answer and misses a share of it, per row."""
    pads = (inputs["attention_mask"] == 0).sum(-1).tolist()
    sequences = stock_run(model, inputs, seed, options).sequences
    return ReplayDrafter(sequences, pads, VOCABULARY, misses=misses, draft_length=draft_length)
