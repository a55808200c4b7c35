"""Grammars that a text has to follow, asked ahead of it: tokens that they force are drafted without a drafter.

A grammar library masks the target's scores by a logits processor, in stock `generate` as here. What its processor was
made from is asked a second time, by a matcher of our own, for the tokens that may come: drafts hold what is
forced, and copies leave out what is not allowed. No draft can change the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log
from operator import eq
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from transformers import LogitsProcessorList

from hf_dart.decoding.processors import OUTLINES_LLGUIDANCE, OUTLINES_XGRAMMAR, XGRAMMAR, compiled_of, kind_of
from hf_dart.drafters.base import Proposal
from hf_dart.trees.copies import Copies
from hf_dart.trees.tree import STEP

_WEIGHT, _CHANCE = 20.0, 0.95  # as if so many forced tokens had come before: the target decides how a string is split
_MOST = 32  # forced tokens that are looked for


class Grammar(Protocol):
    """Grammar of one text, asked about any text that it may become; texts begin after the prompt.

    A logits processor that has one offers it as `grammar(row)`.
    """

    def allowed(self, text: Sequence[int]) -> ArrayLike:
        """Return the tokens [n] that may follow `text`; none if `text` is not allowed, or complete."""

    def forced(self, text: Sequence[int]) -> Sequence[int]:
        """Return the tokens that follow `text` in all likelihood, as the grammar allows nothing else to be written."""


class _Matcher:
    """Grammar by something that `accepts` token after token, and takes so many back."""

    def __init__(self, accepts: Callable[[int], bool], take_back: Callable[[int], object]) -> None:
        self._accepts, self._take_back, self._text = accepts, take_back, list[int]()

    def _at(self, text: Sequence[int]) -> bool:
        """Move to the end of `text`; return False if that is not allowed."""
        same = min(len(text), len(self._text))
        while text[:same] != self._text[:same]:  # texts differ near their ends
            same -= 1
        if same < len(self._text):
            self._take_back(len(self._text) - same)
            del self._text[same:]
        for token in text[same:]:
            if not self._accepts(token):
                return False
            self._text.append(token)
        return True


def _tokens(mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the places of the bits that are set in bytes."""
    return np.flatnonzero(np.unpackbits(mask, bitorder="little"))


class XGrammar(_Matcher):
    """Grammar of one text by xgrammar, from a compiled one."""

    def __init__(self, compiled: Any) -> None:
        import xgrammar

        self._matcher = matcher = xgrammar.GrammarMatcher(compiled)
        super().__init__(lambda token: not matcher.is_terminated() and matcher.accept_token(token), matcher.rollback)
        self._bits = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
        self._bytes = compiled.tokenizer_info.decoded_vocab

    def allowed(self, text: Sequence[int]) -> ArrayLike:
        if not self._at(text) or self._matcher.is_terminated():
            return ()
        self._matcher.fill_next_token_bitmask(self._bits)
        return _tokens(self._bits.numpy().view(np.uint8))

    def forced(self, text: Sequence[int]) -> list[int]:
        found: list[int] = []
        while len(found) < _MOST:
            allowed = np.asarray(self.allowed([*text, *found]))
            token = int(allowed[0]) if len(allowed) == 1 else self._longest_forced(allowed)
            if token is None:
                break
            found.append(token)
        return found

    def _longest_forced(self, allowed: np.ndarray[Any, Any]) -> int | None:
        """Return the longest of the allowed tokens that the forced string begins with; None where nothing is forced.

        Each of the others begins with it or begins it. xgrammar's own search for that string does not end in schemas
        that contain themselves.
        """
        spelt = self._bytes
        first = spelt[allowed[0]][:1] if len(allowed) else b""
        if not first or any(spelt[token][:1] != first for token in allowed):  # which free text shows at once
            return None
        rising = sorted(map(int, allowed), key=lambda token: len(spelt[token]))
        best = None
        for place, token in enumerate(rising):
            if not all(spelt[longer].startswith(spelt[token]) for longer in rising[place:]):
                break
            best = token
        return best


class _LLGuidance(_Matcher):
    def __init__(self, matcher: Any) -> None:
        super().__init__(lambda token: matcher.try_consume_tokens([token]) == 1, matcher.rollback)
        self._matcher = matcher

    def allowed(self, text: Sequence[int]) -> ArrayLike:
        if not self._at(text) or self._matcher.is_stopped():
            return ()
        return _tokens(np.frombuffer(self._matcher.compute_bitmask(), np.uint8))

    def forced(self, text: Sequence[int]) -> list[int]:
        return self._matcher.compute_ff_tokens() if self._at(text) else []


