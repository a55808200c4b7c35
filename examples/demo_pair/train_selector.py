"""The selector of the demo pair's head, trained on the frozen head.

    python examples/demo_pair/train_selector.py runs/head/head corpus.bin regenerated runs/selector
    python examples/demo_pair/train_selector.py runs/head/head corpus.bin regenerated runs/markov --kind markov

The second one is a Markov head: one low-rank matrix of token pairs, whatever the context.
`examples/experiments/drafts.py --others runs/markov/head` puts them side by side. Rows are mixed as for the head
(`train_head.py`); 15 minutes on one CPU core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dart import DartHead
from hf_dart.training import DartTrainer, DartTrainingArguments, DataArguments, load_rows
from hf_dart.training.checkpoints import newest_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("regenerated", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--target", default="hf_dart/demo_pair/model")
    parser.add_argument("--own-share", type=float, default=0.6, help="of rows: the target's own text")
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--kind", choices=["bigram", "markov"], default="bigram")
    parser.add_argument("--max-steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=257, help="tokens of a row; 256 real positions")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="for CPUs without bfloat16 instructions")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    head = DartHead.from_pretrained(str(arguments.head), target=target)
    if head.selector is None or head.config.selector_kind != arguments.kind:  # else it is trained on
        head.add_selector(arguments.rank, kind=arguments.kind)
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
            anchors_per_row=32,
            selector_only=True,
            gamma=0.8,  # the selector has most to say where the head alone knows least
            learning_rate=2e-3,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            lr_scheduler_type="cosine",
            warmup_steps=50,
            bf16=arguments.bf16,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=50,
            save_steps=250,
            save_total_limit=2,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows,
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(arguments.output))
    head.to(torch.bfloat16).save_pretrained(str(arguments.output / "head"))


if __name__ == "__main__":
    main()
