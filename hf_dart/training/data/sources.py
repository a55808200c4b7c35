"""Training rows of files or datasets of the Hub, text or conversations, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from math import inf
from typing import Any

from hf_dart import __version__
from hf_dart.drafters.dart.configuration import DartConfig
from hf_dart.errors import check_fields, read_text, sentence
from hf_dart.models.tokenizers import same_vocabulary, template_hash
from hf_dart.training.data.chat import ChatFormat
from hf_dart.training.data.documents import Source, datasets_library, group_files, open_source
from hf_dart.training.data.encoding import Encoder
from hf_dart.training.data.packing import Packer
from hf_dart.training.options import option

_BESIDE = ("prompt_tokens", "tools")  # fields that say more about a document
_COMPLETION = "completion"  # the field of what follows that called "prompt"
# Kinds of documents (`Encoder.kind`) and the fields that hold them, in the order in which they are looked for.
_FIELDS = [
    ("input_ids", "input_ids"),
    ("messages", "messages"),
    ("messages", "conversations"),
    (_COMPLETION, _COMPLETION),
    ("text", "text"),
]
# Fields of datasets that hold more than text, their plural left out.
_NO_TEXT = {"image", "video", "audio", "pixel_value", "input_feature"}
_BATCH = 1000  # documents that are packed together: all that a stream holds of them at a time
_SHUFFLED = 1000  # documents of a stream that are shuffled at a time


@dataclass
class DataArguments:
    """Sources of the training rows, and how rows are made of them; for `HfArgumentParser`.

    A source is a file (.jsonl, .json, .parquet, .txt, .py, or .bin: raw uint16 token ids, each document with the
    end-of-text token after it), a folder, a pattern such as `data/*.jsonl`, or a dataset of the Hub as
    NAME[:CONFIG[:SPLIT]]. Its rows are `input_ids` (with `prompt_tokens`, how many of them the target did not
    write), `messages` or ShareGPT's `conversations` (also `tools`), `prompt` and `completion` (two texts, or messages),
    or `text`, whichever comes first.

    Raises:
        ValueError: a field is out of range.
    """

    train_data: list[str] = option(MISSING, "files, folders, patterns, or NAME[:CONFIG[:SPLIT]] of the Hub")
    eval_data: list[str] = option([], "as train_data; the default split of the Hub is 'validation'")
    eval_documents: int = option(0, "first documents of each source, kept out of training to evaluate on")
    shares: list[float] | None = option(None, "of the rows, one number per source; default: every row once per epoch")
    text_field: str | None = option(None, "the field that holds the text")
    messages_field: str | None = option(None, "the field that holds the conversation")
    chat_template: str | None = option(None, "a chat template or a file with one, instead of the tokenizer's")
    enable_thinking: bool | None = option(None, "passed to the chat template")
    train_on: str = option("assistant", "draft only what the assistant (or the target) wrote, or 'all'")
    max_length: int = option(2048, "tokens of a row")
    packing: bool = option(True, "pack several documents into a row, none attends to another")
    streaming: bool = option(False, "read while training, over and over until max_steps, and keep nothing on disk")
    shuffle_seed: int = option(0, "seed of streams and mixtures")
    num_proc: int | None = option(None, "processes that tokenize")
    cache_dir: str | None = option(None, "cache folder of the datasets library")

    def __post_init__(self) -> None:
        if not self.train_data:
            raise ValueError("train_data is empty; name at least one source.")
        least = {"max_length": 2, "eval_documents": 0}
        check_fields(self, least=least, choices={"train_on": ("assistant", "all")})
        if self.shares is not None and len(self.shares) != (sources := len(self.train_data)):
            raise ValueError(f"shares has {len(self.shares)} numbers for {sources} sources; give one for each.")
        if self.shares is not None and not all(0 < share < inf for share in self.shares):
            raise ValueError(f"shares are {self.shares}; give numbers above 0.")
        if self.shares is None and self.streaming and len(group_files(self.train_data)) > 1:
            raise ValueError("Streams of several sources are mixed; give shares, one number for each.")


def load_rows(
    arguments: DataArguments, tokenizer: Any, draft_length: int, config: DartConfig | None = None
) -> tuple[Any, Any | None]:
    """Training rows, and evaluation rows or None: `input_ids`, `documents`, `loss_mask` [T] as `datasets.Dataset`s.

    Documents are tokenized and packed once and kept in the cache of `datasets`, or with `streaming` on the fly:
    training rows are then a `datasets.IterableDataset` without an end, in an order that depends on the arguments only.

    Args:
        arguments: the sources.
        tokenizer: the target's.
        draft_length: d.
        config: of the head to be trained. Its vocabulary is compared with the tokenizer's; where conversations are
            read, their chat template's hash and thinking flag are written into it.

    Raises:
        ValueError: a source cannot be read, holds nothing to train on, or does not fit the tokenizer.
        UserError: the file of the chat template cannot be read.
    """
    datasets = datasets_library()
    _check_tokenizer(tokenizer, config)
    train, held_out, encoders = [], [], []
    one_each = [[name] for name in arguments.train_data]  # as there is one share per name
    for names in group_files(arguments.train_data) if arguments.shares is None else one_each:
        documents, encoder = open_encoded(arguments, names, "train", tokenizer, draft_length)
        encoders.append(encoder)
        if count := arguments.eval_documents:
            if not arguments.streaming and len(documents) <= count:
                raise ValueError(f"{encoder.source} has {len(documents)} documents; give a smaller eval_documents.")
            held_out.append(_rows(arguments, documents.take(count), encoder))
            documents = documents.skip(count)
        train.append(_rows(arguments, documents, encoder, endless=arguments.streaming))
    for names in group_files(arguments.eval_data):
        held_out.append(_rows(arguments, *open_encoded(arguments, names, "validation", tokenizer, draft_length)))
    _keep_template(config, encoders)
    if arguments.shares is None or len(train) == 1:
        rows = datasets.concatenate_datasets(train)
    else:
        shares = [share / sum(arguments.shares) for share in arguments.shares]
        rows = datasets.interleave_datasets(train, shares, arguments.shuffle_seed, stopping_strategy="all_exhausted")
    evaluation = datasets.concatenate_datasets(held_out).with_format("torch") if held_out else None
    return rows.with_format("torch"), evaluation


def pack_dataset(
    documents: Any, tokenizer: Any, draft_length: int, max_length: int, config: DartConfig | None = None
) -> Any:
    """Rows of `max_length` tokens, as `load_rows` makes them, from a dataset of the library `datasets`."""
    source = Source("The dataset", documents, documents.column_names)
    if seen := [name for name in source.columns if name.rstrip("s") in _NO_TEXT]:
        raise ValueError(f"The field {seen[0]!r} holds no text to pack; make rows with hf_dart.training.image_row.")
    if tokenizer is None:
        raise ValueError(f"The dataset has {source.columns}, no packed rows; pass processing_class=tokenizer.")
    arguments = DataArguments([source.name], max_length=max_length, streaming=not hasattr(documents, "__len__"))
    _check_tokenizer(tokenizer, config)
    documents, encoder = encoded(arguments, source, tokenizer, draft_length)
    _keep_template(config, [encoder])
    return _rows(arguments, documents, encoder).with_format("torch")


def _check_tokenizer(tokenizer: Any, config: DartConfig | None) -> None:
    known = None if config is None else config.tokenizer_hash
    if config is not None and known is not None and not same_vocabulary(known, tokenizer, config.vocab_size):
        raise ValueError(f"The tokenizer is not the one that the head was made with; give {config.target_name}'s.")


def _keep_template(config: DartConfig | None, encoders: Sequence[Encoder]) -> None:
    """Write into the config of a head how the conversations that it learns from are rendered."""
    chat = next((encoder.chat for encoder in encoders if encoder.chat is not None), None)
    if config is not None and chat is not None:
        config.chat_template_hash = template_hash(chat.template_text)
        config.enable_thinking = chat.enable_thinking


def open_encoded(
    arguments: DataArguments, names: Sequence[str], split: str, tokenizer: Any, draft_length: int
) -> tuple[Any, Encoder]:
    """Return the documents of a source (`open_source`), and what makes rows of them."""
    streaming, cache = arguments.streaming, arguments.cache_dir
    source = open_source(names, split=split, tokenizer=tokenizer, streaming=streaming, cache_dir=cache)
    return encoded(arguments, source, tokenizer, draft_length)


def encoded(arguments: DataArguments, source: Source, tokenizer: Any, draft_length: int) -> tuple[Any, Encoder]:
    """Choose the field of an open source to read, and the encoder of it, as `open_encoded` does."""
    kind, field_name = _field(arguments, source)
    beside = ("prompt", *_BESIDE) if kind == _COMPLETION else _BESIDE
    if kind == _COMPLETION and isinstance(next(iter(source.documents))[field_name], list):
        kind = "messages"
    chat = None
    if kind == "messages":
        template = arguments.chat_template
        if template is not None and "{" not in template:
            template = read_text(template, "the chat template ")
        chat = ChatFormat(tokenizer, template, arguments.enable_thinking)
    columns = [field_name, *(name for name in beside if name in source.columns)]
    pack = Packer(arguments.max_length, draft_length, arguments.packing, tokenizer.bos_token_id)
    everything = arguments.train_on == "all"
    encoder = Encoder(kind, columns, tokenizer, chat, everything, pack, source.name, __version__)
    return source.documents.select_columns(columns), encoder


def _field(arguments: DataArguments, source: Source) -> tuple[str, str]:
    """Find the field of a source to read: its kind (`Encoder.kind`) and its name."""
    given = {"messages": arguments.messages_field, "text": arguments.text_field}
    asked = [(kind, name) for kind, name in given.items() if name is not None] or _FIELDS
    for kind, name in asked:
        if name in source.columns and (kind != _COMPLETION or "prompt" in source.columns):
            return kind, name
    raise ValueError(
        f"{source.name} has no field {' nor '.join(repr(name) for _, name in asked)}, only "
        f"{', '.join(map(repr, source.columns))}; rename one (rename_column), or name the one that holds the text "
        "with text_field, or the conversation with messages_field."
    )


def _rows(arguments: DataArguments, documents: Any, encoder: Encoder, endless: bool = False) -> Any:
    """Return the packed rows of a source, at least one of them; a stream that is `endless` repeats them, shuffled."""
    datasets = datasets_library()
    length = arguments.max_length
    types = (("input_ids", "int32"), ("documents", "int32"), ("loss_mask", "bool"))
    options: dict[str, Any] = {
        "batched": True,
        "batch_size": _BATCH,
        "remove_columns": list(encoder.columns),
        "features": datasets.Features({name: datasets.Sequence(datasets.Value(kind), length) for name, kind in types}),
    }
    if not arguments.streaming:
        options |= {"desc": f"{encoder.source}: tokenizing", "num_proc": arguments.num_proc}
        encoder.tokenizer("")  # its first call changes it, and the cache key of rows depends on it
    try:
        rows = documents.map(encoder, **options)
        first = next(iter(rows), None)
    except (UnicodeDecodeError, SystemError) as error:  # pyarrow's, where lengths in a damaged file are impossible
        raise ValueError(f"{encoder.source} is damaged ({sentence(error)}); write or fetch it again.") from error
    if first is None:
        needed = encoder.pack.draft_length + 1
        raise ValueError(
            f"{encoder.source} holds nothing to train on: its documents are empty, shorter than the {needed} tokens "
            "that a draft needs, or have no reply of an assistant so long; give longer ones, check the roles of "
            "messages, or train on all tokens with train_on='all'."
        )
    if endless:
        # `Trainer` resumes a stream by reading it again, but only within its first pass. Documents are shuffled, not
        # rows: what is shuffled after `map` is read shard by shard, and packed poorly.
        documents = documents.repeat(None).shuffle(seed=arguments.shuffle_seed, buffer_size=_SHUFFLED)
        rows = documents.map(encoder, **options)
    return rows
