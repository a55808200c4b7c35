"""Writers of new text: a model on this machine, or a server."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from hf_dart.decoding.suffix_store import SuffixStore
from hf_dart.errors import sentence
from hf_dart.models.packed_weights import pack, packed_weights
from hf_dart.training.data.chat import ChatFormat, Message
from hf_dart.training.regenerate.sampling import Sampling

_TIMEOUT = 600.0  # seconds of one request to a server


class Reply(NamedTuple):
    """An assistant's message, and whether it came to its end; no message where a tool is called."""

    message: Message | None
    finished: bool


class Progress(BaseStreamer):
    """Counter of the tokens of one call, as a streamer of stock's `generate` and as an observer of a drafted one.

    Args:
        tell: called with how many tokens have come since the last call.
        ends: tokens after which a row has ended.
    """

    def __init__(self, tell: Callable[[int], None], ends: Iterable[int]) -> None:
        self._tell, self._ends = tell, torch.tensor(sorted(ends), dtype=torch.long)
        self._open: Tensor | None = None

    def put(self, value: Tensor) -> None:
        """Count a token [B] of every row that has not ended; the prompts [B, P] come first."""
        if self._open is None:
            self._open = torch.ones(len(value), dtype=torch.bool)
        else:
            self._tell(int(self._open.sum()))
            self._open &= ~torch.isin(value.cpu(), self._ends)

    def end(self) -> None:
        """Do nothing where the call has ended."""

    def verified(self, seen: Any, logits: Any) -> None:
        """Count the tokens of a round; the prompt has no logits."""
        if logits is not None:
            self._tell(int(seen.counts.sum()))

    def ended(self, finished: bool) -> None:
        """Do nothing where the call has ended."""


