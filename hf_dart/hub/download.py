"""Finding the files of a drafter in a folder or on the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import REGEX_COMMIT_HASH, repo_folder_name
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from hf_dart.errors import head_inside, missing_folder, refuse_unknown
from hf_dart.hub.checkpoint import read_json, weight_shapes
from hf_dart.hub.failures import hub_errors

_WEIGHTS, _INDEX, _PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
_LARGEST_CARD = 1024**2
ADAPTER_CONFIG = "adapter_config.json"  # the file that makes a folder that of an adapter
HUB_OPTIONS = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "force_download")
"""Options of `from_pretrained` that say where on the Hub a file lies."""
_OTHERS = ("target", "tokenizer", "ngram", "dtype", "draft_window", "draft_sink")  # of all drafters
_WITHOUT_USE = ("attn_implementation", "device_map", "trust_remote_code")  # to drafters of other projects
NOTES = {
    "_name_or_path", "architectures", "chunk_size_feed_forward", "dtype", "is_encoder_decoder", "model_type",
    "output_attentions", "output_hidden_states", "problem_type", "return_dict", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
"""Fields that transformers writes into every config, and others that say nothing about a drafter."""


def refuse_fields(path: str, content: dict[str, Any], config_class: Any) -> None:
    """Raise a `ValueError` for a config.json with a field that is none of its drafter's.

    transformers takes orders from many more: to load code or kernels, to quantize, to make labels, to read other files.
    """
    ours = (kind for kind in config_class.__mro__ if kind.__module__.startswith("hf_dart."))
    own = {name for kind in ours for name in vars(kind).get("__annotations__", ())}
    if unknown := sorted(content.keys() - own - NOTES - set(config_class.former_fields)):
        field = f"{unknown[0]!r:.100}"
        raise ValueError(f"The config.json in {path} has an unknown field, {field}; take it out, or update hf_dart.")


def optional_file(path: str, name: str, **where: Any) -> Path | None:
    """File `name` of a folder or a Hub repository (at `HUB_OPTIONS`), fetched if need be; None if there is none."""
    with hub_errors(path, **where):
        found = cached_file(path, name, **where, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def optional_json(path: str, name: str, **where: Any) -> dict[str, Any] | None:
    """Return the fields of a JSON file of a folder or repository (`read_json`); None if there is no such file."""
    file = optional_file(path, name, **where)
    return None if file is None else read_json(file)


def published_license(path: str, **where: Any) -> str | None:
    """Return the licence that the card of a folder or repository names, as the Hub spells it; None without one."""
    try:
        card = optional_file(path, "README.md", **where)
        if card is None or card.stat().st_size > _LARGEST_CARD:
            return None
        named = ModelCard.load(card, ignore_metadata_errors=True).data.get("license")
    except Exception:  # cards are written by people, and a drafter works without one
        return None
    return named if isinstance(named, str) and re.fullmatch(r"[\w.+-]{1,64}", named) else None


def refuse_options(given: Iterable[str]) -> None:
    """Raise a TypeError for the first name that is no option of where a drafter lies."""
    refuse_unknown(given, (*HUB_OPTIONS, *_OTHERS, *_WITHOUT_USE), "Loading a drafter takes no option")


def head_config(path: str, **where: Any) -> tuple[dict[str, Any], str | None]:
    """Read the config.json of a head, and the Hub's commit that it came from, to take the weights from the same one.

    A folder has None as its commit, and may have an empty config.
    """
    refuse_options(where)
    if missing_folder(path):
        raise ValueError(f"There is no folder {path!r}; give the folder or the Hub repository of a drafter.")
    with hub_errors(path, **where):
        found = cached_file(path, "config.json", **where)
    if found is None:
        if inside := head_inside(path):
            raise ValueError(f"The folder {path!r} holds no config.json; {inside}")
        return {}, None
    return read_json(Path(found)), None if Path(path).is_dir() else extract_commit_hash(str(found), None)


def cached_commit(repository: str | None, revision: str | None = None) -> str | None:
    """Return the commit of a Hub repository that a model on this machine came from, as far as the cache tells.

    A folder has no commit. A loaded model does not say which `revision` was asked for: without it, the commit is told
    only if no other one is cached.
    """
    if not repository or Path(repository).is_dir():
        return None
    try:
        cache = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))
    except HFValidationError:  # the path of a folder that is gone
        return None
    if revision is not None:
        ref = cache / "refs" / revision
        known = ref.read_text().strip() if ref.is_file() else revision
        return known if REGEX_COMMIT_HASH.match(known) else None
    commits = [folder.name for folder in cache.glob("snapshots/*")]
    return commits[0] if len(commits) == 1 else None


def weight_files(path: str, missing: str | None = None, *, pickled: bool = False, **where: Any) -> list[Path]:
    """Return the safetensors files of a checkpoint, fetched if need be; other kinds of weights are not opened.

    Where there are none, a `pytorch_model.bin` is taken if `pickled` (`hub.checkpoint` reads it as strictly), or it is
    said what is `missing`. An index that names files outside of the checkpoint is refused.
    """
    single = optional_file(path, _WEIGHTS, **where)
    if single is not None:
        return [single]
    index = optional_file(path, _INDEX, **where)
    if index is None:
        pickle = optional_file(path, _PICKLE, **where) if pickled else None
        if pickle is not None:
            return [pickle]
        raise OSError(missing or f"{path} holds no {_WEIGHTS}; other kinds of weights are not opened.")
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()) or not names:
        raise ValueError(f"{_INDEX} in {path} does not say which file holds which tensor; fetch it again.")
    found = []
    for name in sorted({*names.values()}):
        if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):  # nothing outside the folder
            raise ValueError(f"{_INDEX} in {path} names the file {name!r}; give an index of files in its own folder.")
        file = optional_file(path, name, **where)
        if file is None:
            raise OSError(f"{path} lacks a file that its {_INDEX} names; fetch it as a whole.")
        found.append(file)
    return found


def tensor_names(path: str, **where: Any) -> frozenset[str]:
    """Names of the tensors of a checkpoint, from the headers of its files; none where there are no weights."""
    try:
        files = weight_files(path, pickled=True, **where)
    except OSError:
        return frozenset()
    return frozenset(weight_shapes(files, path))
