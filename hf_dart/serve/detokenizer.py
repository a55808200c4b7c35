"""`Detokenizer`: text as its tokens come, in whole characters, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Detokenizer:
    """Text of tokens that come one by one: what `add` and `end` return, joined, is the text of all of them.

    Only the last tokens are decoded again, with those before them (`before` the text) that decide on spaces in between.
    The first of `stops` that appears ends the text, and is no part of it. `special` tokens are text, too, if asked for.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], special: bool = False, before: Sequence[int] = ()) -> None:
        self._tokenizer, self._stops, self._special = tokenizer, stops, special
        tails = (before[-size:] for size in range(1, 5))  # the last character may have as many
        self._ids = [*next((tail for tail in tails if "\ufffd" not in tokenizer.decode(tail)), ())]
        self._before, self._passed = len(self._ids), len(self._decode())  # tokens and characters that are passed on
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False  # True once one of `stops` has appeared

    def add(self, token: int) -> str:
        """Take a token, and return what of the text is certain now."""
        self._ids.append(token)
        text = self._decode()
        if len(text) <= self._passed or text.endswith("\ufffd"):  # which may be the beginning of a character
            return ""
        new, self._ids = text[self._passed :], self._ids[self._before :]
        self._before, self._passed = len(self._ids), len(self._decode())
        return self._up_to_stop(new)

    def end(self) -> str:
        """Return the rest of the text."""
        return self._up_to_stop(self._decode()[self._passed :]) + self._held

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=not self._special)

    def _up_to_stop(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        begun = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        shown = len(text) - max(begun, default=0)
        self._held = text[shown:]
        return text[:shown]
