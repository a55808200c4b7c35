"""LoRA on a trained head, for a domain: tokens per forward pass of the target before and after.

    python examples/adapt_head.py runs/headers --package torch --suffix .h --max-steps 300

The domain is all files of one kind in one installed package, such as PyTorch's C++ headers, of which the packaged head,
trained on Python, has seen nothing; every tenth file is held out. The target continues pieces of them in its own words,
greedily and sampled, since that is what a head drafts; the second half of each row is its. What is saved is the adapter
alone, which loads in one line and brings its head with it. On one idle CPU core 300 steps take some five minutes;
--max-steps 20 shows that it runs.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_dart
from hf_dart import DartHead
from hf_dart.hub.machine import hardware, versions
from hf_dart.training import DartTrainer, DartTrainingArguments
from hf_dart.training.run import apply_lora
from hf_dart.training.trainers.arguments import LoraArguments

PAIR = Path(hf_dart.__file__).parent / "demo_pair"
PREFIX = 64  # tokens of the domain's files in a row
LENGTH = 129  # tokens of a row; 128 real positions
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--package", default="torch", help="an installed package, whose files are the domain")
    parser.add_argument("--suffix", default=".h", help="the kind of file")
    parser.add_argument("--target", default=str(PAIR / "model"))
    parser.add_argument("--head", default=str(PAIR / "head"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--rows", type=int, default=1536, help="to learn from")
    parser.add_argument("--evaluation-rows", type=int, default=128, help="of held-out files, for the offline tau")
    parser.add_argument("--prompts", type=int, default=24, help="beginnings of held-out rows to generate from")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    head = DartHead.from_pretrained(arguments.head, target=target, tokenizer=tokenizer)

    files = files_of(arguments.package, arguments.suffix)
    known, held_out = [file for i, file in enumerate(files) if i % 10], files[::10]
    print(f"{arguments.package}, {arguments.suffix}: {len(known)} files to learn from, {len(held_out)} held out")
    half = arguments.rows // 2
    rows = [
        *rows_from(known, arguments.rows - half, head, target, tokenizer, GREEDY),
        *rows_from(known, half, head, target, tokenizer, SAMPLED),
    ]
    greedy, sampled = (
        rows_from(held_out, arguments.evaluation_rows, head, target, tokenizer, way) for way in (GREEDY, SAMPLED)
    )

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
            use_cpu=not torch.cuda.is_available(),
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=arguments.seed,
            decode_prompts=arguments.prompts,
            decode_prompt_tokens=PREFIX,
        ),
        train_dataset=rows,
        eval_dataset=greedy,
    )

    def measured() -> tuple[float, ...]:
        found, by_chance = trainer.evaluate(greedy), trainer.evaluate(sampled)
        return found["eval_tau_decoded"], found["eval_tau"], by_chance["eval_tau_sampled"]

    before = measured()  # a new adapter changes nothing yet
    trainer.train()
    after = measured()
    trainer.save_model(str(arguments.output / "adapter"))

    saved = (arguments.output / "adapter" / "adapter_model.safetensors").stat().st_size
    print(f"\nthe adapter: {saved / 1e6:.1f} MB in {arguments.output / 'adapter'}")
    for what, old, new in zip(("greedy decoding", "offline, greedy", "offline, T = 1"), before, after, strict=True):
        print(f"tau, {what:16} {old:.3f} -> {new:.3f} ({new / old - 1:+.1%})")
    with_what = ", ".join(f"{name} {version}" for name, version in versions().items())
    print(f"float32, {hardware(head.device)}; {with_what}")


def files_of(package: str, suffix: str) -> list[Path]:
    """The files of a kind in an installed package, in an order that has nothing to do with their names."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"There is no package {package!r} here; install it, or name another with --package.")
    files = sorted(Path(next(iter(spec.submodule_search_locations))).rglob(f"*{suffix}"))
    if len(files) < 10:
        raise SystemExit(f"{package} has {len(files)} files that end in {suffix!r}; give another --suffix.")
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    return [files[i] for i in order]


def rows_from(
    files: list[Path], count: int, head: DartHead, target: Any, tokenizer: Any, sampling: dict[str, Any]
) -> list[dict[str, Any]]:
    """Up to `count` rows: a piece of a file, and what the target writes after it, which alone is drafted."""
    pieces: list[list[int]] = []
    for file in files:
        ids = tokenizer(file.read_text(encoding="utf8", errors="replace"), verbose=False)["input_ids"]
        # Licences stand at the beginning; a few pieces of each file, so that all files have their say.
        pieces += [ids[at : at + PREFIX] for at in range(4 * PREFIX, len(ids) - PREFIX, 8 * PREFIX)][:4]
        if len(pieces) >= count:
            break
    rows = []
    for start in range(0, min(count, len(pieces)), 64):
        batch = torch.tensor(pieces[start : min(start + 64, count)], device=target.device)
        options = {"max_new_tokens": LENGTH - PREFIX, "pad_token_id": 0, **sampling}
        with torch.random.fork_rng():
            torch.manual_seed(start)
            texts = target.generate(batch, attention_mask=torch.ones_like(batch), assistant=head, **options).cpu()
        for text in texts:
            ended = (text[PREFIX:] == tokenizer.eos_token_id).nonzero().flatten().tolist()
            inside = torch.arange(LENGTH) < (PREFIX + ended[0] + 1 if ended else len(text))
            ids = torch.where(inside, torch.nn.functional.pad(text, (0, LENGTH - len(text))), 0)
            loss_mask = inside & (torch.arange(LENGTH) >= PREFIX)
            rows.append({"input_ids": ids, "documents": inside.long() - 1, "loss_mask": loss_mask})
    return rows


if __name__ == "__main__":
    main()
