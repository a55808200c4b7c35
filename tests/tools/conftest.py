"""Packages that call `generate` themselves; `pip install -e '.[tools]'` brings them. And a server to ask."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from hf_dart.bench.pair import Pair, load_pair

collect_ignore = [] if find_spec("openai") else ["test_serve.py"]

TEMPLATE = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def pair() -> Pair:
    """The packaged pair, with a chat template."""
    pair = load_pair()
    pair.tokenizer.chat_template = TEMPLATE
    return pair


@pytest.fixture(scope="module")
def address(pair: Pair) -> Iterator[str]:
    """Where `hf-dart serve` answers, for that pair."""
    uvicorn = pytest.importorskip("uvicorn")
    from hf_dart.cli.serve import build_app

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(build_app(pair), host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join(30)
