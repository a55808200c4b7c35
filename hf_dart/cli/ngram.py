"""`hf-dart ngram`: count a corpus, merge and prune what was counted, look at a table."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

from hf_dart.cli.common import given, positive, say, sizes, text_option
from hf_dart.errors import UserError, as_user_error, read_text
from hf_dart.hub.loading import load_tokenizer


def add(commands: Any) -> None:
    parser = commands.add_parser("ngram", help="count n-grams of a corpus, by which trees are scored")
    steps = parser.add_subparsers(required=True, metavar="STEP")

    build = steps.add_parser("build", help="count texts, token ids or a data set into a table")
    build.add_argument("table", type=Path, help="the file to write")
    corpus = build.add_mutually_exclusive_group(required=True)
    text_option(corpus, "one document per file")
    corpus.add_argument("--tokens", type=Path, metavar="FILE", help="token ids in a row: .npy, or raw uint16")
    corpus.add_argument("--dataset", metavar="NAME", help="files, a folder, or NAME[:CONFIG[:SPLIT]] of the Hub")
    build.add_argument("--column", default="text", help="field of texts or token ids (default: %(default)s)")
    build.add_argument("--tokenizer", help="the target's, a folder or a Hub id (default: the packaged target's)")
    build.add_argument("--order", type=positive, default=3, help="length of the longest n-grams (default: %(default)s)")
    build.add_argument("--vocab-size", type=positive, metavar="V", help="rows of the target's embeddings, if fewer")
    build.set_defaults(command=_build)

    merge = steps.add_parser("merge", help="add up tables, such as those of several machines; prunes them too")
    merge.add_argument("table", type=Path, help="the file to write")
    merge.add_argument("parts", type=Path, nargs="+", metavar="PART", help="tables of one order and one tokenizer")
    merge.set_defaults(command=_merge)

    fewest = "leave out n-grams that occur less often: for bigrams, trigrams, ..., such as 1,2 (default: keep all)"
    for step in (build, merge):
        step.add_argument("--min-counts", type=sizes, default=(), metavar="COUNTS", help=fewest)

    info = steps.add_parser("info", help="say what is in a table")
    info.add_argument("table", type=Path)
    info.add_argument("--tokenizer", help="a target's, to compare with")
    info.set_defaults(command=_info)


def _build(arguments: argparse.Namespace) -> int:
    from hf_dart.trees.ngram import build as ngram_build

    tokenizer = load_tokenizer(arguments.tokenizer)
    begun = perf_counter()
    with as_user_error(ValueError, KeyError, OSError):  # a full disk, among others
        table = ngram_build.build(
            _documents(arguments, tokenizer),
            arguments.table,
            tokenizer=tokenizer,
            eos=tokenizer.eos_token_id,
            progress=say,
            **given(arguments, ("order", "column", "vocab_size", "min_counts")),
        )
    seconds = perf_counter() - begun
    _describe(table)
    print(f"built in {seconds:.1f} s: {seconds * 1e9 / table.tokens:.0f} s per 10^9 tokens")
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    from hf_dart.trees.ngram import build as ngram_build

    with as_user_error():
        table = ngram_build.merge(arguments.parts, arguments.table, min_counts=arguments.min_counts, progress=say)
    _describe(table)
    return 0


def _info(arguments: argparse.Namespace) -> int:
    from hf_dart.models.tokenizers import vocabulary_hash
    from hf_dart.trees.ngram.table import NgramTable

    with as_user_error(ValueError):
        table = NgramTable.load(arguments.table)
        if arguments.tokenizer is not None:
            tokenizer = load_tokenizer(arguments.tokenizer)
            table.check_vocabulary(vocabulary_hash(tokenizer, table.spec.vocab_size), len(tokenizer))
    _describe(table)
    return 0


def _describe(table: Any) -> None:
    spec, sizes = table.spec, table.sizes
    per_order = ", ".join(f"{size} of order {order}" for order, size in enumerate(sizes, start=1))
    print(
        f"{table.path}: {table.tokens} tokens counted up to order {spec.order}; vocabulary {spec.vocab_size}, "
        f"tokenizer {spec.tokenizer_hash or 'not recorded'}"
    )
    print(f"n-grams: {per_order}; counts from {', '.join(map(str, table.min_counts))} on kept")
    print(f"{table.nbytes / 1e6:.1f} MB, {table.nbytes / max(sum(sizes), 1):.2f} bytes per n-gram")


def _documents(arguments: argparse.Namespace, tokenizer: Any) -> Iterable[Any]:
    import numpy as np

    if arguments.text is not None:
        return map(read_text, arguments.text)
    if arguments.tokens is not None:
        if len(tokenizer) > 2**16 and arguments.tokens.suffix != ".npy":
            raise UserError(f"16 bits do not hold the ids of {len(tokenizer)} tokens; save them as a .npy file.")
        with as_user_error(Exception, about=f"Cannot read {str(arguments.tokens)!r} as token ids"):
            if arguments.tokens.suffix == ".npy":
                return np.load(arguments.tokens, mmap_mode="r", allow_pickle=False).reshape(-1)
            return np.memmap(arguments.tokens, dtype="uint16", mode="r")
    from hf_dart.training.data.documents import open_source

    source = open_source([arguments.dataset], tokenizer=tokenizer, streaming=True)
    if arguments.column not in source.columns:
        name, known = arguments.dataset, ", ".join(source.columns)
        raise UserError(f"{name!r} has no column {arguments.column!r} but {known}; name one with --column.")
    return source.documents
