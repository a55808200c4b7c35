"""`hf-dart serve` on a thread of a test, and requests to it that no client would send."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import uvicorn

from hf_dart.serve.app import build_app
from hf_dart.serve.service import Service


def ask(address: str, path: str, body: Any = None, method: str = "POST") -> tuple[int, str, Any]:
    """Status, text and headers of an answer; a body is bytes, an iterable of them, or what JSON takes."""
    connection = HTTPConnection(urlsplit(address).netloc, timeout=60)
    try:
        plain = body is None or isinstance(body, bytes) or hasattr(body, "__next__")
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, body if plain else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


@contextmanager
def begun(address: str, body: Any, sent: int | None = None, length: int | None = None) -> Iterator[socket.socket]:
    """A connection that has sent the first bytes of a completion's body, of which it has told the length."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {length or len(content)}\r\n"
    with socket.create_connection((urlsplit(address).hostname, urlsplit(address).port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content[:sent])
        yield connection


@contextmanager
def command(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of `hf-dart serve`, and the address at which it answers."""
    words = [sys.executable, "-m", "hf_dart.cli", "serve", "--port", "0", "--threads", "1", *options]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = (re.search(r"running on (http://\S+)", line) for line in process.stderr or ())
            yield process, next(found[1] for found in lines if found)
        finally:
            process.kill()


@contextmanager
def served(service: Service, **options: Any) -> Iterator[str]:
    """Address at which a service answers, with options of `build_app`; at the end nothing of it runs."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(build_app(service, **options), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()
    assert service.taken == 0
    assert (service.batcher.running, service.batcher.waiting) == (0, 0)
