"""`hf-dart serve`: a drafted model for many clients at once, over HTTP as OpenAI's API."""

from __future__ import annotations

import argparse
import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_dart.cli import common
from hf_dart.errors import UserError, read_text

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
_KEY = "HF_DART_API_KEY"
_LIMITS = ("seats", "waiting", "max_tokens", "max_body", "timeout")


def add(commands: Any) -> None:
    about = "chat and completions over HTTP, as OpenAI's API, with drafts"
    parser = commands.add_parser("serve", parents=[common.pair_options()], help=about)
    parser.add_argument("--host", default="localhost", help="default: %(default)s")
    port = common.checked(int, lambda value: 0 <= value < 2**16, "a whole number from 0 to 65535")
    parser.add_argument("--port", type=port, default=8000, help="default: %(default)s; 0 is any free one")
    parser.add_argument("--api-key", metavar="KEY", help=f"that requests have to bring (default: ${_KEY}, else none)")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="for chat, in place of the tokenizer's own")
    positive, seconds = common.positive, common.above_zero
    size = common.checked(int, lambda value: value >= 0, "a whole number of 0 or more")
    for name, kind, default, unit, about in (
        ("--seats", positive, 16, None, "texts that are written at a time"),
        ("--waiting", positive, 64, None, "texts that may wait for a seat"),
        ("--max-tokens", positive, 2**16, None, "that the texts which are written may hold together"),
        ("--max-body", positive, 2**22, None, "bytes of a request"),
        ("--grace", positive, 30, None, "seconds in which what runs is answered once the server is told to stop"),
        ("--timeout", seconds, 600, "SECONDS", "for an answer"),
        ("--memory", size, 64, "MIB", "of earlier texts, to draft from; 0: none"),
    ):
        parser.add_argument(name, type=kind, default=default, metavar=unit, help=f"{about} (default: %(default)s)")
    parser.add_argument("--enable-cors", action="store_true", help="answer pages of other origins too")
    parser.set_defaults(command=_run)


def app_of(arguments: argparse.Namespace) -> Any:
    """Return the ASGI app of a server with the options of `hf-dart serve`, its model loaded."""
    if not all(map(find_spec, _NEEDED)):
        raise UserError("A server needs more packages: pip install -e '.[serve]' in the clone.")
    template = None if arguments.chat_template is None else read_text(arguments.chat_template, "the chat template ")
    pair = common.load(arguments)
    from hf_dart.decoding.suffix_store import SuffixStore
    from hf_dart.serve.app import build_app
    from hf_dart.serve.service import Limits, Service, length_of

    if template is not None:
        pair.tokenizer.chat_template = template
    if not pair.tokenizer.chat_template:
        common.say("The tokenizer has no chat template: /v1/completions answers; give --chat-template for the others.")
    limits = Limits(length_of(pair.model, arguments.max_tokens), **common.given(arguments, _LIMITS))
    memory = SuffixStore(arguments.memory << 20) if arguments.memory else None
    target = arguments.target or pair.target_name
    names = dict.fromkeys([pair.target_name, target, Path(target).name])
    service = Service(pair.model, pair.tokenizer, pair.head, [*names], limits, memory)
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("hf_dart.serve").setLevel(logging.INFO)
    return build_app(service, arguments.api_key or os.environ.get(_KEY) or None, arguments.enable_cors)


def _run(arguments: argparse.Namespace) -> int:
    app = app_of(arguments)
    import uvicorn

    where = {"host": arguments.host, "port": arguments.port}
    uvicorn.run(app, **where, access_log=False, timeout_graceful_shutdown=arguments.grace)
    return 0
