"""A few dozen steps teach a head to draft: on held-out text of its target, offline and in earnest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import HYBRIDS
from support.tiny_training import tiny_head, tiny_target, tiny_trainer
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_dart import DartHead, TreeConfig, attach
from hf_dart.training import DecodingCallback

PROMPT, LENGTH = 4, 40


def own_text(target: Any, rows: int, seed: int) -> list[dict[str, Tensor]]:
    """Rows that a target wrote itself, greedily."""
    torch.manual_seed(seed)
    prompts = torch.randint(2, target.config.vocab_size, (rows, PROMPT))
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
    assert_tau_rises(target, tiny_head(target, block_attention=block_attention), tmp_path, loss)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["nemotron_h", "mamba2"])
def test_tau_rises_on_running_states(family: str, tmp_path: Path) -> None:
    """The text of such random targets is simpler if their weights are smaller than those of `support.tiny`."""
    kind, fields = HYBRIDS[family]
    torch.manual_seed(3)
    fields = {**fields, "initializer_range": 0.3, "tie_word_embeddings": True, "eos_token_id": 0, "pad_token_id": 1}
    target = attach(AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields)).eval())
    assert_tau_rises(target, tiny_head(target, feature_layers=[0, 1, 2]), tmp_path, "dart", untrained=1.3)


def assert_tau_rises(target: Any, head: DartHead, folder: Path, loss: str, untrained: float = 1.2) -> None:
    rows, held_out = own_text(target, 48, seed=1), own_text(target, 12, seed=2)
    trainer = tiny_trainer(folder, head, target, rows, held_out, loss=loss, max_steps=50, per_device_train_batch_size=8)
    chain = TreeConfig.chain(head.draft_length)
    prompts = [row["input_ids"][:PROMPT] for row in held_out[:4]]
    trainer.add_callback(DecodingCallback(trainer, prompts, max_new_tokens=32, tree_config=chain))
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    for figure in ("eval_tau", "eval_tau_decoded"):
        assert before[figure] < untrained
        assert after[figure] > before[figure] + 0.25
