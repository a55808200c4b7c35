"""A small EAGLE-3 head for the packaged target, on a CPU.

    python examples/eagle3_head.py runs/eagle3 --text FOLDER --own runs/own

It trains on Python source in FOLDER, such as the standard library's, and, which matters more, on the target's own
continuations of it (what `hf-dart regenerate` wrote), and writes OUT/run/final, which `hf_dart.load_drafter` reads. The
same command continues an interrupted run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dart import EagleDrafter
from hf_dart.training import DataArguments, EagleTrainer, EagleTrainingArguments, load_rows
from hf_dart.training.checkpoints import newest_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="a folder of Python source")
    parser.add_argument("--own", type=Path, help="what hf-dart regenerate wrote: 60 %% of the rows")
    parser.add_argument("--target", default="hf_dart/demo_pair/model")
    parser.add_argument("--max-steps", type=int, default=1500)
    parser.add_argument("--draft-length", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    drafter = EagleDrafter.from_target(target, tokenizer=tokenizer, draft_length=arguments.draft_length)
    sources = [f"{arguments.text}/*.py", *([str(arguments.own)] if arguments.own else [])]
    data = DataArguments(
        train_data=sources,
        shares=[0.4, 0.6] if arguments.own else None,
        max_length=193,
        train_on="all",
    )
    rows, _ = load_rows(data, tokenizer, drafter.draft_length)
    run = arguments.output / "run"
    trainer = EagleTrainer(
        drafter,
        target,
        EagleTrainingArguments(
            output_dir=str(run),
            max_steps=arguments.max_steps,
            per_device_train_batch_size=4,
            anchors_per_row=12,
            learning_rate=2e-3,
            adam_beta2=0.95,
            lr_scheduler_type="cosine",
            warmup_steps=40,
            logging_steps=50,
            save_steps=100,
            save_total_limit=2,
            report_to="none",
        ),
        train_dataset=rows,
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(run))
    trainer.save_model(str(run / "final"))


if __name__ == "__main__":
    main()
