"""Opens what can be trained on, as `datasets`: local files and datasets of the Hub."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hf_dart.errors import INSTALLED_FROM, sentence
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
    """Documents as they were found.

    Attributes:
        name: for messages.
        documents: a `datasets.Dataset` or `datasets.IterableDataset`.
        columns: its fields.
    """

    name: str
    documents: Any
    columns: list[str]


@contextmanager
def _reading(name: str, wrong: str, remedy: str) -> Iterator[None]:
    """Put what pyarrow, pandas and datasets raise of a source into one sentence: what is wrong, and the remedy."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        if "corresponds to no data" in str(cause):  # as datasets says of a file without a row
            raise ValueError(f"{name} is empty; give a source with something in it.") from error
        if isinstance(cause, OSError) and cause.errno is not None:  # of the system, not of a reader
            raise OSError(f"Cannot read {name}, or keep what was read ({sentence(cause)}); fix that.") from error
        raise ValueError(f"{name} {wrong} ({sentence(cause)}); {remedy}.") from error


def datasets_library() -> Any:
    """The module `datasets`, which only training needs.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        wanted = f"pip install '{INSTALLED_FROM}[train]' (a clone)"
        raise ValueError(f"Reading training data needs the datasets library; {wanted}.") from error
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
    names: Sequence[str],
    *,
    split: str = "train",
    eos: int | None = None,
    streaming: bool = False,
    sample_by: str = "document",
    cache_dir: str | None = None,
) -> Source:
    """Open a file, a folder, a pattern, or a dataset of the Hub.

    Args:
        names: as `group_files` gives them: several files, or one path, pattern or NAME[:CONFIG[:SPLIT]]. Of a
            folder, all files of the one ending that they have are read.
        split: of a Hub dataset whose name gives none.
        eos: the token that ends each document of a .bin file.
        streaming: read on the fly.
        sample_by: what of a text file is a document: "document", "paragraph" or "line".
        cache_dir: of `datasets`.

    Raises:
        ValueError: there is no such source, it is not what its ending says, or it is empty.
    """
    datasets = datasets_library()
    name = names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
    path = Path(names[0]).expanduser()
    if (path / "state.json").is_file():  # of save_to_disk
        return _saved(datasets, name, path, streaming)
    files = [Path(one).expanduser() for one in names] if len(names) > 1 else _local_files(name)
    if files is None:
        return _load(datasets, name, streaming, cache_dir, split)
    kind, what = _FORMATS[files[0].suffix]
    files = [file for file in files if file.stat().st_size]
    if not files:
        raise ValueError(f"{name} is empty; give a source with something in it.")
    words = (name, f"does not hold {what}, as its ending {files[0].suffix} says", "fix it or rename it")
    with _reading(*words):
        if kind == "bin":
            documents = _token_files(datasets, files, eos, streaming, cache_dir)
        else:
            documents = datasets.load_dataset(
                kind,
                data_files=[glob.escape(str(file)) for file in files],
                split="train",
                streaming=streaming,
                cache_dir=cache_dir,
                **_options(kind, sample_by),
            )
            if streaming:
                documents = _watched(datasets, documents, words)
    return _first_seen(documents, words)


def _options(kind: str, sample_by: str) -> dict[str, Any]:
    """Options of the reader of one kind of file."""
    if kind == "text":
        return {"sample_by": sample_by}
    if kind == "json":
        from datasets.packaged_modules.json.json import JsonConfig

        # datasets 5 takes rows with certain fields beside their messages for traces of agents, and rewrites them.
        return {name: False for name in ("parse_agent_traces",) if name in JsonConfig.__dataclass_fields__}
    return {}


def _saved(datasets: Any, name: str, path: Path, streaming: bool) -> Source:
    """Opens a folder that `save_to_disk` has written."""
    words = (name, "is not what save_to_disk writes", "save it again")
    with _reading(*words):
        documents = datasets.load_from_disk(str(path))
    if not isinstance(documents, datasets.Dataset):
        raise ValueError(f"{name} holds several splits; give the folder of one of them.")
    if streaming:
        documents = _watched(datasets, documents.to_iterable_dataset(), words)
    return _first_seen(documents, words)


def _watched(datasets: Any, documents: Any, words: tuple[str, str, str]) -> Any:
    """A stream of files whose errors name the source, wherever it is read."""
    options = {"documents": documents, "shards": list(range(documents.num_shards)), "words": words}
    return datasets.IterableDataset.from_generator(_read_shards, features=documents.features, gen_kwargs=options)


def _read_shards(documents: Any, shards: list[int], words: tuple[str, str, str]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        with _reading(*words):
            yield from documents.shard(documents.num_shards, shard)


def _first_seen(documents: Any, words: tuple[str, str, str]) -> Source:
    """The fields of documents, by the first; streams know them no earlier."""
    with _reading(*words):
        first = next(iter(documents), None)
    if first is None:
        raise ValueError(f"{words[0]} is empty; give a source with something in it.")
    return Source(words[0], documents, list(first))


def _local_files(name: str) -> list[Path] | None:
    """The files that `name` stands for, all of one ending; None where it names a dataset of the Hub.

    Raises:
        ValueError: no file is there, or files of several endings.
    """
    path = Path(name).expanduser()
    known = ", ".join(_FORMATS)
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in _FORMATS and file.is_file())
        # Beside data, a .json file is about them.
        files = [file for file in found if file.suffix != ".json"] or found
        if not files:
            raise ValueError(f"The folder {name} holds no file that ends in {known}; give one that does.")
    elif path.is_file():
        files = [path]
    elif glob.has_magic(name):
        files = [Path(file) for file in sorted(glob.glob(str(path), recursive=True)) if Path(file).is_file()]
        if not files:
            raise ValueError(f"No file matches {name}; fix the pattern.")
    elif path.suffix in _FORMATS or name.startswith((".", "/", "~")) or name.split(":")[0].count("/") > 1:
        raise ValueError(f"There is no file or folder {name}; fix the path.")
    else:
        return None
    endings = sorted({file.suffix for file in files})
    if len(endings) > 1:
        raise ValueError(f"{name} holds files of several endings ({', '.join(endings)}); name each kind on its own.")
    if endings[0] not in _FORMATS:
        raise ValueError(f"{name} ends in {endings[0]!r}; files that can be read end in {known}.")
    return files


def _load(datasets: Any, name: str, streaming: bool, cache_dir: str | None, split: str) -> Source:
    """A dataset of the Hub."""
    repository, config, part = [*name.split(":", 2), "", ""][:3]
    try:
        documents = datasets.load_dataset(
            repository, config or None, split=part or split, streaming=streaming, cache_dir=cache_dir
        )
    except Exception as error:  # as in open_source
        raise ValueError(
            f"Cannot load the dataset {name!r} ({sentence(error)}); give NAME:CONFIG:SPLIT of the Hub, or a file that "
            "is there."
        ) from error
    return _first_seen(documents, (name, "cannot be read", "fetch it again"))


def _token_files(datasets: Any, files: list[Path], eos: int | None, streaming: bool, cache_dir: str | None) -> Any:
    """The documents of files of raw token ids."""
    stamps = []
    for file in files:
        size = file.stat().st_size
        if size % 2:
            raise ValueError(f"{file} has an odd number of bytes, {size}")
        stamps.append((str(file.resolve()), size, file.stat().st_mtime_ns))
    features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32"))})
    options = {"features": features, "gen_kwargs": {"files": stamps, "eos": eos}}
    if streaming:
        return datasets.IterableDataset.from_generator(_split_ids, **options)
    return datasets.Dataset.from_generator(_split_ids, cache_dir=cache_dir, **options)


def _split_ids(files: list[tuple[str, int, int]], eos: int | None) -> Iterator[dict[str, np.ndarray]]:
    """Each document of the files, the token that ends it included. Size and time of a file name its cached form."""
    for path, size, _ in files:
        for ids in split_documents(np.memmap(path, np.uint16, "r", shape=(size // 2,)), eos):
            yield {"input_ids": ids}
