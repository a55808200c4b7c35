"""How the demo pair's target was trained: a small language model of Python source, from nothing.

    python examples/demo_pair/train_target.py runs/target

A byte-level BPE of 6144 tokens and a Qwen3 of 8 layers and 7.9 M parameters, AdamW with a peak of 1.5e-3 and
a cosine, 8 rows of 512 tokens a step: about 75 minutes on two CPU cores for a held-out loss of 2.9 nats a
token. The packages in `corpus.HELD_OUT` are never read. The packaged weights came from an earlier form of
this script, so a new run gives a target of the same kind, not the same numbers.

A smaller one beside it, with the same tokenizer and from the same corpus:

    python examples/demo_pair/train_target.py runs/small --tokenizer hf_dart/demo_pair/model --corpus runs/corpus.bin \
        --hidden-size 128 --layers 4 --max-steps 1500

That of the deep pair, which begins as the packaged target with layers put between its own that change nothing at
first, and goes on where it stopped:

    python examples/demo_pair/train_target.py runs/deep --start-from hf_dart/demo_pair/model --corpus runs/wide.bin \
        --layers 20 --optimizer muon --learning-rate 1e-3 --max-steps 900 --save-steps 100 --seed 1
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import PACKAGES, held_out_files, source_files, texts, write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Subset
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_dart.training import PackedTokens
from hf_dart.training.data.packing import tokenize
from hf_dart.training.objective.blocks import document_positions

VOCABULARY = 6144
EVALUATED = 96  # rows of held-out text


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


class HiddenMuon(torch.optim.Optimizer):
    """Muon for the matrices between the embeddings, AdamW for the embeddings and all vectors, as one optimizer.

    Muon (K. Jordan, 2024) learns more of the same tokens than AdamW: its update of a matrix is orthogonalized.
    """

    def __init__(self, model: torch.nn.Module, rate: float) -> None:
        named = list(model.named_parameters())
        hidden = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        rest = [p for name, p in named if not (p.ndim == 2 and "embed" not in name)]
        self.parts = (
            torch.optim.Muon(hidden, rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, rate, betas=(0.9, 0.95), weight_decay=0.0),
        )
        super().__init__([p for _, p in named], {"lr": rate})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: None = None) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class StopAfter(TrainerCallback):
    """Saves and ends the training after so many minutes; the same command goes on there."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if time.monotonic() > self.end:
            control.should_save = control.should_training_stop = True


def new_model(arguments: argparse.Namespace, tokenizer: Any) -> Qwen3ForCausalLM:
    """Random weights of the size that was asked for."""
    return Qwen3ForCausalLM(
        Qwen3Config(
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
    )


def deepened(shallow: Qwen3ForCausalLM, layers: int) -> Qwen3ForCausalLM:
    """`shallow` with `layers` layers, computing the same (LLaMA Pro, arXiv 2401.02415, section 3).

    After each of its layers come copies of it, as evenly as can be, whose two output projections are zero.
    """
    own = shallow.config.num_hidden_layers
    if layers < own:
        raise ValueError(f"The model has {own} layers already; ask for more of them than that.")
    config = copy.deepcopy(shallow.config)
    config.num_hidden_layers = layers
    config.layer_types = [config.layer_types[0]] * layers
    deep = Qwen3ForCausalLM(config).to(shallow.dtype)
    around = {name: weight for name, weight in shallow.state_dict().items() if ".layers." not in name}
    deep.load_state_dict(around, strict=False)
    for index, layer in enumerate(deep.model.layers):
        source = index * own // layers
        layer.load_state_dict(shallow.model.layers[source].state_dict())
        if index and (index - 1) * own // layers == source:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return deep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--max-steps", type=int, default=4000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="save and stop after so many")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--schedule", default="cosine", help="any lr_scheduler_type of transformers")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--seed", type=int, default=0, help="another one gives the rows another order")
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--start-from", help="train this model on, with --layers layers, in place of a new one")
    parser.add_argument("--max-files", type=int, help="of the corpus, when it is made")
    parser.add_argument("--tokenizer", help="a model whose tokenizer is taken in place of a new one")
    parser.add_argument("--corpus", type=Path, help="take this one, of that tokenizer, in place of a new one")
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="for CPUs without bfloat16 instructions")
    parser.add_argument("--save-steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()

    source = arguments.tokenizer or arguments.start_from
    if (source is None) != (arguments.corpus is None):
        parser.error("--corpus goes with --tokenizer or --start-from: a corpus holds the ids of one tokenizer")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.corpus is None:
        files = source_files(PACKAGES)[: arguments.max_files]
        tokenizer = train_tokenizer(files[:3000])
        corpus = arguments.output / "corpus.bin"
        write(files, tokenizer, corpus)
    else:
        tokenizer = AutoTokenizer.from_pretrained(source)
        corpus = arguments.corpus

    if arguments.start_from:
        model = deepened(Qwen3ForCausalLM.from_pretrained(arguments.start_from, dtype=torch.float32), arguments.layers)
    else:
        model = new_model(arguments, tokenizer)
    checkpoints = arguments.output / "checkpoints"
    optimizer = HiddenMuon(model, arguments.learning_rate) if arguments.optimizer == "muon" else None
    held_out = PackedTokens(tokenize(texts(held_out_files()), tokenizer), arguments.length, tokenizer.eos_token_id)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(checkpoints),
            max_steps=arguments.max_steps,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=arguments.learning_rate,
            adam_beta2=0.95,
            lr_scheduler_type=arguments.schedule,
            warmup_steps=100,
            bf16=arguments.bf16,
            remove_unused_columns=False,  # `documents` is for the collator
            use_cpu=not torch.cuda.is_available(),
            seed=arguments.seed,
            logging_steps=50,
            eval_strategy="steps",
            eval_steps=arguments.save_steps,
            save_steps=arguments.save_steps,
            save_total_limit=2,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=PackedTokens(np.fromfile(corpus, np.uint16), arguments.length, tokenizer.eos_token_id),
        eval_dataset=Subset(held_out, range(min(EVALUATED, len(held_out)))),
        data_collator=collate,
        optimizers=(optimizer, None),
        callbacks=[StopAfter(arguments.minutes)],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(checkpoints) if checkpoints.exists() else None)
    model.config.use_cache = True  # the Trainer switches it off
    model.to(torch.bfloat16).save_pretrained(arguments.output / "model")
    tokenizer.save_pretrained(arguments.output / "model")


if __name__ == "__main__":
    main()
