"""Training steps against the bare target: tokens per second on the same batch, and memory by blocks per row."""

from __future__ import annotations

import os
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_dart.bench.memory import peak_bytes, reset_peak
from hf_dart.bench.pair import Pair
from hf_dart.bench.speed import spread
from hf_dart.errors import UserError
from hf_dart.hub.machine import hardware, versions
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
        try:
            ids += tokenizer(path.read_text(encoding="utf8"), add_special_tokens=False)["input_ids"]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"Cannot read {str(path)!r} as text: {error}") from error
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
        first = repeat % len(measurements)
        for one in measurements[first:] + measurements[:first]:
            _run(trainer, ids, one)
    return measurements


def _run(trainer: DartTrainer, ids: Tensor, one: Measurement) -> None:
    reset_peak(ids.device)
    begin = _now(ids.device)
    if one.blocks:
        trainer.args.anchors_per_row = one.blocks
        inputs = {"input_ids": ids, "documents": torch.zeros_like(ids)}
        items = trainer.draw(inputs, torch.Generator().manual_seed(len(one.seconds)))
        trainer.training_step(trainer.head, inputs, torch.tensor(items, device=ids.device))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    else:
        with torch.no_grad(), trainer.accelerator.autocast():
            trainer.target(input_ids=ids, use_cache=False)
    one.seconds.append(_now(ids.device) - begin)
    one.peak = max(one.peak, peak_bytes(ids.device))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def as_json(
    measurements: list[Measurement], pair: Pair, settings: Settings, text: str, command: Sequence[str]
) -> dict[str, Any]:
    """Everything, ready for `json.dump`; ratios are to the bare target in the same repeat."""
    device = pair.model.device
    bare, tokens = measurements[0], settings.rows * settings.length
    results = []
    for one in measurements:
        speeds = [tokens / seconds for seconds in one.seconds]
        ratios = [target / seconds for target, seconds in zip(bare.seconds, one.seconds, strict=True)]
        figures = {
            name: dict(zip(("median", "min", "max"), spread(values), strict=True))
            for name, values in (("tokens_per_second", speeds), ("ratio", ratios))
        }
        results.append({"blocks": one.blocks, "seconds": one.seconds, **figures, "peak_memory_bytes": one.peak})
    return {
        "command": shlex.join(command),
        "versions": versions(),
        "hardware": hardware(device),
        "device": device.type,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": "bfloat16 autocast" if settings.bf16 else str(pair.model.dtype).removeprefix("torch."),
        "target": pair.target_name,
        "target_parameters": sum(p.numel() for p in pair.model.parameters()),
        "target_layers": pair.head.config.target_num_layers,
        "head": pair.head_name,
        "head_parameters": sum(p.numel() for p in pair.head.parameters()),
        "head_layers": pair.head.config.num_layers,
        "draft_length": pair.head.draft_length,
        "text": text,
        "settings": asdict(settings),
        "results": results,
    }


def as_table(content: dict[str, Any]) -> str:
    """Markdown of what `as_json` gives."""
    settings, software = content["settings"], content["versions"]
    lines = [
        f"{content['target']} (layers: {content['target_layers']}, {content['target_parameters'] / 1e6:.1f} M "
        "parameters), "
        f"{content['head']} (layers: {content['head_layers']}, drafts of {content['draft_length']}, "
        f"{content['head_parameters'] / 1e6:.1f} M), {content['dtype']}, {content['hardware']}, "
        f"{content['threads']} threads; {', '.join(f'{name} {number}' for name, number in software.items())}",
        f"{settings['rows']} rows of {settings['length']} tokens, loss {settings['loss']!r}; median [min, max] of "
        f"{settings['repeats']} interleaved repeats",
        "",
        "| blocks per row | tokens/s | x bare target | peak MiB |",
        "|---|---|---|---|",
    ]
    for one in content["results"]:
        ratio = one["ratio"]
        cells = (
            str(one["blocks"]) if one["blocks"] else "bare target",
            f"{one['tokens_per_second']['median']:.0f}",
            f"**{ratio['median']:.2f}** [{ratio['min']:.2f}, {ratio['max']:.2f}]" if one["blocks"] else "1",
            f"{one['peak_memory_bytes'] / 2**20:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
