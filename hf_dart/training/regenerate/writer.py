"""The target as a writer of rows: text that is continued, conversations that get new replies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from transformers import GenerationConfig

from hf_dart.decoding.suffix_store import SuffixStore
from hf_dart.errors import check_fields
from hf_dart.serve.batcher import Batcher
from hf_dart.training.data.chat import Message
from hf_dart.training.data.encoding import Encoder
from hf_dart.training.regenerate.sampling import Sampling


@dataclass(frozen=True)
class RegenerateSettings:
    """Settings of `regenerate`: how long and how random the new text is."""

    length: int = 2048  # tokens of a piece of text, prefix included; longer conversations get no more replies
    new_tokens: int = 1024  # the most of a reply
    prefix: tuple[int, int] = (32, 128)  # the fewest and most tokens of a piece that are kept; drawn for every row
    mixture: tuple[Sampling, ...] = (Sampling(),)  # how rows are written; drawn for every row, by their shares
    seed: int = 0  # of all that is drawn

    def __post_init__(self) -> None:
        check_fields(self, least={"length": 1, "new_tokens": 1})
        if not 1 <= self.prefix[0] <= self.prefix[1] < self.length:
            raise ValueError(
                f"prefix is {self.prefix[0]} to {self.prefix[1]} tokens, of rows of length {self.length}; give two "
                f"numbers from 1 to {self.length - 1}, the smaller one first, or a greater length."
            )


class Row(NamedTuple):
    """A piece of text as token ids, or a conversation as messages and tools; and its number."""

    number: int
    content: Any
    encoder: Encoder


@dataclass
class Writer:
    """A target that writes rows, which several threads may ask for at a time."""

    batcher: Batcher  # of the target, and of the drafter that drafts for it
    ends: set[int]  # the tokens that end a text
    settings: RegenerateSettings
    memory: SuffixStore | None = None  # of what was written, which is drafted from, too

    def record(self, row: Row) -> dict[str, Any] | None:
        """Return a row as it is written; None where there was no room for a reply.

        Text: `text`, `input_ids`, `prompt_tokens` (how many of them were given). Conversations: `messages`, `tools`.
        Both: `row`, its number, `sampling`, the number of the entry of the mixture, and `new_tokens`, how many it has.
        """
        settings = self.settings
        random = np.random.default_rng([settings.seed, row.number])
        shares = np.array([sampling.share for sampling in settings.mixture])
        way = int(random.choice(len(shares), p=shares / shares.sum()))
        prefix = int(random.integers(settings.prefix[0], settings.prefix[1] + 1))
        seed = int(random.integers(2**31))
        if row.encoder.kind == "messages":
            record = self._rewritten(row, settings.mixture[way], seed)
            if record is None:
                return None
        else:
            prompt = row.content[:prefix]
            new = self._continued(prompt, settings.length - prefix, settings.mixture[way], seed, row.encoder.tokenizer)
            text = row.encoder.tokenizer.decode([*prompt, *new], skip_special_tokens=True)
            record = {"text": text, "input_ids": [*prompt, *new], "prompt_tokens": len(prompt), "new_tokens": len(new)}
        return {**record, "row": row.number, "sampling": way}

    def _continued(self, prompt: list[int], room: int, sampling: Sampling, seed: int, tokenizer: Any) -> list[int]:
        """Return the token ids that the target writes after a prompt, an end token included where it writes one."""
        config = GenerationConfig(
            max_new_tokens=min(room, self.settings.new_tokens),
            eos_token_id=sorted(self.ends) or None,
            pad_token_id=min(self.ends, default=0),
            **sampling.for_generate(),
        )
        output = self.batcher.submit(prompt, config, seed=seed, memory=self.memory, tokenizer=tokenizer).result()
        return output[0, len(prompt) :].tolist()

    def _rewritten(self, row: Row, sampling: Sampling, seed: int) -> dict[str, Any] | None:
        """Return a new message in place of every assistant's, after the new ones before it.

        One that does not end is the last, and the one before a call of a tool.
        """
        (messages, tools), encoder = row.content, row.encoder
        assert encoder.chat is not None
        history: list[Message] = []
        kept = tokens = 0  # messages up to the last new one
        for turn, message in enumerate([*messages, {"role": "assistant"}]):
            if message["role"] != "assistant" or turn == 0:
                history.append(message)
                continue
            if history[-1]["role"] == "assistant":
                break
            text = encoder.chat.render(history, prompt=True, tools=tools)
            prompt = encoder.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if len(prompt) >= self.settings.length:
                break
            new = self._continued(prompt, self.settings.new_tokens, sampling, seed + turn, encoder.tokenizer)
            history.append(as_message(encoder.tokenizer, self.ends, prompt, new))
            kept, tokens = len(history), tokens + len(new)
            if new[-1] not in self.ends:
                break
        record = {"messages": history[:kept], "new_tokens": tokens}
        return {**record, **({"tools": tools} if tools else {})} if kept else None


def as_message(tokenizer: Any, ends: set[int], prompt: list[int], ids: list[int]) -> Message:
    """Return the message that the target wrote after a prompt."""
    special = {*tokenizer.all_special_ids} - {tokenizer.pad_token_id}
    inside = [token for token in ids[: len(ids) - (ids[-1] in ends)] if token in special]
    if not inside:
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    if tokenizer.response_template is None:
        token = tokenizer.convert_ids_to_tokens(inside[0])
        raise ValueError(f"A reply holds the special token {token!r}; give the tokenizer a response_template.")
    return {"role": "assistant", **tokenizer.parse_response(ids, prefix=prompt)}
