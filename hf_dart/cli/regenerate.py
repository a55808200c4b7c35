"""`hf-dart regenerate`: a data set in the target's own words, to train heads on."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from hf_dart.bench.pair import load_head, shown_name, target_of
from hf_dart.cli import common
from hf_dart.errors import as_user_error
from hf_dart.hub.loading import load_target, load_tokenizer

_EVERY = 10.0  # seconds between lines that say how far it is
_SHARD = common.checked(
    lambda text: tuple(map(int, text.split("/"))), lambda part: len(part) == 2 and 1 <= part[0] <= part[1], "1/N to N/N"
)


def add(commands: Any) -> None:
    about = "a data set in the target's own words, to train heads on"
    parser = commands.add_parser("regenerate", parents=[common.target_options()], help=about)
    parser.description = "Assistants' messages are written again, other text is continued; interrupted, it goes on."
    data = parser.add_argument_group("data")
    data.add_argument("data", nargs="+", help="files, folders, patterns, or NAME[:CONFIG[:SPLIT]] of the Hub")
    data.add_argument("--text-field", metavar="NAME", help="the field that holds the text (default: text)")
    data.add_argument("--messages-field", metavar="NAME", help="the field that holds conversations (default: messages)")
    data.add_argument("--streaming", action="store_true", help="read in order while writing, instead of shuffled")
    data.add_argument("--cache-dir", metavar="FOLDER", help="cache folder of the datasets library")
    data.add_argument("--chat-template", metavar="FILE", help="chat template to use instead of the tokenizer's")
    data.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="passed to the chat template")

    writing = parser.add_argument_group("writing")
    writing.add_argument("--head", help="a draft head, or auto (copies where none is known): the same text, sooner")
    way = writing.add_mutually_exclusive_group()
    way.add_argument("--temperature", type=common.temperature, default=0.0, help="0, the default, is greedy")
    mixture = "ways to sample, drawn for each row by their shares: '0.4 temperature=1 top_p=0.9' '0.6'; also top_k=, "
    way.add_argument("--mixture", nargs="+", metavar="WAY", help=mixture + "min_p= and repetition_penalty=")
    positive = common.positive
    writing.add_argument("--length", type=positive, default=2048, help="tokens of a row (default: %(default)s)")
    writing.add_argument("--new-tokens", type=positive, default=1024, help="tokens of a reply, at most (default: 1024)")
    prefix = "of text: tokens kept (default: 32 128, and half of --length at most)"
    writing.add_argument("--prefix", type=positive, nargs=2, metavar=("LEAST", "MOST"), help=prefix)
    writing.add_argument("--seed", type=common.seed, default=0, help="of all that is drawn (default: %(default)s)")

    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder to write, for train_data")
    parser.add_argument("--batch-size", type=positive, default=32, help="rows at a time (default: %(default)s)")
    parser.add_argument("--rows", type=positive, help="write the first so many alone (default: all)")
    parser.add_argument("--minutes", type=common.above_zero, default=inf, help="begin no row after that")
    part = "write part I of N of the rows, 1/N to N/N (default: all, or under `accelerate launch` that of the process)"
    parser.add_argument("--shard", type=_SHARD, metavar="I/N", help=part)
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    common.check_folder(arguments.output)
    rank, processes = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    part, parts = arguments.shard or (rank + 1, processes)
    common.set_threads(arguments.threads)
    target = arguments.target or target_of(arguments.head)
    tokenizer = load_tokenizer(target)

    from hf_dart.hub.download import cached_commit
    from hf_dart.hub.machine import versions
    from hf_dart.models.tokenizers import vocabulary_hash
    from hf_dart.training.data.documents import datasets_library
    from hf_dart.training.data.sources import DataArguments
    from hf_dart.training.regenerate.sampling import Sampling
    from hf_dart.training.regenerate.shards import keep_settings, open_sources, regenerate
    from hf_dart.training.regenerate.writer import RegenerateSettings

    with as_user_error():
        datasets_library().disable_progress_bars()
        ways = arguments.mixture or [f"1 temperature={arguments.temperature}"]
        settings = RegenerateSettings(
            prefix=tuple(arguments.prefix or (min(most, arguments.length // 2) for most in (32, 128))),
            mixture=tuple(map(Sampling.parse, ways)),
            **common.given(arguments, ("length", "new_tokens", "seed")),
        )
        fields = common.given(arguments, ("text_field", "messages_field", "streaming", "cache_dir", "chat_template"))
        data = DataArguments(train_data=arguments.data, enable_thinking=arguments.thinking, train_on="all", **fields)
        sources = open_sources(data, tokenizer, arguments.seed)
        model, _ = load_target(target, arguments.dtype, **common.loading_options(arguments))
        head = None if arguments.head is None else load_head(arguments.head, model, tokenizer)
        keep_settings(
            arguments.output,
            {
                "target": Path(target).resolve().name if Path(target).is_dir() else shown_name(target, "target"),
                "target_revision": cached_commit(target),
                "dtype": str(model.dtype).removeprefix("torch."),
                **common.given(arguments, ("attn_implementation", "quantization")),
                "tokenizer": vocabulary_hash(tokenizer),
                "shards": parts,
                "sources": data.train_data,
                "documents": [None if data.streaming else len(documents) for documents, _ in sources],
                "chat_template": next((one.chat.template_text for _, one in sources if one.chat is not None), None),
                "enable_thinking": data.enable_thinking,
                "drawn": "for every row",  # it was for every batch once: those files do not go on with these
                **asdict(settings),
            },
            {
                **versions(("torch", "transformers", "datasets")),
                "head": Path(arguments.head).name if arguments.head else None,
            },
        )
        rows = tokens = 0
        began = said = monotonic()
        limits = {"rows": arguments.rows, "minutes": arguments.minutes, "seats": arguments.batch_size}
        try:
            for record in regenerate(sources, model, head, settings, arguments.output, shard=(part, parts), **limits):
                rows, tokens, now = rows + 1, tokens + record["new_tokens"], monotonic()
                if rows == 1 or now - said >= _EVERY:
                    said, speed = now, tokens / (now - began)
                    common.say(f"shard {part} of {parts}: {rows} rows, {tokens:,} tokens, {speed:.1f} a second")
        finally:  # also where a disk is full
            added = f"{rows} rows were added to {arguments.output}"
            common.say(f"shard {part} of {parts}: {added}; the same command writes what is left")
    return 0
