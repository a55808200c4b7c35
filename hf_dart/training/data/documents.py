"""Sources of documents, opened as `datasets`: local files and datasets of the Hub."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hf_dart.errors import sentence
from hf_dart.training.data.packing import split_documents

_FORMATS = {
    ".jsonl": ("json", "JSON lines"),
    ".json": ("json", "JSON"),
    ".parquet": ("parquet", "Parquet"),
    ".txt": ("text", "UTF-8 text"),
    ".py": ("text", "UTF-8 text"),
    ".bin": ("bin", "raw uint16 token ids"),
}


class Source(NamedTuple):
    """Documents as they were found, and the names of their fields."""

    name: str  # for messages
    documents: Any  # a `datasets.Dataset` or `datasets.IterableDataset`
    columns: list[str]


def datasets_library() -> Any:
    """Return the module `datasets`, which few commands need, or raise a `ValueError` where it is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError("Reading data sets needs datasets: pip install -e '.[train]' in the clone.") from error
    return datasets


def group_files(names: Iterable[str]) -> list[list[str]]:
    """Names of plain files of one ending that follow each other, such as a shell makes of `*.txt`, together.

    Files with fields stay on their own: those of another may be others.
    """

    def together(name: str) -> str:
        path = Path(name).expanduser()
        plain = path.is_file() and _FORMATS.get(path.suffix, ("", ""))[0] in ("text", "bin")
        return path.suffix if plain else name

    return [list(group) for _, group in groupby(names, together)]


def open_source(
    names: Sequence[str], *, split: str = "train", tokenizer: Any = None, streaming: bool = False,
    cache_dir: str | None = None,
) -> Source:  # fmt: skip
    """Open several files, or one path, pattern or NAME[:CONFIG[:SPLIT]] of the Hub, as `group_files` gives them.

    Each document of a .bin file ends with the tokenizer's end-of-text token; other options are `load_dataset`'s.
    """
    datasets = datasets_library()
    name = names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
    options: dict[str, Any] = {"streaming": streaming, "cache_dir": cache_dir}
    saved = Path(name).expanduser()
    is_saved = (saved / "state.json").is_file()
    files = [] if is_saved else _local_files(names)
    if is_saved:
        with _reading(name, "is not what save_to_disk writes", "save it again"):
            documents = datasets.load_from_disk(str(saved))
            documents = documents.to_iterable_dataset() if streaming else documents
            first = next(iter(documents), None)
    elif files is None:
        repository, config, part = [*name.split(":", 2), "", ""][:3]
        with _reading(f"The dataset {name!r}", "cannot be read", "give NAME:CONFIG:SPLIT of the Hub, or a file"):
            documents = datasets.load_dataset(repository, config or None, split=part or split, **options)
            first = next(iter(documents), None)
    else:
        kind, what = _FORMATS[files[0].suffix]
        if kind == "bin" and tokenizer is not None and len(tokenizer) > 2**16:
            raise ValueError(f"{name} holds 16-bit ids, too few for {len(tokenizer)} tokens; give rows of input_ids.")
        files = [file for file in files if file.stat().st_size]
        with _reading(name, f"does not hold {what}, as its ending says", "fix it or rename it"):
            eos = None if tokenizer is None else tokenizer.eos_token_id
            read = partial(_token_files, eos=eos) if kind == "bin" else partial(_table_files, kind=kind)
            documents = read(datasets, files, options=options) if files else []
            first = next(iter(documents), None)
    if first is None:
        raise ValueError(f"{name} is empty; give a source with something in it.")
    return Source(name, documents, list(first))  # streams know their fields by the first document


@contextmanager
def _reading(name: str, wrong: str, remedy: str) -> Iterator[None]:
    """Put what pyarrow, pandas and datasets raise of a source into one sentence: what is wrong, and the remedy."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        if isinstance(cause, OSError) and cause.errno is not None:  # of the system, not of a reader
            raise OSError(f"Cannot read {name}, or keep what was read ({sentence(cause)}); fix that.") from error
        raise ValueError(f"{name} {wrong} ({sentence(cause)}); {remedy}.") from error


def _local_files(names: Sequence[str]) -> list[Path] | None:
    """Return the files that a source stands for, all of one ending; None where it names a dataset of the Hub."""
    if len(names) > 1:
        return [Path(name).expanduser() for name in names]
    name, path, known = names[0], Path(names[0]).expanduser(), ", ".join(_FORMATS)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in _FORMATS and file.is_file())
        # In a folder of data, a .json file holds metadata.
        files = [file for file in found if file.suffix != ".json"] or found
    elif glob.has_magic(name):
        files = [Path(file) for file in sorted(glob.glob(str(path), recursive=True)) if Path(file).is_file()]
    elif path.suffix in _FORMATS or name.startswith((".", "/", "~")) or name.split(":")[0].count("/") > 1:
        raise ValueError(f"There is no file or folder {name}; fix the path.")
    else:
        return None
    endings = sorted({file.suffix for file in files})
    if len(endings) != 1 or endings[0] not in _FORMATS:
        there = " and ".join(map(repr, endings)) or "none"
        raise ValueError(f"{name} has to name files of one ending, of {known}, and names {there}; fix it.")
    return files


def _table_files(datasets: Any, files: list[Path], kind: str, options: dict[str, Any]) -> Any:
    """Return the documents of JSON, Parquet or text files."""
    if kind == "text":
        options["sample_by"] = "document"
    if kind == "json":
        from datasets.packaged_modules.json.json import JsonConfig

        # datasets 5 takes rows with certain fields in addition to messages for agent traces, and rewrites them.
        options |= {name: False for name in ("parse_agent_traces",) if name in JsonConfig.__dataclass_fields__}
    names = [glob.escape(str(file)) for file in files]
    return datasets.load_dataset(kind, data_files=names, split="train", **options)


def _token_files(datasets: Any, files: list[Path], eos: int | None, options: dict[str, Any]) -> Any:
    """Return the documents of files of raw token ids."""
    stamps = []
    for file in files:
        size = file.stat().st_size
        if size % 2:
            raise ValueError(f"{file} has an odd number of bytes, {size}")
        stamps.append((str(file.resolve()), size, file.stat().st_mtime_ns))
    features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32"))})
    given = {"features": features, "gen_kwargs": {"files": stamps, "eos": eos}}
    if options["streaming"]:
        return datasets.IterableDataset.from_generator(_split_ids, **given)
    return datasets.Dataset.from_generator(_split_ids, cache_dir=options["cache_dir"], **given)


def _split_ids(files: list[tuple[str, int, int]], eos: int | None) -> Iterator[dict[str, np.ndarray]]:
    """Each document of the files, the token that ends it included. Size and time of a file name its cached form."""
    for path, size, _ in files:
        for ids in split_documents(np.memmap(path, np.uint16, "r", shape=(size // 2,)), eos):
            yield {"input_ids": ids}
