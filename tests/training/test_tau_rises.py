"""A few dozen steps teach a head to draft: on held-out text of its target, offline and in earnest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_training import VOCABULARY, tiny_head, tiny_target, tiny_trainer
from torch import Tensor

from hf_dart import TreeConfig
from hf_dart.training import DecodingCallback

PROMPT, LENGTH = 4, 40


def own_text(rows: int, seed: int) -> list[dict[str, Tensor]]:
    """Rows that the tiny target wrote itself, greedily."""
    target = tiny_target()
    torch.manual_seed(seed)
    prompts = torch.randint(2, VOCABULARY, (rows, PROMPT))
    written = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=LENGTH - PROMPT,
        eos_token_id=None,
    )
    return [{"input_ids": row, "documents": torch.zeros_like(row)} for row in written]


@pytest.mark.parametrize(("loss", "block_attention"), [("dart", "causal"), ("left_to_right", "bidirectional")])
def test_tau_rises(loss: str, block_attention: str, tmp_path: Path) -> None:
    target = tiny_target()
    head = tiny_head(target, block_attention=block_attention)
    rows, held_out = own_text(48, seed=1), own_text(12, seed=2)
    trainer = tiny_trainer(
        tmp_path, head, target, rows, held_out, loss=loss, max_steps=50, per_device_train_batch_size=8
    )
    chain = TreeConfig.chain(head.draft_length)
    prompts = [row["input_ids"][:PROMPT] for row in held_out[:4]]
    trainer.add_callback(DecodingCallback(trainer, prompts, max_new_tokens=32, tree_config=chain))
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    for figure in ("eval_tau", "eval_tau_decoded"):
        assert before[figure] < 1.2
        assert after[figure] > before[figure] + 0.25
