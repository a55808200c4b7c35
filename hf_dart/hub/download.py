"""Finding the files of a drafter in a folder or on the Hub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import REGEX_COMMIT_HASH, repo_folder_name
from transformers.utils import cached_file

from hf_dart.errors import missing_folder
from hf_dart.hub.errors import hub_errors
from hf_dart.interop.checkpoint import read_json

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
"""The file that makes a folder that of an adapter."""
HUB_OPTIONS = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "force_download")
"""Options of `from_pretrained` that say where on the Hub a file lies."""


# What transformers notes in every config, and what says nothing about a drafter.
_NOTES = {
    "_name_or_path", "architectures", "chunk_size_feed_forward", "dtype", "is_encoder_decoder", "model_type",
    "output_attentions", "output_hidden_states", "problem_type", "return_dict", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip


def refuse_fields(path: str, content: dict[str, Any], config_class: Any) -> None:
    """Raise for a config.json with fields that are none of its drafter's.

    transformers takes orders from many more: to load code or kernels, to quantize, to make labels, to read other files.

    Raises:
        ValueError: the message names the field.
    """
    own = {name for kind in config_class.__mro__ if kind.__module__.startswith("hf_dart.") for name in _fields(kind)}
    if unknown := sorted(content.keys() - own - _NOTES - set(config_class.former_fields)):
        raise ValueError(
            f"The config.json in {path} has the field {unknown[0]!r:.100}, which no drafter of this version of hf_dart "
            "has; take it out, or use a newer version."
        )


def _fields(kind: type) -> set[str]:
    return set(vars(kind).get("__annotations__", ()))


def optional_file(path: str, name: str, **where: Any) -> Path | None:
    """File `name` of a folder or a Hub repository, None if there is none; `where` as for `head_config`.

    Raises:
        OSError: the Hub does not give it.
    """
    with hub_errors(path, token=where.get("token"), revision=where.get("revision")):
        found = cached_file(path, name, **where, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def optional_json(path: str, name: str, **where: Any) -> dict[str, Any] | None:
    """What a JSON file of a folder or repository holds; None if there is no such file.

    Raises:
        ValueError: it is not JSON.
        OSError: the Hub does not give it.
    """
    file = optional_file(path, name, **where)
    if file is None:
        return None
    try:
        return dict(json.loads(file.read_text(encoding="utf8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"The {name} in {path} is damaged ({error}); fetch it again.") from error


def head_config(path: str, **where: Any) -> tuple[dict[str, Any], str | None]:
    """The config.json of a head, and the commit of the Hub that it came from, to take the weights from the same one.

    Args:
        path: a folder or a Hub repository.
        where: revision, token, cache_dir, subfolder, local_files_only, force_download, as for `from_pretrained`.

    Returns:
        The config, empty if there is no such file, and None as the commit of a folder.

    Raises:
        OSError: the Hub does not give it.
        ValueError: it is not JSON.
    """
    with hub_errors(path, token=where.get("token"), revision=where.get("revision")):
        found = cached_file(path, "config.json", **where)
    if found is None:
        return {}, None
    try:
        content = json.loads(Path(found).read_text(encoding="utf8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The config.json in {path} is not JSON ({error}); fetch it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"The config.json in {path} is no JSON object; fetch it again.")
    # The cache keeps a file in snapshots/COMMIT/SUBFOLDER.
    parts = [] if Path(path).is_dir() else Path(found).parts
    commit = parts[parts.index("snapshots") + 1] if "snapshots" in parts else None
    return content, commit


def cached_commit(repository: str | None, revision: str | None = None) -> str | None:
    """The commit of a Hub repository that a model on this machine came from, as far as the cache tells.

    Args:
        repository: its id; a folder has no commit.
        revision: what was asked for when it was loaded; None if that is not known, since a loaded model does not
            say: then the commit is told only if no other one is cached.
    """
    if not repository or Path(repository).is_dir():
        return None
    try:
        cache = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))
    except HFValidationError:  # the path of a folder that is gone
        return None
    if revision is not None:
        ref = cache / "refs" / revision
        if ref.is_file():
            return ref.read_text().strip()
        return revision if REGEX_COMMIT_HASH.match(revision) else None
    snapshots = cache / "snapshots"
    commits = [folder.name for folder in snapshots.iterdir()] if snapshots.is_dir() else []
    return commits[0] if len(commits) == 1 else None


def checkpoint_config(path: str, **where: Any) -> dict[str, Any]:
    """The fields of a folder's or Hub repository's config.json, as they stand there.

    Args:
        path: folder or Hub id.
        where: revision, token, cache_dir, ... of `transformers.utils.cached_file`.

    Raises:
        ValueError: there is no such folder, or the file is not one JSON object with every name once.
        OSError: there is no such file, or the Hub does not give it.
    """
    if missing_folder(path):
        raise ValueError(f"There is no folder {path}; give the folder or the Hub repository of a drafter.")
    sentence = f"{path} holds no config.json; give the folder or the Hub repository of a drafter."
    return read_json(Path(_located(path, "config.json", where, sentence)))


def _found(path: str, name: str, where: dict[str, Any]) -> str | None:
    """A file of a folder or of the Hub's cache, fetched if need be; None if it is not there."""
    with hub_errors(path, token=where.get("token"), revision=where.get("revision")):
        return cached_file(path, name, **where, _raise_exceptions_for_missing_entries=False)


def _located(path: str, name: str, where: dict[str, Any], missing: str) -> str:
    """The same of a file that has to be there; `missing` is what is said if it is not."""
    with hub_errors(path, token=where.get("token"), revision=where.get("revision"), otherwise=missing):
        file = cached_file(path, name, **where)
    if file is None:  # of a folder without config.json
        raise OSError(missing)
    return file


def weight_files(path: str, missing: str | None = None, **where: Any) -> list[str]:
    """The safetensors files of a checkpoint, fetched if need be; other kinds of weights are not opened.

    Args:
        path, where: as for `checkpoint_config`.
        missing: what is said where there are no weights in safetensors.

    Raises:
        ValueError: the index of the weights is damaged, or names files outside of the checkpoint.
        OSError: there are no weights in safetensors, or the Hub does not give them.
    """
    single = _found(path, _WEIGHTS, where)
    if single is not None:
        return [single]
    index = _found(path, _INDEX, where)
    if index is None:
        missing = missing or f"{path} holds no {_WEIGHTS}; other kinds of weights are not opened."
        return [_located(path, _WEIGHTS, where, missing)]
    names = read_json(Path(index)).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()) or not names:
        raise ValueError(f"{_INDEX} in {path} does not say which file holds which tensor; fetch it again.")
    for name in names.values():
        if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):  # nothing outside the folder
            raise ValueError(f"{_INDEX} in {path} names the file {name!r}; give an index of files beside it.")
    lacks = f"{path} lacks a file that its {_INDEX} names; fetch it as a whole."
    return [_located(path, name, where, lacks) for name in sorted(set(names.values()))]
