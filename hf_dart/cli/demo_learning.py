"""`hf-dart demo --learn`: the packaged target is fine-tuned, its head drafts worse, and learns from what it drafts."""

from __future__ import annotations

import random
import sysconfig
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_dart.bench.pair import Pair
from hf_dart.errors import UserError

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 0}
TREE: dict[str, Any] = {"nodes": 24, "depth": 4, "top_k": 24, "lookup": 0}
"""Every round has a tree of one size, whether that pays here or not: what changes is the head alone."""
_TUNING, _SERVING = 20.0, 30.0  # seconds
_ROWS, _NEW = 8, 64  # texts that are written at a time, and tokens of each
PIECE = 128  # tokens of a text


def demo(pair: Pair, show: Callable[[str], object] = print) -> bool:
    """Run the demo and print it with `show`, line by line; return True if the text drafted in the end is stock's."""
    from hf_dart import Learner, TreeConfig, attach
    from hf_dart.bench import speed
    from hf_dart.hub.tables import OURS, Verdict

    rows = header_tokens(pair.tokenizer)
    prompts = [row[:64] for row in rows[:96]]
    before, others = prompts[:16], prompts[16:]
    show("C++ headers that come with PyTorch, sampled at T=0.7, 8 texts at a time")
    show(f"tau of the packaged pair: {served(pair, before).tau:.2f}")
    first, last = fine_tune(pair.model, rows[96:], _TUNING)
    show(f"the target is fine-tuned on such headers by LoRA: its loss falls from {first:.2f} to {last:.2f}")
    show(f"tau of the head, which was trained for the target as it was: {served(pair, before).tau:.2f}")
    learner = Learner(share=1.0)  # as long as calls take, so that the demo is short
    attach(pair.model, pair.head, learner=learner)
    began = time.perf_counter()
    for start in range(0, 10**6, _ROWS):
        tau = served(pair, [others[(start + row) % len(others)] for row in range(_ROWS)], seed=start).tau
        show(f"tau {tau:.2f} in this call; {learner.stats}")
        if time.perf_counter() - began > _SERVING:
            break
    learner.pause()
    show(f"tau on the texts above: {served(pair, before).tau:.2f}")
    settings = speed.Settings(2, 64, _NEW, repeats=1, batches=(1,))
    drafting = {OURS: {"assistant": pair.head, "tree_config": TreeConfig(**TREE)}}
    measured = speed.measure(pair, before[:2], settings, drafting, {"sampled": SAMPLED})
    verdict = sum((one.verdict for one in measured), Verdict())
    show(f"identical: {verdict}")
    return verdict.identical


def served(pair: Pair, prompts: list[list[int]], seed: int = 0, new_tokens: int = _NEW) -> Any:
    """Let the head draft for some prompts of one length, `_ROWS` at a time; returns the `DraftStats`."""
    import torch

    from hf_dart.decoding.stats import DraftStats
    from hf_dart.trees.config import TreeConfig

    found = DraftStats()
    options = {**SAMPLED, "max_new_tokens": new_tokens, "assistant": pair.head, "tree_config": TreeConfig(**TREE)}
    for start in range(0, len(prompts), _ROWS):
        ids = torch.tensor(prompts[start : start + _ROWS])
        torch.manual_seed(seed + start)
        pair.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.merge(pair.head.last_stats)
    return found


def header_tokens(tokenizer: Any) -> list[list[int]]:
    """Pieces of the C++ headers of PyTorch, of `PIECE` tokens, each of another file, in an order of their own."""
    files = sorted(Path(sysconfig.get_path("purelib"), "torch", "include").rglob("*.h"))
    random.Random(0).shuffle(files)
    texts = (file.read_text(encoding="utf8", errors="replace")[:8000] for file in files[:800])
    tokens = (tokenizer(text, verbose=False)["input_ids"] for text in texts)
    pieces = [ids[PIECE : 2 * PIECE] for ids in tokens if len(ids) >= 2 * PIECE]  # licences stand in front
    if len(pieces) < 200:
        raise UserError("The demo fine-tunes on the C++ headers of PyTorch, which are not installed here.")
    return pieces


def fine_tune(model: Any, rows: list[list[int]], seconds: float) -> tuple[float, float]:
    """Change a target by LoRA, merged into its weights, for so long; returns its mean loss at first and in the end."""
    import torch
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers for a name that is going to change
        torch.manual_seed(0)
        adapted = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")).train()
    weights = [weight for weight in adapted.parameters() if weight.requires_grad]
    optimizer, began = torch.optim.AdamW(weights, lr=2e-3), time.perf_counter()
    losses: list[float] = []
    while time.perf_counter() - began < seconds:
        ids = torch.tensor([rows[(8 * len(losses) + row) % len(rows)] for row in range(8)])
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    adapted.merge_and_unload().eval()
    return losses[0], sum(losses[-3:]) / len(losses[-3:])
