"""A tiny target, its head and rows to train it on."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, default_data_collator

from hf_dart import DartHead
from hf_dart.training import DartTrainer
from hf_dart.training.objective.blocks import draw_anchors
from hf_dart.training.objective.losses import NO_LABEL
from hf_dart.training.trainers.drafts import places_and_labels

VOCABULARY = 61
# Of the documents of each row; a negative length is padding.
LENGTHS = [[12, 7, 5], [24], [3, 15, -6]]
BLOCKS, LENGTH, WORDS = 5, 4, 7  # of `examples`


def tiny_target(dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        fields: dict[str, Any] = {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
            "tie_word_embeddings": True, "eos_token_id": 0, "pad_token_id": 1,
        }
        return Qwen3ForCausalLM(Qwen3Config(**{**fields, **config})).to(dtype).eval()


def tiny_head(target: Any, **config: Any) -> DartHead:
    fields = {"feature_layers": [0, 2, 3], "draft_length": 4, "initializer_range": 0.2}
    return DartHead.from_target(target, **{**fields, **config})


def tiny_trainer(
    folder: Path, head: Any, target: Any, rows: Any, eval_rows: Any = None, kind: type[Any] = DartTrainer,
    **arguments: Any,
) -> Any:  # fmt: skip
    fields: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 8, "per_device_train_batch_size": 4, "anchors_per_row": 6,
        "learning_rate": 1e-2, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "seed": 5,
    }
    settings = kind.training_arguments(**{**fields, **arguments})
    return kind(head, target, settings, train_dataset=rows, eval_dataset=eval_rows)


def trainer_on(
    folder: Path, rows: Any, eval_rows: Any = None, head: Any = tiny_head, dtype: Any = torch.float32, **arguments: Any
) -> Any:
    """A trainer of a new head, or what `head` makes, of a new target."""
    target = tiny_target(dtype)
    return tiny_trainer(folder, head(target), target, rows, eval_rows, **arguments)


def copies(module: Any) -> dict[str, Tensor]:
    """A copy of the weights by their names."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def changed(module: Any, before: dict[str, Tensor]) -> set[str]:
    """Names of the weights that are others than before."""
    return {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


def token_rows(lengths: list[list[int]]) -> list[dict[str, Tensor]]:
    numbers = torch.tensor([[i if n > 0 else -1 for i, n in enumerate(row) for _ in range(abs(n))] for row in lengths])
    ids = torch.randint(2, VOCABULARY, numbers.shape, generator=torch.Generator().manual_seed(0))
    return [{"input_ids": i, "documents": d} for i, d in zip(ids, numbers, strict=True)]


ROWS = token_rows(LENGTHS)


def batch_of(rows: list[dict[str, Tensor]], draft_length: int, count: int) -> dict[str, Tensor]:
    """The rows stacked, with `count` anchors each."""
    batch = default_data_collator(rows)
    batch["anchors"] = draw_anchors(batch["documents"], count, draft_length)
    return batch


def taught(trainer: Any, batch: dict[str, Any]) -> tuple[Tensor, Any]:
    """Features and goals of a batch with anchors, as a step of training has them."""
    return trainer.teach(batch, places_and_labels(batch, trainer.drafter.draft_length)[0].unique())


def examples() -> tuple[Tensor, Tensor, Tensor]:
    """Draft and target logits [5, 4, 7], labels [5, 4] of which some are missing; drafts often agree."""
    random = torch.Generator().manual_seed(0)
    target = 1.5 * torch.randn(BLOCKS, LENGTH, WORDS, generator=random, dtype=torch.float64)
    draft = 0.7 * target + torch.randn(target.shape, generator=random, dtype=torch.float64)
    labels = target.softmax(-1).flatten(0, 1).multinomial(1, generator=random).view(BLOCKS, LENGTH)
    labels[1, 3] = labels[2, 2] = labels[3, 0] = NO_LABEL
    return draft, target, labels


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: writing fails as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def write_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """Write rows of a data set as JSON lines; the path, as the name of a source."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    return str(path)


def write_rows(file: Path, rows: list[dict[str, Any]], eos: int) -> bytes:
    """Write rows of a data set in the format that the ending names; what the file then holds."""
    if file.suffix == ".parquet":
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(file)
    elif file.suffix == ".bin":
        np.concatenate([[*row["input_ids"], eos] for row in rows]).astype(np.uint16).tofile(file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows), encoding="utf8")
    elif file.suffix == ".jsonl":
        write_json_lines(file, rows)
    else:
        file.write_text("\n\n".join(row["text"] for row in rows), encoding="utf8")
    return file.read_bytes()
