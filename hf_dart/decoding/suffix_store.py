"""`SuffixStore`: a memory of the texts of earlier calls, from which later ones copy (`hf_dart.trees.copies`).

It decides what is drafted, never what is written: whatever it holds, the text is the same.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedModel

from hf_dart.models.tokenizers import same_vocabulary, vocabulary_hash
from hf_dart.trees.copies import LONGEST, PRIOR, CopyCounts, RowCopies, TextIndex
from hf_dart.trees.costs import Array

FORMAT, VERSION = "hf_dart.memory", "1"
_ARRAYS = ("tokens", "owners", "right", "seen")
_NAMES = 1000  # namespaces after which those without a text are dropped
_LEAST_BYTES = 1 << 16


class SuffixStore:
    """Memory of the texts of earlier calls: `attach(model, drafter, memory=SuffixStore())`.

    When a call ends, however it ends, its prompts and what was generated are taken in. Later calls draft what followed
    the same words there, next to what their drafter drafts. Texts stay in this process, at 20 bytes a token, and the
    oldest make room for new ones. What the beginning of a text shares with a stored one is not stored once more.

    Calls meet only in the same namespace: give the users or tenants of a server one each. Threads may share a store;
    deep copies of a model do. Pickles of one are empty.

    Suffix decoding (arXiv 2411.04975) is where drafting from earlier outputs comes from.

    Args:
        most_bytes: of the texts of all namespaces with their index; memory is taken up as it fills.

    Raises:
        ValueError: `most_bytes` is less than 65536.
    """

    def __init__(self, most_bytes: int = 64 << 20) -> None:
        if most_bytes < _LEAST_BYTES:
            raise ValueError(f"most_bytes is {most_bytes}; give {_LEAST_BYTES} or more.")
        self.most_bytes = most_bytes
        self._lock = RLock()
        self._next, self._most_names = 1, _NAMES  # numbers of namespaces are not used again
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> SuffixStore:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SuffixStore, (self.most_bytes,)

    @property
    def tokens(self) -> int:
        """Number of tokens that are held."""
        with self._lock:
            return int(np.count_nonzero(self._index.tokens))

    @property
    def names(self) -> list[str]:
        """Namespaces of which texts are held."""
        with self._lock:
            held = np.unique(self._index.tokens >> 32)
            return [name for name, number in self._numbers.items() if number in held]

    def namespace(self, name: str) -> Namespace:
        """Return the part of the store that calls with `memory=` this see; "" is the store's own."""
        if not isinstance(name, str):
            raise TypeError(f"A namespace is named by a string, not {name!r:.100}; give str(name).")
        return Namespace(self, name)

    def forget(self, name: str | None = None) -> None:
        """Erase the texts of one namespace, or of all. Calls that still run are taken in when they end."""
        with self._lock:
            if name is None:
                self._vocab_size, self._tokenizer_hash = 0, ""  # of the target; 0 before the first call
                self._index = TextIndex(self.most_bytes // TextIndex.BYTES)
                self._numbers: dict[str, int] = {}
                self._counts = CopyCounts()
            elif name in self._numbers:
                tokens = self._index.tokens
                tokens[tokens >> 32 == self._numbers.pop(name)] = 0

    def check_target(self, target: PreTrainedModel) -> None:
        """Accept one target, and others of its vocabulary.

        Raises:
            ValueError: ids in this store are those of another vocabulary.
        """
        size = int(target.config.get_text_config().vocab_size)
        with self._lock:
            if self._vocab_size not in (0, size):
                raise ValueError(
                    f"This SuffixStore holds texts of a vocabulary of {self._vocab_size} tokens, and "
                    f"{type(target).__name__} has {size}; give each tokenizer a store of its own."
                )
            self._vocab_size = size

    def number(self, name: str) -> int:
        """Return the number of a namespace, which no other one has or had."""
        with self._lock:
            if name not in self._numbers:
                if len(self._numbers) >= self._most_names:
                    self._numbers = {one: self._numbers[one] for one in self.names}
                    self._most_names = max(_NAMES, 2 * len(self._numbers))
                self._numbers[name] = self._next
                self._next += 1
            return self._numbers[name]

    def add(self, name: str, text: Sequence[int]) -> None:
        """Take in a text of token ids."""
        with self._lock:
            index = self._index
            tokens = np.array(text[-(index.capacity - 2 * LONGEST) :], np.int64) + ((self.number(name) << 32) + 1)
            whole = len(tokens)
            while known := self._known(tokens):
                tokens = tokens[known:]
            if len(tokens) > LONGEST or len(tokens) == whole:
                index.add(np.append(tokens, 0))

    def _known(self, tokens: Array) -> int:
        """Return how many tokens may be left out of a text: stored ones, but for `LONGEST` before the new ones."""
        index, known = self._index, 0
        places, lengths = index.find(tokens[:LONGEST].tolist())
        for place in places[lengths == LONGEST].tolist():
            ahead = np.arange(place, min(place + len(tokens) - LONGEST, index.end))
            differs = index.tokens[ahead % index.capacity] != tokens[LONGEST : LONGEST + len(ahead)]
            run = int(differs.argmax()) if differs.any() else len(ahead)
            # What is soon overwritten, or short, is stored once more.
            if run >= 2 * LONGEST and place > index.end - index.capacity // 2:
                known = max(known, run)
        return known

    def matches(self, ending: Sequence[int], depth: int) -> tuple[list[list[int]], list[int]]:
        """See `TextIndex.matches`."""
        with self._lock:
            return self._index.matches(ending, depth)

    def chances(self) -> list[float]:
        """Return c of each cell (`trees.copies.PRIOR`), by what was right in all calls."""
        with self._lock:
            return self._counts.chances()

    def learn(self, right: Sequence[float], seen: Sequence[float]) -> None:
        """Count the copied tokens of a row, by cell: those that were `right`, of those that were `seen`."""
        with self._lock:
            self._counts.add(right, seen)

    def save(self, path: str | Path, tokenizer: Any = None) -> None:
        """Write all namespaces to one safetensors file, which `load` reads. It holds the texts as they are.

        Args:
            path: of the file, which appears at once and whole; its folder is made.
            tokenizer: of the target; `load` compares its vocabulary.

        Raises:
            OSError: it cannot be written.
        """
        path = Path(path).expanduser().resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            index, names = self._index, self.names
            places = np.arange(max(index.end - index.capacity, 1), index.end)
            stored = index.tokens[places % index.capacity]
            starts = np.append(0, stored)[:-1] == 0  # of texts, and what follows one that was erased
            stored, starts = stored[(stored > 0) | ~starts], starts[(stored > 0) | ~starts]
            numbers = [self._numbers[name] for name in names]
            arrays = {
                "tokens": (stored & (2**32 - 1)).astype(np.int32),
                "owners": np.array([numbers.index(number) for number in stored[starts] >> 32], np.int32),
                "right": self._counts.right,
                "seen": self._counts.seen,
            }
            metadata = {
                "format": FORMAT,
                "version": VERSION,
                "tokenizer_hash": self._tokenizer_hash if tokenizer is None else vocabulary_hash(tokenizer),
                "vocab_size": str(self._vocab_size),
                "names": json.dumps(names),
            }
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            save_file(arrays, Path(scratch, path.name), metadata)
            Path(scratch, path.name).replace(path)

    @classmethod
    def load(cls, path: str | Path, tokenizer: Any = None, most_bytes: int = 64 << 20) -> SuffixStore:
        """Read a store that `save` wrote; of more texts than there is room for, the latest.

        Args:
            path: of the file.
            tokenizer: of the target that it shall serve, to be compared with the one that it was saved with.
            most_bytes: as for a new store.

        Raises:
            ValueError: it is no such file, a damaged one, or one of another tokenizer.
        """
        store, path = cls(most_bytes), Path(path).expanduser()
        if not path.is_file():
            raise ValueError(f"There is no file {path}; SuffixStore.save writes one.")
        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in _ARRAYS}
        except (SafetensorError, OSError, TypeError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as a SuffixStore ({error}); save it again.") from error
        if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
            raise ValueError(f"{path} is no SuffixStore of version {VERSION}; SuffixStore.save writes one.")
        try:
            names, vocab_size = json.loads(metadata["names"]), int(metadata["vocab_size"])
            tokens, owners, right, seen = arrays.values()
            _check(names, vocab_size, tokens, owners, right, seen)
        except (KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error}); save it again.") from error
        known = metadata.get("tokenizer_hash", "")
        if tokenizer is not None and known and not same_vocabulary(known, tokenizer, vocab_size or len(tokenizer)):
            raise ValueError(f"{path} holds texts of another tokenizer; give each tokenizer a store of its own.")
        store._tokenizer_hash, store._vocab_size = known, vocab_size
        store._counts, store._next = CopyCounts(right, seen), len(names) + 1
        store._numbers = {name: number for number, name in enumerate(names, 1)}
        bases = np.arange(1, store._next, dtype=np.int64) << 32
        after = np.cumsum(tokens == 0) - (tokens == 0)  # texts before the one that a token is of
        kept = slice(-store._index.capacity + LONGEST, None)
        store._index.add(np.where(tokens > 0, tokens + bases[owners[after]], 0)[kept] if len(tokens) else tokens)
        return store


