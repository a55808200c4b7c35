"""The demo pair's head.

    python examples/demo_pair/train_head.py corpus.bin regenerated runs/head --max-steps 3500

The paper's recipe (one layer, annealed KL with gamma 0.6, d = 8) with four fused layers; 60 % of the rows
are the target's own text, the others the corpus. An interrupted run goes on with the same command.

A head can begin as that of a shallower target from which its own was made (`train_target.py --start-from`); the
layers that it reads are those that took the place of the former ones:

    python examples/demo_pair/train_head.py corpus.bin regenerated runs/deep_head --target runs/deep/model \
        --start-from hf_dart/demo_pair/head --feature-layers 5 10 15 20 --loss tv
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dart import DartConfig, DartHead
from hf_dart.training import DartTrainer, DartTrainingArguments, DataArguments, load_rows
from hf_dart.training.checkpoints import newest_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("regenerated", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--target", default="hf_dart/demo_pair/model")
    parser.add_argument("--target-name", default="py8m")
    parser.add_argument("--own-share", type=float, default=0.6, help="of rows: the target's own text")
    parser.add_argument("--max-steps", type=int, default=3500)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=257, help="tokens of a row; 256 real positions")
    parser.add_argument("--anchors", type=int, default=32)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--draft-length", type=int, default=8)
    parser.add_argument("--feature-layers", type=int, nargs="+", help="default: 2 4 6 8, or those of --start-from")
    parser.add_argument("--loss", default="dart", help="any loss of DartTrainingArguments")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--schedule", default="cosine", help="any lr_scheduler_type of transformers")
    parser.add_argument("--start-from", type=Path, help="train this head on instead of a new one")
    parser.add_argument("--loss-chunk", type=int, default=16)
    parser.add_argument("--save-steps", type=int, default=250)
    parser.add_argument("--logging-steps", type=int, default=50)
    parser.add_argument("--no-bf16", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    if arguments.start_from:
        config = DartConfig.from_pretrained(arguments.start_from)
        if arguments.feature_layers:
            config.feature_layers = arguments.feature_layers
            config.target_num_layers = target.config.num_hidden_layers
            config.target_name = arguments.target_name
        path = str(arguments.start_from)
        head = DartHead.from_pretrained(path, config=config, target=target, tokenizer=tokenizer)
    else:
        head = DartHead.from_target(
            target,
            tokenizer=tokenizer,
            feature_layers=arguments.feature_layers or [2, 4, 6, 8],
            num_layers=arguments.layers,
            draft_length=arguments.draft_length,
            target_name=arguments.target_name,
            draft_window=arguments.length - 1,
        )
    data = DataArguments(
        train_data=[str(arguments.corpus), str(arguments.regenerated)],
        shares=[1 - arguments.own_share, arguments.own_share],
        max_length=arguments.length,
        train_on="all",
    )
    rows, _ = load_rows(data, tokenizer, head.draft_length)
    trainer = DartTrainer(
        head,
        target,
        DartTrainingArguments(
            output_dir=str(arguments.output),
            max_steps=arguments.max_steps,
            per_device_train_batch_size=arguments.batch_size,
            anchors_per_row=arguments.anchors,
            loss=arguments.loss,
            loss_chunk=arguments.loss_chunk,
            learning_rate=arguments.learning_rate,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            lr_scheduler_type=arguments.schedule,
            warmup_steps=100,
            bf16=not arguments.no_bf16,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=arguments.logging_steps,
            save_steps=arguments.save_steps,
            save_total_limit=3,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows,
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(arguments.output))
    head.to(torch.bfloat16).save_pretrained(str(arguments.output / "head"))


if __name__ == "__main__":
    main()
