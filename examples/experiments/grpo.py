"""Training by GRPO (TRL) on a packaged pair, with drafts and without: the same run, and what it takes.

    python examples/experiments/grpo.py --json model_cards/learning/grpo.json
    python examples/experiments/grpo.py --bf16 --steps 10

The target is trained from the same weights and seed with each way to draft. Rollouts begin with pieces of Python
files, or with questions, one of them a step, and every epoch has each once; the reward is the share of distinct words.
Completions, rewards, losses and norms of gradients are compared with those of training without drafts, step by step.
Times are processor time; learning is a share of the time of rollouts.

With `--bf16` (TRL's default, bfloat16 autocast) every rollout is written three times with one seed: by stock, drafted,
and by stock with longer padding, which groups its arithmetic otherwise. Rows that differ from the first are counted,
and how far apart stock's own two choices were where they part first.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from learning import python_tokens
from torch.nn.functional import pad
from trl import GRPOConfig, GRPOTrainer

from hf_dart import Learner, SuffixStore, attach
from hf_dart.bench import exact
from hf_dart.bench.pair import Pair, load_pair
from hf_dart.hub.machine import circumstances
from hf_dart.learning.trl import DrafterCallback

DEEP = Path(__file__).parents[1] / "deep_pair"
WAYS: dict[str, dict[str, Any]] = {
    "undrafted": {},
    "the head as it is": {},
    "a head that learns, a memory": {"learner": Learner, "memory": SuffixStore},
}
LOGGED = ("reward", "loss", "grad_norm", "entropy")
PARTS = 4  # of a run, for each of which tau is shown


def distinct_words(completions: list[str], **known: Any) -> list[float]:
    """Reward of completions: their share of distinct words."""
    return [len({*text.split()}) / max(len(text.split()), 1) for text in completions]


def made(given: argparse.Namespace, folder: str) -> tuple[Pair, GRPOTrainer]:
    """A pair from its files, and a trainer of its target."""
    pair = load_pair(given.target, given.head, dtype="float32")
    pair.tokenizer.pad_token = pair.tokenizer.pad_token or pair.tokenizer.eos_token
    if given.questions:
        asked = [json.loads(line)["question"] for line in given.questions.read_text(encoding="utf8").splitlines()]
        texts = [f"Question: {question}\nAnswer:" for question in asked[: given.prompts]]
    else:
        texts = [pair.tokenizer.decode(row[:32]) for row in python_tokens(pair.tokenizer)[: given.prompts]]
    data = Dataset.from_dict({"prompt": texts})
    args = GRPOConfig(
        folder,
        max_steps=given.steps,
        per_device_train_batch_size=given.rows,
        num_generations=given.rows,
        max_completion_length=given.new_tokens,
        temperature=given.temperature,
        learning_rate=given.rate,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        bf16=given.bf16,
        use_cpu=True,
        log_level="error",
    )
    return pair, GRPOTrainer(pair.model, distinct_words, args, train_dataset=data, processing_class=pair.tokenizer)


def train(way: str, given: argparse.Namespace) -> dict[str, Any]:
    """Train once: the texts, what was logged of each step, and times."""
    texts: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        pair, trainer = made(given, folder)
        if way != "undrafted":
            more = {name: kind() for name, kind in WAYS[way].items()}
            trainer.add_callback(DrafterCallback(trainer, pair.head, **more))
        written, seconds = trainer.model.generate, 0.0

        def timed(**kwargs: Any) -> Any:
            nonlocal seconds
            began = time.process_time()
            texts.append(written(**kwargs))
            seconds += time.process_time() - began
            return texts[-1]

        trainer.model.generate = timed
        began = time.process_time()
        trainer.train()
        whole = time.process_time() - began
    steps = [one for one in trainer.state.log_history if "reward" in one]
    return {"texts": texts, "steps": steps, "rollouts": seconds, "whole": whole}


def compared(found: dict[str, Any], stock: dict[str, Any]) -> dict[str, Any]:
    """What drafts brought, and in how many steps they gave the same."""
    steps, firsts = found["steps"], stock["steps"]
    texts = zip(found["texts"], stock["texts"], strict=True)
    size = -(-len(steps) // PARTS)
    drafted = [one for one in steps if "drafts/tau" in one]  # not where all completions end at once
    taus, drafting = [one["drafts/tau"] for one in drafted], sum(one["drafts/seconds"] for one in drafted)
    return {
        "steps": len(steps),
        "same": {
            "completions": sum(torch.equal(*both) for both in texts),
            **{name: sum(a[name] == b[name] for a, b in zip(steps, firsts, strict=True)) for name in LOGGED},
        },
        "tau": [round(sum(part) / len(part), 2) for at in range(0, len(taus), size) if (part := taus[at : at + size])],
        "rollouts": round(stock["rollouts"] / found["rollouts"], 2),
        "whole": round(stock["whole"] / found["whole"], 2),
        "share of rollouts": round(stock["rollouts"] / stock["whole"], 2),
        "learning": round(sum(one.get("drafts/learning_seconds", 0.0) for one in steps) / drafting, 3),
        "reward": [round(sum(one["reward"] for one in part) / len(part), 3) for part in (steps[:size], steps[-size:])],
    }


def near_ties(given: argparse.Namespace) -> dict[str, Any]:
    """Train with each rollout written three times; how many rows differ, and by which gaps."""
    rows, gaps = 0, {"drafted": [], "stock, padded": []}
    with tempfile.TemporaryDirectory() as folder:
        pair, trainer = made(given, folder)
        attached = attach(pair.model).generate

        def thrice(**kwargs: Any) -> Any:
            nonlocal rows
            trainer.model.generate = attached
            state = torch.get_rng_state()
            inputs = {name: kwargs.pop(name) for name in ("input_ids", "attention_mask")}
            longer = {name: pad(one, (8, 0)) for name, one in inputs.items()}
            options = {**{name: value for name, value in kwargs.items() if value is not None}, "assistant": None}
            stock = exact.run(pair.model, inputs, options, seed=rows)
            padded = exact.run(pair.model, longer, options, seed=rows)
            others = {
                "drafted": exact.run(pair.model, inputs, {**options, "assistant": pair.head}, seed=rows),
                "stock, padded": replace(padded, inputs=inputs, sequences=padded.sequences[:, 8:]),
            }
            for name, other in others.items():
                gaps[name] += [one for one in exact.differences(stock, other) if one is not None]
            rows += len(stock.sequences)
            torch.set_rng_state(state)
            trainer.model.generate = thrice
            return stock.sequences

        trainer.model.generate = thrice
        trainer.train()
    figures = {
        name: {
            "rows that differ": len(found),
            "near-ties": sum(one.near_tie for one in found),
            "largest gap": round(max((one.gap for one in found), default=0.0), 3),
            "allowed there": max((one.allowed for one in found), default=0.0),
        }
        for name, found in gaps.items()
    }
    return {"steps": given.steps, "rows": rows, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(DEEP / "model"), help="folder (default: the deep pair's)")
    parser.add_argument("--head", default=str(DEEP / "head"), help="folder of its head (default: the deep pair's)")
    parser.add_argument("--questions", type=Path, help="JSON lines with a `question` each, as GSM8K's, for prompts")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=8, help="steps of an epoch (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=2, help="completions of a prompt (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=96, help="of a completion (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of rollouts (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-4, help="of GRPO's steps (default: %(default)s)")
    parser.add_argument("--bf16", action="store_true", help="count near-ties under bfloat16 autocast")
    parser.add_argument("--json", type=Path, help="file of figures, in which those of this run are replaced")
    given = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # TRL's own use of transformers
    torch.set_num_threads(1)
    if given.bf16:
        found = {"bfloat16": near_ties(given)}
    else:
        runs = {way: train(way, given) for way in WAYS}
        found = {way: compared(run, runs["undrafted"]) for way, run in runs.items() if way != "undrafted"}
    found |= circumstances(["python", *sys.argv], torch.device("cpu"), ("trl",))
    print(json.dumps(found, indent=1))
    if given.json is not None:
        kept = json.loads(given.json.read_text()) if given.json.exists() else {}
        given.json.write_text(json.dumps({**kept, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
