"""Training steps against the bare target: tokens per second on the same batch, and memory by blocks per row.

    python examples/experiments/training_cost.py --threads 2 --json training.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peak_memory import peak_bytes, reset_peak
from torch import Tensor

from hf_dart.bench import suites
from hf_dart.bench.exact import timed
from hf_dart.bench.pair import Pair
from hf_dart.bench.report import circumstances, spread
from hf_dart.bench.speed import in_turn
from hf_dart.cli.common import (
    check_file,
    given,
    json_option,
    load,
    pair_options,
    positive,
    say,
    set_threads,
    show,
    sizes,
    text_option,
    write_json,
)
from hf_dart.errors import UserError, read_text
from hf_dart.hub.tables import headline, markdown, ratio
from hf_dart.training import DartTrainer, DartTrainingArguments


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Args:
        rows: B of the batch.
        length: T, tokens of a row.
        blocks: numbers of blocks per row.
        loss: preset of the objective.
        loss_chunk: blocks whose logits are held at a time.
        bf16: bfloat16 autocast, of the bare target as well.
        repeats: how often everything is run.
    """

    rows: int = 8
    length: int = 257
    blocks: tuple[int, ...] = (8, 16, 32, 64)
    loss: str = "dart"
    loss_chunk: int = DartTrainingArguments.loss_chunk
    bf16: bool = False
    repeats: int = 5


@dataclass
class Measurement:
    """A forward pass of the target alone (blocks 0), or a training step.

    Attributes:
        blocks: per row.
        seconds: of each repeat.
        peak: bytes, the highest.
    """

    blocks: int
    seconds: list[float] = field(default_factory=list)
    peak: int = 0


def cut_rows(tokenizer: Any, files: Sequence[Path], count: int, length: int) -> Tensor:
    """[count, length] token ids from the beginning of the files, one after the other.

    Raises:
        UserError: a file cannot be read, or they are too short.
    """
    ids: list[int] = []
    for path in files:
        if len(ids) >= count * length:
            break
        ids += tokenizer(read_text(path), add_special_tokens=False)["input_ids"]
    if len(ids) < count * length:
        raise UserError(f"The text has {len(ids)} tokens for {count} rows of {length}; lower --rows or --length.")
    return torch.tensor(ids[: count * length]).view(count, length)


def measure(
    pair: Pair, ids: Tensor, settings: Settings, progress: Callable[[str], object] = lambda line: None
) -> list[Measurement]:
    """Run the target alone and a step with each number of blocks, in turns.

    Args:
        pair: its head is trained in memory; nothing is saved.
        ids: [B, T].
    """
    with tempfile.TemporaryDirectory() as folder:
        args = DartTrainingArguments(
            folder, loss=settings.loss, loss_chunk=settings.loss_chunk, bf16=settings.bf16, report_to="none"
        )
        trainer = DartTrainer(pair.head.float(), pair.model, args)
    trainer.create_optimizer()
    ids = ids.to(args.device)
    measurements = [Measurement(blocks) for blocks in (0, *settings.blocks)]
    for one in measurements:  # warm-up
        _run(trainer, ids, one)
    for one in measurements:
        one.seconds.clear()
        one.peak = 0
    for repeat in range(settings.repeats):
        progress(f"repeat {repeat + 1} of {settings.repeats}")
        for one in in_turn(measurements, repeat):
            _run(trainer, ids, one)
    return measurements


def _run(trainer: DartTrainer, ids: Tensor, one: Measurement) -> None:
    def target_alone() -> None:
        with torch.no_grad(), trainer.accelerator.autocast():
            trainer.target(input_ids=ids, use_cache=False)

    def step() -> None:
        trainer.args.anchors_per_row = one.blocks
        inputs = {"input_ids": ids, "documents": torch.zeros_like(ids)}
        items = trainer.draw(inputs, torch.Generator().manual_seed(len(one.seconds)))
        trainer.training_step(trainer.drafter, inputs, torch.tensor(items, device=ids.device))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    reset_peak(ids.device)
    one.seconds.append(timed(ids.device, step if one.blocks else target_alone)[0])
    one.peak = max(one.peak, peak_bytes(ids.device))


def as_json(
    measurements: list[Measurement], pair: Pair, settings: Settings, text: str, command: Sequence[str]
) -> dict[str, Any]:
    """Everything, ready for `json.dump`; ratios are to the bare target in the same repeat."""
    bare, tokens = measurements[0], settings.rows * settings.length
    return {
        **circumstances(pair, settings, text, command),
        **({"dtype": "bfloat16 autocast"} if settings.bf16 else {}),
        "target_layers": pair.head.config.target_num_layers,
        "head_layers": pair.head.config.num_layers,
        "draft_length": pair.head.draft_length,
        "results": [
            {
                "blocks": one.blocks,
                "seconds": one.seconds,
                "tokens_per_second": spread([tokens / seconds for seconds in one.seconds]),
                "ratio": spread([alone / step for alone, step in zip(bare.seconds, one.seconds, strict=True)]),
                "peak_memory_bytes": one.peak,
            }
            for one in measurements
        ],
    }


def as_table(content: dict[str, Any]) -> str:
    """Markdown of what `as_json` gives."""
    settings = content["settings"]
    rows = [
        (
            str(one["blocks"]) if one["blocks"] else "bare target",
            f"{one['tokens_per_second']['median']:.0f}",
            ratio(one["ratio"]) if one["blocks"] else "1",
            f"{one['peak_memory_bytes'] / 2**20:.0f}",
        )
        for one in content["results"]
    ]
    lines = [
        headline(content),
        f"layers: {content['target_layers']} of the target, {content['head_layers']} of the head, drafts of "
        f"{content['draft_length']}; {settings['rows']} rows of {settings['length']} tokens, loss "
        f"{settings['loss']!r}; median [min, max] of {settings['repeats']} interleaved repeats",
        "",
        *markdown(["blocks per row", "tokens/s", "x bare target", "peak MiB"], rows),
    ]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, parents=[pair_options()], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text_option(parser)
    parser.add_argument("--rows", type=positive, help="of the batch (default: 8)")
    parser.add_argument("--length", type=positive, help="tokens of a row (default: 257)")
    parser.add_argument("--blocks", type=sizes, metavar="COUNTS", help="per row (default: 8,16,32,64)")
    parser.add_argument("--loss", help="dart, left_to_right, dpace, lk or tv (default: dart)")
    parser.add_argument("--loss-chunk", type=int, help="blocks whose logits are held at a time; 0: all")
    parser.add_argument("--bf16", action="store_true", default=None, help="bfloat16 autocast")
    parser.add_argument("--repeats", type=positive, help="default: 5")
    json_option(parser)
    arguments = parser.parse_args(words)
    check_file(arguments.json)
    set_threads(arguments.threads)
    settings = Settings(**given(arguments, ("rows", "length", "blocks", "loss", "loss_chunk", "bf16", "repeats")))
    text, files = suites.texts(arguments.text)
    pair = load(arguments)
    rows = cut_rows(pair.tokenizer, files, settings.rows, settings.length)
    measurements = measure(pair, rows, settings, say)
    content = as_json(measurements, pair, settings, text, ["python", *(sys.argv if words is None else words)])
    show(as_table(content))
    write_json(arguments.json, content)


if __name__ == "__main__":
    main()