@dataclass
class ModelWriter:
    """A target that `generate` is called of; the same text for the same arguments, as far as its machine allows.

    Args:
        model: the target.
        tokenizer: its tokenizer.
        chat: how conversations become text; None where there are none.
        head: drafts for it, attached; the text is the same.
        tell: called with how many tokens have been written since the last call.
        memory: of what was written, which is drafted from, too.
    """

    model: Any
    tokenizer: Any
    chat: ChatFormat | None = None
    head: Any = None
    tell: Callable[[int], None] = lambda tokens: None
    memory: SuffixStore = field(default_factory=SuffixStore)

    def continue_texts(
        self, prompts: Sequence[list[int]], new_tokens: int, sampling: Sampling, seed: int
    ) -> list[list[int]]:
        """Return new token ids for each prompt, an end token included where one was written."""
        width = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        pad = min(self.ends, default=0) if pad is None else pad
        config = GenerationConfig(
            max_new_tokens=new_tokens,
            eos_token_id=sorted(self.ends) or None,
            pad_token_id=pad,
            **sampling.for_generate(),
        )
        ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        device = self.model.device
        progress = Progress(self.tell, self.ends)
        options = {"streamer": progress} if self.head is None else {"assistant": self.head, "memory": self.memory}
        watching = nullcontext() if self.head is None else _observed(self.head, progress)
        pack(self.model)  # on a CPU, the step of a batch then costs half as much
        with (
            watching,
            packed_weights(self.model),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        ):
            torch.manual_seed(seed)
            sequences = self.model.generate(
                ids.to(device), attention_mask=mask.to(device), generation_config=config, **options
            )
        written = []
        for row in sequences[:, width:].tolist():
            end = next((at + 1 for at, token in enumerate(row) if token in self.ends), len(row))
            written.append(row[:end])
        return written

    def reply(
        self, conversations: Sequence[tuple[list[Message], Any]], new_tokens: int, sampling: Sampling, seed: int
    ) -> list[Reply]:
        """Return the next message of each conversation, given as messages and tools."""
        assert self.chat is not None
        texts = [self.chat.render(messages, prompt=True, tools=tools) for messages, tools in conversations]
        prompts = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        written = self.continue_texts(prompts, new_tokens, sampling, seed)
        both = zip(prompts, written, strict=True)
        return [Reply(self._message(prompt, ids), ids[-1] in self.ends) for prompt, ids in both]

    def _message(self, prompt: list[int], ids: list[int]) -> Message:
        """Return the message that the target wrote after a prompt.

        Raises:
            ValueError: special tokens divide it, and the tokenizer does not say into what.
        """
        special = {*self.tokenizer.all_special_ids} - {self.tokenizer.pad_token_id}
        inside = [token for token in ids[: len(ids) - (ids[-1] in self.ends)] if token in special]
        if not inside:
            return {"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}
        if self.tokenizer.response_template is None:
            raise ValueError(
                f"A reply holds the special token {self.tokenizer.convert_ids_to_tokens(inside[0])!r}, and the "
                "tokenizer has no response_template that names its parts; give it one, or let a --server write that "
                "sends them apart."
            )
        return {"role": "assistant", **self.tokenizer.parse_response(ids, prefix=prompt)}

    @property
    def ends(self) -> set[int]:
        """The tokens that end a text of the target."""
        ends = self.model.generation_config.eos_token_id
        ends = self.tokenizer.eos_token_id if ends is None else ends
        return {*ends} if isinstance(ends, (list, tuple)) else {ends} - {None}


@contextmanager
def _observed(head: Any, observer: Any) -> Iterator[None]:
    """Let an observer be told of what a head's calls commit."""
    before = head.observers
    head.observers = (*before, lambda session: observer)
    try:
        yield
    finally:
        head.observers = before


@dataclass
class ServerWriter:
    """A server with OpenAI-style endpoints `/v1/completions` and `/v1/chat/completions`, such as vLLM's.

    Args:
        url: of the server, with or without `/v1`.
        model: the name under which it serves the target.
        tokenizer: the target's.
        key: sent as bearer token.
        enable_thinking: handed to the server's chat template; None leaves it out.
        requests: that are under way at a time.
        tries: of each request; after a failed one comes a pause, twice as long each time.
        pause: seconds after the first failure.
        tell: called with how many tokens an answer has, where the server says so.
    """

    url: str
    model: str
    tokenizer: Any
    key: str | None = None
    enable_thinking: bool | None = None
    requests: int = 64
    tries: int = 6
    pause: float = 1.0
    tell: Callable[[int], None] = lambda tokens: None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"The server's URL is {self.url!r}; give one such as http://localhost:8000.")

    def continue_texts(
        self, prompts: Sequence[list[int]], new_tokens: int, sampling: Sampling, seed: int
    ) -> list[list[int]]:
        """Return new token ids for each prompt, an end token included where one was written."""

        def one(at: int) -> list[int]:
            # vLLM returns the ids that it wrote; tokenizing other servers' text may give other ids.
            content = {"prompt": list(prompts[at]), "return_token_ids": True}
            choice = self._ask("completions", content, new_tokens, sampling, seed + at)
            ids = choice.get("token_ids")
            if ids is None:
                ids = self.tokenizer(choice["text"], add_special_tokens=False, verbose=False)["input_ids"]
                if choice.get("finish_reason") == "stop" and self.tokenizer.eos_token_id is not None:
                    ids = [*ids, self.tokenizer.eos_token_id]
            elif not all(type(token) is int and 0 <= token < len(self.tokenizer) for token in ids):
                raise ValueError("The server writes token ids that this tokenizer does not have; give its target.")
            return list(ids)

        return self._all(one, len(prompts))

    def reply(
        self, conversations: Sequence[tuple[list[Message], Any]], new_tokens: int, sampling: Sampling, seed: int
    ) -> list[Reply]:
        """Return the next message of each conversation, given as messages and tools."""

        def one(at: int) -> Reply:
            messages, tools = conversations[at]
            content: dict[str, Any] = {"messages": messages}
            if tools:
                content["tools"] = tools
            if self.enable_thinking is not None:
                content["chat_template_kwargs"] = {"enable_thinking": self.enable_thinking}
            choice = self._ask("chat/completions", content, new_tokens, sampling, seed + at)
            answer = choice["message"]
            if answer.get("tool_calls"):  # its text is not all that the target wrote
                return Reply(None, False)
            message = {"role": "assistant", "content": answer.get("content") or ""}
            thoughts = answer.get("reasoning") or answer.get("reasoning_content")  # vLLM has renamed it
            if thoughts:
                message["reasoning_content"] = thoughts
            return Reply(message, choice.get("finish_reason") == "stop")

        return self._all(one, len(conversations))

    def _all(self, one: Callable[[int], Any], count: int) -> list[Any]:
        with ThreadPoolExecutor(self.requests) as pool:
            return list(pool.map(one, range(count)))

    def _ask(
        self, endpoint: str, content: dict[str, Any], new_tokens: int, sampling: Sampling, seed: int
    ) -> dict[str, Any]:
        """Return the first choice of the server's answer.

        Raises:
            ValueError: it refuses the request, or answers with something else than choices.
            ConnectionError: it does not answer.
        """
        address = f"{self.url.rstrip('/').removesuffix('/v1')}/v1/{endpoint}"
        body = {"model": self.model, "max_tokens": new_tokens, "seed": seed, **content, **sampling.for_server()}
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        last: Exception | None = None
        for attempt in range(self.tries):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            try:
                request = urllib.request.Request(address, json.dumps(body).encode(), headers)
                with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
                    answer = json.load(response)
                choice, usage = answer["choices"][0], answer.get("usage")
                self.tell(usage.get("completion_tokens") or 0 if isinstance(usage, dict) else 0)
                return choice
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code != 429:
                    said = " ".join(error.read(500).decode(errors="replace").split())
                    raise ValueError(
                        f"The server refuses a request to {address}: {error.code} ({said}); fix the URL, or what is "
                        "asked for."
                    ) from error
                last = error
            except (LookupError, TypeError, ValueError) as error:
                raise ValueError(f"{address} does not answer as an OpenAI-style server does; fix the URL.") from error
            except (OSError, http.client.HTTPException) as error:  # no connection, a broken one, no answer in time
                last = error
        assert last is not None
        raise ConnectionError(
            f"{address} did not answer in {self.tries} tries ({sentence(last)}); when the server runs, give the same "
            "command again, and it goes on where it stopped."
        )


Writer = ModelWriter | ServerWriter
