"""A server on this machine that answers as vLLM does, with a fault now and then."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hf_dart.training.regenerate.sampling import Sampling
from hf_dart.training.regenerate.writers import ModelWriter


@contextmanager
def serving(writer: ModelWriter) -> Iterator[Any]:
    """The server: `seen` are the requests, `faults` come in place of the next answers: a status, "drop", or bytes."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.daemon_threads = True
    server.lock, server.seen, server.faults, server.writer = threading.Lock(), [], [], writer
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Endpoint(BaseHTTPRequestHandler):
    """OpenAI-style endpoints in front of a `ModelWriter`."""

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.seen.append(body)
            fault = server.faults.pop(0) if server.faults else None
            if fault == "drop":
                self.close_connection = True
                return
            if fault is None:
                answer = self.answer(body)
        content = json.dumps(answer if fault is None else {"error": "no"}).encode()
        if isinstance(fault, bytes):
            content, fault = fault, None
        self.send_response(fault or 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        writer = self.server.writer  # type: ignore[attr-defined]
        sampling = Sampling(1.0, body["temperature"], repetition_penalty=body.get("repetition_penalty", 1.0))
        if self.path == "/v1/completions":
            (ids,) = writer.continue_texts([body["prompt"]], body["max_tokens"], sampling, body["seed"])
            ended = ids[-1] in writer.ends
            choice = {"text": writer.tokenizer.decode(ids), "token_ids": ids}
            choices = [{**choice, "finish_reason": "stop" if ended else "length"}]
            return {"choices": choices, "usage": {"completion_tokens": len(ids)}}
        if self.path == "/v1/chat/completions":
            ((message, ended),) = writer.reply([(body["messages"], None)], body["max_tokens"], sampling, body["seed"])
            return {"choices": [{"message": message, "finish_reason": "stop" if ended else "length"}]}
        return {"detail": "not found"}

    def log_message(self, *args: Any) -> None:
        """Quiet."""
