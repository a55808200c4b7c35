"""A diffusion drafter for the demo pair's target, and a language model of the same size to compare it with.

    python examples/diffusion_drafter/train.py corpus.bin regenerated runs/diffusion
    python examples/diffusion_drafter/train.py corpus.bin regenerated runs/lm --kind lm

Both have two layers as wide as the target's and read and write tokens through its embeddings, which stay as they are;
both see the same rows in the same order. `diffusion` fills in masked blocks (`DiffusionTrainer`), `lm` predicts the
next token (stock `Trainer`) and drafts as `assistant_model=`. The data are those of `examples/demo_pair`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM, Trainer, TrainingArguments

from hf_dart import DiffusionDrafter
from hf_dart.training import DataArguments, DiffusionTrainer, DiffusionTrainingArguments, load_rows
from hf_dart.training.blocks import document_positions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="uint16 token ids, as demo_pair/corpus.py writes them")
    parser.add_argument("regenerated", type=Path, help="the target's own text, of hf-dart regenerate")
    parser.add_argument("output", type=Path)
    parser.add_argument("--kind", choices=("diffusion", "lm"), default="diffusion")
    parser.add_argument("--target", default="hf_dart/demo_pair/target")
    parser.add_argument("--own-share", type=float, default=0.5, help="of rows: the target's own text")
    parser.add_argument("--max-steps", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=257, help="tokens of a row")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--no-bf16", action="store_true")
    diffusion = parser.add_argument_group("diffusion")
    diffusion.add_argument("--draft-length", type=int, default=8)
    diffusion.add_argument("--anchors", type=int, default=24, help="blocks per row")
    diffusion.add_argument("--revealed-share", type=float, default=0.5, help="of blocks: those with tokens revealed")
    diffusion.add_argument("--loss", default="left_to_right", help="of the other blocks")
    diffusion.add_argument("--feature-layers", type=int, nargs="*", default=[], help="of the target; none by default")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    data = DataArguments(
        train_data=[str(arguments.corpus), str(arguments.regenerated)],
        shares=[1 - arguments.own_share, arguments.own_share],
        max_length=arguments.length,
        train_on="all",
    )
    rows, _ = load_rows(data, tokenizer, arguments.draft_length)
    settings: dict[str, Any] = {
        "output_dir": str(arguments.output),
        "max_steps": arguments.max_steps,
        "per_device_train_batch_size": arguments.batch_size,
        "learning_rate": arguments.learning_rate,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 50,
        "bf16": not arguments.no_bf16,
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": 50,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    drafter = DiffusionDrafter.from_target(
        target,
        tokenizer=tokenizer,
        target_name="py8m",
        num_layers=arguments.layers,
        draft_length=arguments.draft_length,
        feature_layers=arguments.feature_layers,
    )
    if arguments.kind == "diffusion":
        trainer: Trainer = DiffusionTrainer(
            drafter,
            target,
            DiffusionTrainingArguments(
                **settings,
                loss=arguments.loss,
                revealed_share=arguments.revealed_share,
                anchors_per_row=arguments.anchors,
                loss_chunk=16,
            ),
            train_dataset=rows,
        )
    else:
        lm = small_lm(target, arguments.layers, trained_parameters(drafter))
        settings["remove_unused_columns"] = False
        trainer = Trainer(lm, TrainingArguments(**settings), next_tokens, train_dataset=rows)
    print(f"{trained_parameters(trainer.model):,} parameters are trained", flush=True)
    trainer.train()
    trainer.model.to(torch.bfloat16).save_pretrained(str(arguments.output / "final"))


def trained_parameters(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def small_lm(target: Any, layers: int, parameters: int) -> Qwen3ForCausalLM:
    """The target with fewer layers, new and of so many parameters, behind its own embeddings, which are frozen."""
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


if __name__ == "__main__":
    main()