def _check(names: Any, vocab_size: int, tokens: Array, owners: Array, right: Array, seen: Array) -> None:
    """Raise if the parts of a file are not those of one store."""
    counts = ((right, np.float64), (seen, np.float64))
    if any(one.dtype != dtype or one.ndim != 1 for one, dtype in (*counts, (tokens, np.int32), (owners, np.int32))):
        raise ValueError("its arrays have other types or shapes")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise ValueError("its namespaces have no names")
    if not 0 <= vocab_size < 2**31 or (tokens < 0).any():  # ids of images may lie beyond the vocabulary
        raise ValueError("it holds numbers that are no tokens")
    if tokens[-1:].any() or ((tokens[:-1] == 0) & (tokens[1:] == 0)).any() or tokens[:1].tolist() == [0]:
        raise ValueError("its texts have no ends")
    if len(owners) != int((tokens == 0).sum()) or (len(owners) and not 0 <= owners.min() <= owners.max() < len(names)):
        raise ValueError("its texts belong to no namespace")
    whole = len(right) == len(seen) == len(PRIOR) and np.isfinite([right, seen]).all()
    if not (whole and right.min() >= 0 and seen.min() >= 1):
        raise ValueError("its counts are none")


class Namespace:
    """A part of a [`SuffixStore`] that no call with another one sees: `generate(..., memory=store.namespace("ada"))`.

    Args:
        store: whose part it is.
        name: of it.
    """

    def __init__(self, store: SuffixStore, name: str) -> None:
        self.store, self.name = store, name
        self.matches, self.chances, self.check_target = store.matches, store.chances, store.check_target

    @property
    def base(self) -> int:
        """Number that is added to each stored token, another one for each namespace."""
        return self.store.number(self.name) << 32

    def take_in(self, text: Sequence[int], copied: RowCopies) -> None:
        """Take in the text of a row, and what was right of its copies."""
        copied.learn()
        self.store.learn(copied.right, copied.seen)
        self.store.add(self.name, text)

    def forget(self) -> None:
        """Erase its texts."""
        self.store.forget(self.name)


def namespace_of(memory: Any) -> Namespace | None:
    """Return what a call remembers in, from its `memory=`, which has to be a store or a part of one."""
    if isinstance(memory, SuffixStore):
        return memory.namespace("")
    if not isinstance(memory, Namespace | None):
        raise TypeError(f"memory= takes a SuffixStore, not {type(memory).__name__}; give memory=SuffixStore().")
    return memory
