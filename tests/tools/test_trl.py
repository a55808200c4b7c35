"""`DrafterCallback` in TRL's own trainers: a run in float64 that is the run without it, step by step."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.sentences import refused
from support.tiny import VOCABULARY, tiny_head, tiny_target
from support.users import letters

from hf_dart import Learner, SuffixStore
from hf_dart.learning.trl import DrafterCallback, _Rollouts

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL's own use of transformers
LOGGED = ("reward", "loss", "grad_norm", "entropy", "eval_reward")


def trainer_of(kind: str, target: Any, folder: Path, texts: list[Any]) -> Any:
    """A trainer of three steps, in two epochs, that rewards the letter a and keeps what was written."""
    from datasets import Dataset

    order = [chr(ord("a") + number) for number in range(VOCABULARY)]
    tokenizer = letters(order)
    tokenizer.pad_token, tokenizer.eos_token = order[0], order[1]

    def reward(completions: list[str], completion_ids: list[list[int]], **known: Any) -> list[float]:
        texts.append(completion_ids)
        return [float(sum(text.count(letter) for letter in order[:8])) for text in completions]

    args = getattr(trl, f"{kind}Config")(
        str(folder), max_steps=3, per_device_train_batch_size=4, per_device_eval_batch_size=4, num_generations=2,
        beta=0.0, max_completion_length=24, learning_rate=1e-2, bf16=False, use_cpu=True, report_to="none",
        logging_steps=1, save_strategy="no", disable_tqdm=True, log_level="error",
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": ["".join(order[2:9]), "".join(order[4:7]), *order[5:7]]})
    made = getattr(trl, f"{kind}Trainer")
    return made(target, reward, args, train_dataset=data, eval_dataset=data.select([0, 1]), processing_class=tokenizer)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@torch.enable_grad()  # which importing lighteval turns off for good
def test_a_run_is_the_one_without_drafts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_dart.learning.learner._LESSON", 64)
    target, taus, runs = tiny_target("qwen3"), [], []
    for drafting in (False, True):
        policy, texts = copy.deepcopy(target), []
        trainer = trainer_of(kind, policy, tmp_path, texts)
        if drafting:
            head, learner, memory = tiny_head(policy), Learner(share=1.0), SuffixStore()
            trainer.add_callback(DrafterCallback(trainer, head, learner=learner, memory=memory))
        trainer.train()
        trainer.evaluate()
        logs = [one for one in trainer.state.log_history if "reward" in one or "eval_reward" in one]
        runs.append((texts, [[one.get(name) for name in LOGGED] for one in logs]))
        taus = [one.get("drafts/tau", one.get("eval_drafts/tau")) for one in logs]
    assert runs[0] == runs[1]
    assert len(taus) == 4
    assert min(taus) > 1
    assert sum(taus) / len(taus) > 1.3
    assert all(one["drafts/seconds"] > 0 for one in logs[:3])
    assert sum(one["drafts/learning_seconds"] for one in logs[:3]) + logs[3]["eval_drafts/learning_seconds"] > 0
    assert learner.failure is None
    assert learner.stats.tokens > 0
    assert memory.tokens > 100


def test_what_is_written_when_nobody_trains_is_not_kept_for_ever() -> None:
    rollouts: Any = _Rollouts()
    for number in range(1000):
        rollouts(SimpleNamespace(stats=number))
    assert rollouts.stats[-1] == 999
    assert len(rollouts.stats) < 1000


def test_rows_of_a_draft_vocabulary_are_the_policys(tmp_path: Path) -> None:
    """Whose weights fused optimizers write to without counting."""
    target = tiny_target("qwen3")
    head = tiny_head(target, draft_vocabulary=range(0, 48, 2))
    callback = DrafterCallback(trainer_of("GRPO", target, tmp_path, []), head)
    hidden = torch.ones(1, head.config.hidden_size, dtype=head.dtype)
    before = head.logits(hidden)
    target.lm_head.weight.data.neg_()
    callback.on_step_end(None, None, None, model=target)
    assert torch.equal(head.logits(hidden), -before)


def test_trainers_whose_rollouts_cannot_be_drafted(tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    trainer, head = trainer_of("GRPO", target, tmp_path, []), tiny_head(target)
    cases: list[tuple[Any, type[Exception], str]] = [
        (object(), TypeError, "GRPOTrainer or RLOOTrainer, not object"),
        (trainer, ValueError, "use_vllm"),
    ]
    trainer.use_vllm = True
    for one, kind, about in cases:
        refused(partial(DrafterCallback, one, head), kind, about)
    assert head.observers == ()