class _OutlinesCore(_Matcher):
    def __init__(self, index: Any) -> None:
        self._index, self._states = index, [index.get_initial_state()]
        super().__init__(self._goes_on, self._goes_back)

    def _goes_on(self, token: int) -> bool:
        state = self._index.get_next_state(self._states[-1], token)
        if state is not None:
            self._states.append(state)
        return state is not None

    def _goes_back(self, tokens: int) -> None:
        del self._states[-tokens:]

    def allowed(self, text: Sequence[int]) -> Sequence[int]:
        return self._index.get_allowed_tokens(self._states[-1]) if self._at(text) else ()

    def forced(self, text: Sequence[int]) -> list[int]:
        found: list[int] = []
        while len(found) < _MOST and len(only := self.allowed([*text, *found])) == 1:
            found += only
        return found


def _grammar(processor: Any, row: int) -> Grammar | None:
    """Return the grammar of one row's text by a logits processor; None if it has none that can be asked."""
    if hasattr(processor, "grammar") and callable(processor.grammar):
        return processor.grammar(row)
    kind = kind_of(processor)
    if kind == XGRAMMAR:
        return XGrammar(compiled_of(processor, row))
    if kind == OUTLINES_XGRAMMAR:
        return XGrammar(processor.compiled_grammar)
    if kind == OUTLINES_LLGUIDANCE:
        from llguidance import LLMatcher

        return _LLGuidance(LLMatcher(processor.llg_tokenizer, processor.grammar))
    if kind == "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor":
        return _OutlinesCore(processor.index)
    return None


class RowGrammar:
    """Grammar of what follows the prompt in a row's text, a shared list that grows from outside."""

    def __init__(self, grammar: Grammar, text: list[int]) -> None:
        self._grammar, self._text, self._start = grammar, text, len(text)
        self._run, self._at = list[int](), 0
        self._right, self._seen = _WEIGHT * _CHANCE, _WEIGHT

    def copies(self, found: Copies, depth: int) -> Copies:
        """Return what is allowed of `found`, or what is forced as a chain at most `depth` long: the likelier one."""
        written = self._text[self._start :]
        came = [*map(eq, self._run, self._text[self._at :])]
        right = came.index(False) if False in came else len(came)
        self._right, self._seen = self._right + right, self._seen + right + (right < len(came))
        self._run, self._at = [*self._grammar.forced(written)][:depth], len(self._text)
        count, step = len(self._run), log(min(self._right / self._seen, 1 - STEP))
        totals = [depth * step for depth in range(1, count + 1)]
        forced = Copies(self._run, [*range(-1, count - 1)], [*range(1, count + 1)], totals)
        return max(self._allowed(found, written), forced, key=lambda one: sum(map(exp, one.totals)))

    def _allowed(self, found: Copies, written: list[int]) -> Copies:
        """Return the nodes of copies after the text `written` whose paths are allowed."""
        paths: dict[int, list[int]] = {-1: []}
        following: dict[int, np.ndarray[Any, Any]] = {}
        for node, (token, parent) in enumerate(zip(found.tokens, found.parents, strict=True)):
            if parent in paths:
                if parent not in following:
                    following[parent] = np.asarray(self._grammar.allowed([*written, *paths[parent]]))
                if (following[parent] == token).any():
                    paths[node] = [*paths[parent], token]
        if len(paths) > len(found):
            return found
        return found.only([*paths][1:])

    def restrict(self, proposal: Proposal, row: int) -> None:
        """Take what is not allowed out of the draft of a row, up to the token after what is forced."""
        written = self._text[self._start :]
        if self._at != len(self._text):
            self._run = []
        for depth in range(min(len(self._run) + 1, proposal.logits.shape[1])):
            known = depth < len(self._run)
            allowed = self._run[depth : depth + 1] if known else self._grammar.allowed([*written, *self._run[:depth]])
            logits, vocabulary = proposal.logits[row, depth], proposal.vocabulary
            none = len(logits) if vocabulary is None else int(vocabulary[-1]) + 1
            mask = torch.zeros(none + 1, dtype=torch.bool, device=logits.device)
            mask[torch.as_tensor(allowed, dtype=torch.long, device=logits.device).clamp(max=none)] = True
            mask = mask[:none] if vocabulary is None else mask[vocabulary]
            if mask.any():
                logits.masked_fill_(~mask, -torch.inf)


def grammars_of(processors: LogitsProcessorList, texts: list[list[int]]) -> list[RowGrammar | None]:
    """Return the grammar of each text, so far its prompt, by the first processor that has one; None where none has."""
    for processor in processors:
        found = [_grammar(processor, row) for row in range(len(texts))]
        if any(found):
            return [RowGrammar(one, text) if one else None for one, text in zip(found, texts, strict=True)]
    return [None] * len(texts)
