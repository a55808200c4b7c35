"""Drafters of one size for the demo pair's target, trained on the same rows in the same order.

    python examples/diffusion_drafter/train.py corpus.bin regenerated runs/bound --kind bound

`bound`, `left_to_right` and `features` are diffusion drafters (`DiffusionTrainer`): the first learns the diffusion
model's bound, blocks masked at random; the second only to draft in one step, blocks all masked, by the left-to-right
losses; the third both, half and half, and reads the target's hidden states as a DART head does.
`lm` is a language model (stock `Trainer`) that drafts as `assistant_model=`, `dart` a DART head. All have layers as
wide as the target's and read and write tokens through its embeddings, which stay as they are. The data are those of
`examples/demo_pair`. A run that was interrupted goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM, Trainer, TrainingArguments

from hf_dart import DartHead, DiffusionDrafter
from hf_dart.hub.loading import PACKAGED_TARGET
from hf_dart.training import (
    DartTrainer,
    DartTrainingArguments,
    DataArguments,
    DiffusionTrainer,
    DiffusionTrainingArguments,
    load_rows,
)
from hf_dart.training.checkpoints import newest_checkpoint
from hf_dart.training.objective.blocks import document_positions

DIFFUSION: dict[str, dict[str, Any]] = {
    "bound": {"revealed_share": 1.0},
    "left_to_right": {"revealed_share": 0.0, "loss": "left_to_right"},
    "features": {"revealed_share": 0.5, "loss": "left_to_right"},
}
KINDS = ("bound", "lm", "left_to_right", "dart", "features")


@dataclass(frozen=True)
class Plan:
    """What all kinds have in common.

    Attributes:
        corpus: uint16 token ids, as `demo_pair/corpus.py` writes them.
        regenerated: the target's own text, of `hf-dart regenerate` or uint16 token ids.
        own_share: of the rows: the target's own text.
        steps, batch_size, length: of the training: rows a step, tokens a row.
        layers: of each drafter.
        draft_length, blocks: of a draft, and drafts per row.
        text_weight: of the next token's loss at every entry of the text, which diffusion drafters read causally.
    """

    corpus: Path
    regenerated: Path
    target: str = str(PACKAGED_TARGET)
    own_share: float = 0.9
    steps: int = 1500
    batch_size: int = 2
    length: int = 257
    layers: int = 2
    draft_length: int = 8
    blocks: int = 32
    text_weight: float = 1.0
    learning_rate: float = 2e-3
    bf16: bool = False


def train(kind: str, output: Path, plan: Plan) -> None:
    """Train one of `KINDS` into `output / "final"`, unless it is there."""
    final = output / "final"
    if (final / "config.json").is_file():
        return
    target = AutoModelForCausalLM.from_pretrained(plan.target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(plan.target)
    data = DataArguments(
        train_data=[str(plan.corpus), str(plan.regenerated)],
        shares=[1 - plan.own_share, plan.own_share],
        max_length=plan.length,
        train_on="all",
    )
    rows, _ = load_rows(data, tokenizer, plan.draft_length)
    trainer = _trainer(kind, output, plan, target, tokenizer, rows)
    print(f"{kind}: {trained_parameters(trainer.model):,} parameters are trained", flush=True)
    trainer.train(resume_from_checkpoint=newest_checkpoint(output))
    trainer.model.to(torch.bfloat16).save_pretrained(str(final))


def _trainer(kind: str, output: Path, plan: Plan, target: Any, tokenizer: Any, rows: Any) -> Trainer:
    settings: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": plan.steps,
        "per_device_train_batch_size": plan.batch_size,
        "learning_rate": plan.learning_rate,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 50,
        "bf16": plan.bf16,
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": 100,
        "save_steps": 500,
        "save_total_limit": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }
    drafting = {**settings, "anchors_per_row": plan.blocks, "loss_chunk": 16}
    common = {"tokenizer": tokenizer, "target_name": "py8m", "draft_length": plan.draft_length}
    if kind == "dart":
        head = DartHead.from_target(target, **common)
        return DartTrainer(head, target, DartTrainingArguments(**drafting, loss="left_to_right"), train_dataset=rows)
    layers = DartHead.config_class.for_target(target).feature_layers if kind == "features" else []
    drafter = DiffusionDrafter.from_target(target, **common, num_layers=plan.layers, feature_layers=layers)
    if kind == "lm":
        lm = small_lm(target, plan.layers, trained_parameters(drafter))
        plain = TrainingArguments(**settings, remove_unused_columns=False)
        return Trainer(lm, plain, next_tokens, train_dataset=rows)
    arguments = DiffusionTrainingArguments(**drafting, **DIFFUSION[kind], text_weight=plan.text_weight)
    return DiffusionTrainer(drafter, target, arguments, train_dataset=rows)


def trained_parameters(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def small_lm(target: Any, layers: int, parameters: int) -> Qwen3ForCausalLM:
    """The target with fewer layers, new and of so many parameters, after its own embeddings, which are frozen."""
    config = type(target.config)(**{**target.config.to_dict(), "num_hidden_layers": layers, "layer_types": None})
    torch.manual_seed(0)
    missing = parameters - trained_parameters(Qwen3ForCausalLM(config).model.layers)
    config.intermediate_size += missing // (3 * layers * config.hidden_size)
    lm = Qwen3ForCausalLM(config)
    lm.set_input_embeddings(target.get_input_embeddings().requires_grad_(False))
    lm.tie_weights()
    return lm


def next_tokens(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch for a language model: documents apart by their positions, nothing learnt from padding."""
    ids, documents = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "documents"))
    first = document_positions(documents) == 0
    labels = ids.masked_fill(first | (documents < 0), -100)
    return {"input_ids": ids, "position_ids": document_positions(documents), "labels": labels}


def plan_options() -> argparse.ArgumentParser:
    """A parent parser of `Plan`'s fields."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("corpus", type=Path, help="uint16 token ids, as demo_pair/corpus.py writes them")
    parser.add_argument("regenerated", type=Path, help="the target's own text, of hf-dart regenerate")
    for name, kind in (("steps", int), ("batch_size", int), ("blocks", int), ("learning_rate", float)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(Plan, name))
    parser.add_argument("--text-weight", type=float, default=Plan.text_weight)
    parser.add_argument("--target", default=Plan.target)
    parser.add_argument("--bf16", action="store_true", help="for processors with bf16 arithmetic")
    parser.add_argument("--threads", type=int, default=1)
    return parser


def plan_of(arguments: argparse.Namespace) -> Plan:
    return Plan(**{name: value for name, value in vars(arguments).items() if name in Plan.__annotations__})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[plan_options()]
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="bound")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments.kind, arguments.output, plan_of(arguments))


if __name__ == "__main__":
    main()
