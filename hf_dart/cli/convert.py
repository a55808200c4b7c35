"""`hf-dart convert`: published heads and n-grams into our formats, heads for vLLM."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_dart.bench.pair import load_head
from hf_dart.cli.common import say
from hf_dart.errors import UserError, as_user_error
from hf_dart.hub.loading import DTYPES, load_target, load_tokenizer, target_path


def add(commands: Any) -> None:
    parser = commands.add_parser("convert", help="published heads and n-grams into our formats; heads for vLLM")
    parser.add_argument("source", help="a head (folder or Hub id); for --to ngram a .trie file")
    parser.add_argument("out", type=Path, help="the folder or file to write; there must be none yet")
    formats = "dart: our format, of every kind of head; vllm: that of speculators (P-EAGLE); ngram: our n-gram table"
    parser.add_argument("--to", required=True, choices=("dart", "vllm", "ngram"), help=formats)
    parser.add_argument("--target", help="the target of a head: a folder or a Hub id (default: the packaged one)")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype to write (default: as the head was saved)")
    parser.add_argument("--verifier", metavar="ID", help="for --to vllm: where it finds the target (default: --target)")
    parser.add_argument("--tokenizer", help="with --to ngram: the target's (default: the packaged target's)")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.out.exists():
        raise UserError(f"{str(arguments.out)!r} is there already; give a name that is free.")
    with as_user_error():
        if arguments.to == "ngram":
            from hf_dart.interop.trie import read_trie

            read_trie(arguments.source, arguments.out, tokenizer=load_tokenizer(arguments.tokenizer), progress=say)
        else:
            _convert_head(arguments)
    print(f"Wrote {arguments.out}.")
    return 0


def _convert_head(arguments: argparse.Namespace) -> None:
    # In the head's own dtype: the target's could round it silently.
    target, tokenizer = load_target(arguments.target)
    head = load_head(arguments.source, target, tokenizer, dtype=arguments.dtype or "auto")
    from hf_dart.drafters.dart.drafter import DartHead
    from hf_dart.drafters.trained import TrainedDrafter
    from hf_dart.interop.vllm import write_vllm

    if arguments.to == "dart" and isinstance(head, TrainedDrafter):
        head.save_pretrained(arguments.out)
        return
    if not isinstance(head, DartHead):
        raise UserError(f"{arguments.source!r} is a {type(head).__name__}, which that format has no place for.")
    if head.adapted:
        head.merge_adapter()
    verifier = arguments.verifier or target_path(arguments.target)
    write_vllm(head, arguments.out, target=target, verifier=verifier)
    options = {
        "method": "eagle3",  # vLLM does not recognise P-EAGLE by itself
        "model": str(arguments.out),
        "num_speculative_tokens": head.draft_length,
        "parallel_drafting": True,
    }
    print(f"vllm serve {verifier} --speculative-config '{json.dumps(options)}'")
