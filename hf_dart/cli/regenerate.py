"""`hf-dart regenerate`: a data set in the target's own words, to train heads on."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from time import monotonic
from typing import Any

from hf_dart.bench.pair import load_head
from hf_dart.cli import common
from hf_dart.errors import UserError, as_user_error
from hf_dart.hub.loading import load_target, load_tokenizer

_OF_THE_MODEL = ("attn_implementation", "quantization")  # and of what it writes
_OF_THIS_MACHINE = ("head", "chat_template", "dtype", "device_map", *_OF_THE_MODEL)


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "regenerate",
        parents=[common.target_options()],
        help="a data set in the target's own words, to train heads on",
        description="Assistants' messages are written again, other text is continued from its beginnings. Interrupted, "
        "the same command goes on where it stopped. Several processes (accelerate launch -m hf_dart.cli regenerate "
        "...) share the work.",
    )
    data = parser.add_argument_group("data")
    data.add_argument("data", nargs="+", help="files, folders, patterns, or NAME[:CONFIG[:SPLIT]] of the Hub")
    data.add_argument("--text-field", metavar="NAME", help="the field that holds the text (default: text)")
    data.add_argument("--messages-field", metavar="NAME", help="the field that holds conversations (default: messages)")
    data.add_argument("--streaming", action="store_true", help="read in order while writing, instead of shuffled")
    data.add_argument("--cache-dir", metavar="FOLDER", help="cache folder of the datasets library")
    data.add_argument("--chat-template", metavar="FILE", help="chat template to use instead of the tokenizer's")
    data.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="passed to the chat template")

    writing = parser.add_argument_group("writing")
    writing.add_argument("--head", help="a draft head for the target: the same text, sooner")
    writing.add_argument(
        "--server", metavar="URL", help="let a server write (OpenAI-style; vLLM with --generation-config vllm)"
    )
    writing.add_argument("--model", metavar="NAME", help="the target's name there (default: --target)")
    way = writing.add_mutually_exclusive_group()
    way.add_argument("--temperature", type=common.temperature, default=0.0, help="0, the default, is greedy")
    way.add_argument(
        "--mixture",
        nargs="+",
        metavar="WAY",
        help="one way to sample or several, drawn for every row by their shares: '0.4 temperature=1 top_p=0.9' '0.6'; "
        "also top_k=, min_p= and repetition_penalty=",
    )
    positive = common.positive
    writing.add_argument("--length", type=positive, default=2048, help="tokens of a row (default: %(default)s)")
    writing.add_argument("--new-tokens", type=positive, default=1024, help="tokens of a reply, at most (default: 1024)")
    writing.add_argument(
        "--prefix", type=positive, nargs=2, default=(32, 128), metavar=("LEAST", "MOST"), help="of text: tokens kept"
    )

    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder to write, for train_data")
    parser.add_argument("--batch-size", type=positive, default=32, help="rows at a time (default: %(default)s)")
    parser.add_argument("--rows", type=positive, help="write no batch after so many (default: all)")
    parser.add_argument("--minutes", type=float, help="begin no batch after that")
    parser.add_argument("--seed", type=common.seed, default=0, help="default: %(default)s")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    began = monotonic()
    if arguments.server and (own := common.given(arguments, _OF_THIS_MACHINE)):
        raise UserError(f"A server writes on its own; leave out --{next(iter(own)).replace('_', '-')}.")
    if arguments.model and not arguments.server:
        raise UserError("--model is the target's name on a server; give --server, or --target instead.")
    common.check_folder(arguments.output)
    rank, processes = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    common.set_threads(arguments.threads)
    tokenizer = load_tokenizer(arguments.target)
    from hf_dart.hub.machine import versions
    from hf_dart.models.tokenizers import vocabulary_hash
    from hf_dart.training.data.documents import datasets_library
    from hf_dart.training.data.sources import DataArguments
    from hf_dart.training.regenerate.regenerate import RegenerateSettings, begin, describe, open_sources, regenerate
    from hf_dart.training.regenerate.sampling import Sampling

    with as_user_error():
        datasets_library().disable_progress_bars()
        shape = common.given(arguments, ("length", "new_tokens", "batch_size", "seed"))
        ways = arguments.mixture or [f"1 temperature={arguments.temperature}"]
        mixture = tuple(map(Sampling.parse, ways))
        settings = RegenerateSettings(prefix=tuple(arguments.prefix), mixture=mixture, **shape)
        fields = common.given(arguments, ("text_field", "messages_field", "streaming", "cache_dir", "chat_template"))
        thinking = arguments.thinking
        data = DataArguments(train_data=arguments.data, enable_thinking=thinking, train_on="all", **fields)
        sources = open_sources(data, tokenizer, arguments.seed)
        writer, made_by = _writer(arguments, tokenizer, sources)
        text = {**made_by, "tokenizer": vocabulary_hash(tokenizer)}
        head = Path(arguments.head).name if arguments.head else None
        begin(
            arguments.output,
            {**text, **describe(data, sources, settings)},
            {**versions(("torch", "transformers", "datasets")), "head": head},
        )
        written, tokens = 0, Tokens(rank)
        writer.tell = tokens.add
        for batch, records in regenerate(
            sources, writer, settings, arguments.output, rank=rank, processes=processes, rows=arguments.rows
        ):
            written += len(records)
            seconds = monotonic() - began
            common.say(f"process {rank}: batch {batch}; now {written} rows, {written / seconds:.2f} a second; {tokens}")
            if arguments.minutes is not None and seconds > 60 * arguments.minutes:
                break
    return 0


class Tokens:
    """Counter of tokens that says every few seconds how many there are.

    Args:
        rank: of the process.
        every: seconds.
    """

    def __init__(self, rank: int, every: float = 10.0) -> None:
        self._rank, self._every, self._count = rank, every, 0
        self._began = self._said = monotonic()

    def add(self, tokens: int) -> None:
        """Count tokens that were written."""
        self._count += tokens
        if monotonic() - self._said >= self._every:
            self._said = monotonic()
            common.say(f"process {self._rank}: {self}")

    def __str__(self) -> str:
        """Tell how many tokens there are, and how many came a second."""
        return f"{self._count:,} tokens, {self._count / max(monotonic() - self._began, 1e-9):.1f} a second"


def _writer(arguments: argparse.Namespace, tokenizer: Any, sources: Any) -> tuple[Any, dict[str, Any]]:
    """Return the writer, and the fields about it that its text depends on."""
    from hf_dart.training.regenerate.writers import ModelWriter, ServerWriter

    name = arguments.target or "packaged target"
    if arguments.server:
        served = arguments.model or name
        key = os.environ.get("OPENAI_API_KEY")
        writer = ServerWriter(
            arguments.server, served, tokenizer, key, arguments.thinking, requests=arguments.batch_size
        )
        return writer, {"target": name, "served_as": served}
    import torch

    from hf_dart.hub.download import cached_commit

    device_map = arguments.device_map
    if device_map is None and torch.cuda.is_available():
        device_map = {"": int(os.environ.get("LOCAL_RANK", 0))}
    model, _ = load_target(arguments.target, arguments.dtype, device_map, **common.loading_options(arguments))
    head = None if arguments.head is None else load_head(arguments.head, model, tokenizer)
    chat = next((encoder.chat for _, encoder in sources if encoder.chat is not None), None)
    made_by = {
        "target": Path(name).resolve().name if Path(name).is_dir() else name,
        "target_revision": cached_commit(arguments.target or ""),
        "dtype": str(model.dtype).removeprefix("torch."),
        **common.given(arguments, _OF_THE_MODEL),
    }
    return ModelWriter(model, tokenizer, chat, head), made_by
