"""`Service`: one drafted model for many requests, and what it tells of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_dart.decoding.api import requested
from hf_dart.decoding.suffix_store import SuffixStore
from hf_dart.drafters.compatibility import unwrapped
from hf_dart.errors import as_user_error, sentence
from hf_dart.models.positions import position_limit
from hf_dart.models.tokenizers import end_tokens
from hf_dart.serve.batcher import MAX_TOKENS, PREFIX_TOKENS, Batcher
from hf_dart.serve.metrics import Metrics
from hf_dart.serve.parameters import Asked, CompletionAsked, Refusal
from hf_dart.serve.tools import grammar_of

_UNASKED = 1024  # new tokens at most, where the request does not say
_COMPILED = 64 << 20  # bytes of compiled schemas that are kept
_OWN = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


@dataclass(frozen=True)
class Limits:
    """Bounds of what requests may ask for."""

    length: int  # tokens of a prompt and its text together
    seats: int = 16  # texts that are written at a time
    max_tokens: int = MAX_TOKENS  # that they may hold together (`Batcher`)
    waiting: int = 64  # texts that may wait for a seat
    max_body: int = 2**22  # bytes of a request
    timeout: float = 600.0  # seconds until it is answered


class Service:
    """A model, which is listed by the first of its `names`, and the batcher that writes.

    `memory` is of texts, from which later ones of the same user are drafted. `reader` reads prompts, one at a time, and
    `compiler` schemas, which may take long.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        drafter: Any,
        names: Sequence[str],
        limits: Limits,
        memory: SuffixStore | None = None,
    ) -> None:
        self.model, self.tokenizer, self.names, self.limits = model, tokenizer, [*names], limits
        self.taken = 0  # texts that are being written or wait
        kept = 0 if memory is None else PREFIX_TOKENS
        self.batcher = Batcher(model, drafter, seats=limits.seats, max_tokens=limits.max_tokens, prefix_tokens=kept)
        token = torch.ones(1, 1, dtype=torch.long, device=self.batcher.device)
        about = "No request can be answered with the target's generation_config; change it there"
        with as_user_error(ValueError, about=about):
            requested(unwrapped(model), token, attention_mask=token, assistant=drafter, tokenizer=tokenizer)
        gauges: dict[str, Callable[[], float]] = {
            "num_requests_running": lambda: self.batcher.running,
            "num_requests_waiting": lambda: self.batcher.waiting,
            "num_seats": lambda: limits.seats,
            "num_memory_tokens": lambda: 0 if memory is None else memory.tokens,
        }
        self.metrics, self._memory = Metrics(self.names[0], gauges), memory
        self.reader, self.compiler = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.ends = frozenset(end_tokens(model))  # of a text
        self._samples = bool(model.generation_config.do_sample)
        self._vocabulary = len(model.get_input_embeddings().weight)
        self._grammars: Any = None

    @property
    def room(self) -> int:
        """Number of texts that may be written or wait."""
        return self.limits.seats + self.limits.waiting

    def close(self) -> None:
        self.reader.shutdown(wait=False)
        self.compiler.shutdown(wait=False, cancel_futures=True)
        self.batcher.close(cancel=True)

    def refuse_if_full(self, more: int = 1) -> None:
        """Raise a `Refusal` if so many more texts find no place."""
        if more > self.room:
            raise Refusal(f"{more} texts are asked for at once; ask for {self.room} at most.", "n")
        if self.taken + more > self.room:
            message = f"{self.taken} texts are written or wait, as many as may be; try again in a second."
            raise Refusal(message, status=429, **{"Retry-After": "1"})

    def check_name(self, name: str | None) -> None:
        """Raise a `Refusal` for the name of another model."""
        if name is not None and name not in self.names:
            message = f"There is no model {name!r:.200} here; leave it out, or name {self.names[0]!r}."
            raise Refusal(message, "model", 404, "model_not_found")

    def read(self, asked: Asked) -> tuple[list[list[int]], list[dict[str, Any]]]:
        """Return of each prompt its token ids, and options of `generate`; raise a `Refusal` if they cannot be had."""
        self.check_name(asked.model)
        for token in asked.logit_bias or ():
            if int(token) >= self._vocabulary:
                raise Refusal(f"logit_bias names token {token}; give ids below {self._vocabulary}.", "logit_bias")
        if isinstance(asked, CompletionAsked):
            prompts = [self._ids(one, asked.said) for one in asked.prompt]
        else:
            prompts = [self._talk(asked)]
        user = asked.user or asked.safety_identifier or ""  # requests that name none remember together
        memory = None if self._memory is None else self._memory.namespace(user)
        options = {**asked.sampling(self._samples), "memory": memory}
        return prompts, [{**options, "max_new_tokens": self._most(len(ids), asked)} for ids in prompts]

    def grammar(self, asked: Asked) -> Any:
        """Compile the JSON schema or the calls that a grammar holds the texts to (xgrammar), if it is not known yet."""
        name = "tool_choice" if asked.forced else asked.form
        try:
            import xgrammar
        except ImportError as error:
            message = f"{name} needs xgrammar on the server: pip install xgrammar there, or leave it out."
            raise Refusal(message, name) from error
        try:
            if self._grammars is None:
                about: dict[str, Any] = {"vocab_size": self._vocabulary, "stop_token_ids": sorted(self.ends)}
                info = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, **about)
                self._grammars = xgrammar.GrammarCompiler(info, cache_limit_bytes=_COMPILED)
            if asked.forced:
                return self._grammars.compile_structural_tag(grammar_of(asked, xgrammar))
            return self._grammars.compile_json_schema(asked.schema_of_text, any_whitespace=False)
        except (RuntimeError, ValueError) as error:
            why = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", sentence(error))  # where it lies in xgrammar's source
            raise Refusal(f"The schema of {name} cannot be met: {why}", name) from error

    def _ids(self, prompt: str | list[int], name: str, **options: Any) -> list[int]:
        """Return the token ids of a prompt."""
        try:
            ids = self.tokenizer(prompt, **options)["input_ids"] if isinstance(prompt, str) else prompt
        except (TypeError, ValueError) as error:
            raise Refusal("The prompt has half a character (a lone surrogate); give whole ones.", name) from error
        if not ids:
            raise Refusal("The prompt is empty; give some text.", name)
        if not all(0 <= one < self._vocabulary for one in ids):
            raise Refusal(f"The prompt has ids that are no tokens; give some below {self._vocabulary}.", name)
        return ids

    def _talk(self, asked: Any) -> list[int]:
        """Return messages in the model's chat template, as token ids."""
        flags = asked.chat_template_kwargs or {}
        if not self.tokenizer.chat_template:
            raise Refusal("The model has no chat template; start the server with --chat-template FILE.", asked.said)
        if own := _OWN & flags.keys():
            raise Refusal(f"{min(own)} is nothing that a template reads; leave it out.", "chat_template_kwargs")
        write = partial(self.tokenizer.apply_chat_template, asked.turns, tokenize=False, add_generation_prompt=True)
        try:  # a template is a program
            text = write(tools=asked.functions or None, **flags)
            unread = bool(asked.functions) and text == write(**flags)
        except Exception as error:
            raise Refusal(f"The chat template does not take these messages: {sentence(error)}", asked.said) from error
        if unread:
            raise Refusal("The chat template does not read tools; start the server with --chat-template FILE.", "tools")
        return self._ids(text, asked.said, add_special_tokens=False)

    def _most(self, prompt: int, asked: Asked) -> int:
        """Return how many tokens are written at most after a prompt of so many."""
        length, most = self.limits.length, asked.most or 1
        if prompt + most > length:
            message = f"The model takes {length} tokens, and {prompt} of the prompt and {most} new ones are more"
            raise Refusal(f"{message}; ask for fewer.", asked.said, code="context_length_exceeded")
        return asked.most or min(length - prompt, _UNASKED)


def length_of(model: Any, most: int) -> int:
    """Return how many tokens seats take of a model: those it was made for, or `most` if these are fewer."""
    return min(position_limit(model) + 1, most)
