"""LoRA on a trained head, for a domain: tokens per forward pass of the target before and after.

    python examples/adapt_head.py runs/sympy --package sympy --max-steps 600

The domain is the source of one installed package; every tenth file is held out. The packaged head learns to draft what
the packaged target says about such text; what is saved is the adapter alone, which loads in one line and brings its
head with it. On CPU, 600 steps take about a quarter of an hour on two idle cores; --max-steps 20 shows that it runs.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_dart
from hf_dart import DartHead
from hf_dart.adapters import LoraArguments, apply_lora
from hf_dart.training import DartTrainer, DartTrainingArguments, PackedTokens, tokenize

PAIR = Path(hf_dart.__file__).parent / "demo_pair"
LENGTH = 257  # tokens of a row; 256 real positions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--package", default="sympy", help="an installed package, whose source is the domain")
    parser.add_argument("--target", default=str(PAIR / "target"))
    parser.add_argument("--head", default=str(PAIR / "head"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--evaluation-rows", type=int, default=64, help="of held-out files, for the offline tau")
    parser.add_argument("--prompts", type=int, default=24, help="beginnings of held-out rows to decode in earnest")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    head = DartHead.from_pretrained(arguments.head, target=target, tokenizer=tokenizer)

    files = source_files(arguments.package)
    known, held_out = [file for i, file in enumerate(files) if i % 10], files[::10]
    print(f"{arguments.package}: {len(known)} files to learn from, {len(held_out)} held out")
    rows, held_out_rows = (
        PackedTokens(tokenize(map(text, part), tokenizer), LENGTH, tokenizer.eos_token_id) for part in (known, held_out)
    )
    spread = range(0, len(held_out_rows), max(1, len(held_out_rows) // arguments.evaluation_rows))
    evaluation = torch.utils.data.Subset(held_out_rows, list(spread)[: arguments.evaluation_rows])

    apply_lora(head, LoraArguments(lora_rank=arguments.rank))
    trainer = DartTrainer(
        head,
        target,
        DartTrainingArguments(
            output_dir=str(arguments.output),
            max_steps=arguments.max_steps,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=min(20, arguments.max_steps // 10),
            max_grad_norm=1.0,
            loss_chunk=16,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=arguments.seed,
            decode_prompts=arguments.prompts,
        ),
        train_dataset=rows,
        eval_dataset=evaluation,
    )
    before = trainer.evaluate()  # a new adapter changes nothing yet
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model(str(arguments.output / "adapter"))

    saved = (arguments.output / "adapter" / "adapter_model.safetensors").stat().st_size
    print(f"\nthe adapter: {saved / 1e6:.1f} MB in {arguments.output / 'adapter'}")
    for name, what in (
        ("tau_decoded", "greedy decoding"),
        ("tau", "offline, greedy"),
        ("tau_sampled", "offline, T = 1"),
    ):
        old, new = before[f"eval_{name}"], after[f"eval_{name}"]
        print(f"tau, {what:16} {old:.3f} -> {new:.3f} ({new / old - 1:+.1%})")


def source_files(package: str) -> list[Path]:
    """The Python files of an installed package, in an order that has nothing to do with their names."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"There is no package {package!r} here; install it, or name another with --package.")
    files = sorted(Path(next(iter(spec.submodule_search_locations))).rglob("*.py"))
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    return [files[i] for i in order]


def text(file: Path) -> str:
    return file.read_text(encoding="utf8", errors="replace")


if __name__ == "__main__":
    main()
