"""`hf-dart convert`: heads and n-grams into the formats of other projects, and back."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_dart.bench.pair import load_head
from hf_dart.cli.common import positive, say
from hf_dart.errors import UserError, as_user_error
from hf_dart.target.loading import DTYPES, PACKAGED_TARGET, load_target, read_tokenizer

_HEADS, _NGRAMS = ("dart", "original-dart", "vllm", "eagle3"), ("ngram", "trie")


def add(commands: Any) -> None:
    parser = commands.add_parser("convert", help="to and from the formats of DART's own code; to vLLM's")
    parser.add_argument("source", help="a head (folder or Hub id); for --to ngram a .trie file, for --to trie a table")
    parser.add_argument("out", type=Path, help="the folder or file to write; there must be none yet")
    parser.add_argument(
        "--to",
        required=True,
        choices=(*_HEADS, *_NGRAMS),
        help="dart: our format, of every kind of head; original-dart: that of DART's released code; vllm: that of "
        "speculators (P-EAGLE); eagle3: the original one of EAGLE-3; ngram: our table of n-grams; trie: DART's",
    )
    parser.add_argument("--target", help="the target of a head: a folder or a Hub id (default: the packaged one)")
    parser.add_argument("--dtype", choices=DTYPES, help="of what is written; default: as the head was saved")
    parser.add_argument("--verifier", metavar="ID", help="for --to vllm: where it finds the target (default: --target)")
    parser.add_argument("--tokenizer", help="with --to ngram: the target's (default: the packaged target's)")
    parser.add_argument("--chunk", type=positive, help="nodes of a trie that are held in memory (default: 1048576)")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.out.exists():
        raise UserError(f"{str(arguments.out)!r} is there already; give a name that is free.")
    if not arguments.out.resolve().parent.is_dir():
        raise UserError(f"There is no folder {str(arguments.out.resolve().parent)!r} to write to.")
    with as_user_error():
        (_convert_head if arguments.to in _HEADS else _convert_ngrams)(arguments)
    print(f"Wrote {arguments.out}.")
    return 0


def _convert_head(arguments: argparse.Namespace) -> None:
    # In the head's own dtype: one of its target's would round it without a word.
    target, tokenizer = load_target(arguments.target or str(PACKAGED_TARGET))
    head = load_head(arguments.source, target, tokenizer, dtype=arguments.dtype or "auto")
    from hf_dart.drafters.dart.drafter import DartHead
    from hf_dart.drafters.dart.export import write_original, write_vllm
    from hf_dart.drafters.dflash.drafter import DFlashDrafter
    from hf_dart.drafters.eagle.drafter import EagleDrafter
    from hf_dart.drafters.eagle.export import write_eagle3
    from hf_dart.drafters.pretrained import PretrainedDrafter

    if arguments.to == "dart" and isinstance(head, (PretrainedDrafter, DFlashDrafter)):
        head.save_pretrained(arguments.out)
        return
    if arguments.to == "eagle3" and isinstance(head, EagleDrafter):
        write_eagle3(head, arguments.out)
        return
    if not isinstance(head, DartHead) or arguments.to == "eagle3":
        raise UserError(f"{arguments.source!r} is a {type(head).__name__}, which that format has no place for.")
    if head.adapted:
        head.merge_adapter()
    if arguments.to == "original-dart":
        write_original(head, arguments.out)
    else:
        verifier = arguments.verifier or arguments.target or str(PACKAGED_TARGET)
        write_vllm(head, arguments.out, target=target, verifier=verifier)
        options = {
            "method": "eagle3",  # vLLM does not find out by itself that P-EAGLE runs there
            "model": str(arguments.out),
            "num_speculative_tokens": head.draft_length,
            "parallel_drafting": True,
        }
        print(f"vllm serve {verifier} --speculative-config '{json.dumps(options)}'")


def _convert_ngrams(arguments: argparse.Namespace) -> None:
    from hf_dart.interop.trie import CHUNK, read_trie, write_trie
    from hf_dart.trees.ngram import NgramTable

    options: dict[str, Any] = {"chunk": arguments.chunk or CHUNK, "progress": say}
    if arguments.to == "trie":
        write_trie(NgramTable.load(arguments.source), arguments.out, **options)
        return
    tokenizer = read_tokenizer(arguments.tokenizer or str(PACKAGED_TARGET))
    read_trie(arguments.source, arguments.out, tokenizer=tokenizer, **options)
