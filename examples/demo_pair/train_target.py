"""How the demo pair's target was trained: a small language model of Python source, from nothing.

    python examples/demo_pair/train_target.py runs/target

A byte-level BPE of 6144 tokens and a Qwen3 of 8 layers and 7.9 M parameters, AdamW with a peak of 1.5e-3 and
a cosine, 8 rows of 512 tokens a step: about 75 minutes on two CPU cores for a held-out loss of 2.9 nats a
token. The packages in `corpus.HELD_OUT` are never read. The packaged weights came from an earlier form of
this script, so a new run gives a target of the same kind, not the same numbers.

A smaller one beside it, with the same tokenizer and from the same corpus:

    python examples/demo_pair/train_target.py runs/small --tokenizer hf_dart/demo_pair/target --corpus runs/corpus.bin \
        --hidden-size 128 --layers 4 --max-steps 1500
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from corpus import PACKAGES, source_files, texts, write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_dart.training import PackedTokens
from hf_dart.training.objective.blocks import document_positions

VOCABULARY = 6144


def train_tokenizer(files: list[Path]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the end-of-text token at 0 and padding at 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(files), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>", model_max_length=2048
    )


def collate(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows of packed documents: positions start again with each; no token is predicted from another one."""
    ids = torch.stack([row["input_ids"] for row in rows])
    positions = document_positions(torch.stack([row["documents"] for row in rows]))
    padding = torch.stack([row["documents"] for row in rows]) < 0
    labels = ids.masked_fill((positions == 0) | padding, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--max-steps", type=int, default=4000)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--max-files", type=int, help="of the corpus, when it is made")
    parser.add_argument("--tokenizer", help="a model whose tokenizer is taken in place of a new one")
    parser.add_argument("--corpus", type=Path, help="take this one, of that tokenizer, in place of a new one")
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="for CPUs without bfloat16 instructions")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()

    if (arguments.tokenizer is None) != (arguments.corpus is None):
        parser.error("--tokenizer and --corpus go together: a corpus holds the ids of one tokenizer")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.corpus is None:
        files = source_files(PACKAGES)[: arguments.max_files]
        tokenizer = train_tokenizer(files[:3000])
        corpus = arguments.output / "corpus.bin"
        write(files, tokenizer, corpus)
    else:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        corpus = arguments.corpus

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden_size,
        intermediate_size=3 * arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden_size // 64,
        num_key_value_heads=arguments.hidden_size // 128,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(arguments.output / "checkpoints"),
            max_steps=arguments.max_steps,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=1.5e-3,
            adam_beta2=0.95,
            lr_scheduler_type="cosine",
            warmup_steps=100,
            bf16=arguments.bf16,
            remove_unused_columns=False,  # `documents` is for the collator
            use_cpu=not torch.cuda.is_available(),
            logging_steps=50,
            save_steps=500,
            save_total_limit=2,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=PackedTokens(np.fromfile(corpus, np.uint16), arguments.length, config.eos_token_id),
        data_collator=collate,
    )
    trainer.train()
    model.to(torch.bfloat16).save_pretrained(arguments.output / "target")
    tokenizer.save_pretrained(arguments.output / "target")


if __name__ == "__main__":
    main()
