"""Waiting times that clients of a server are told, and errors that end a run before it begins."""

from __future__ import annotations

import sys

import pytest

from hf_dart.bench import serving
from hf_dart.cli import common, main, parser
from hf_dart.errors import UserError

# A server of two texts, of which the second is another one with each answer, and of errors.
SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    answered = 0

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["stream"] and asked["max_tokens"] == 3
        Handler.answered += 1
        self.send_response(500 if asked["prompt"] == "fails" else 200)
        self.end_headers()
        text = str(Handler.answered) if asked["prompt"] == "changes" else "same"
        for part in ("", text, "end"):
            time.sleep(0.05)
            chunk = {"choices": [{"text": part}], "usage": {"completion_tokens": 3}}
            self.wfile.write(f"data: {json.dumps(chunk)}\\n\\n".encode())
        self.wfile.write(b"data: [DONE]\\n\\n")

    def log_message(self, *args):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def test_figures_of_a_server() -> None:
    """First tokens are texts, not empty chunks; texts are held to those alone; what fails is counted apart."""
    settings = serving.Settings(clients=(1, 3), requests=2, new_tokens=3, pause=0.01)
    commands = {name: [sys.executable, "-c", SERVER] for name in ("one", "another")}
    found = serving.measure(commands, "m", ["stays", "changes", "fails"], settings)
    one, three = found["one"]
    assert [entry["as_alone"] for entry in found["another"]] == [one["as_alone"], three["as_alone"]]
    assert (one["clients"], three["clients"]) == (1, 3)
    assert (one["requests"], one["failed"], one["as_alone"], one["tokens"]) == (2, 0, 1, 6)
    assert (three["requests"], three["failed"], three["as_alone"], three["tokens"]) == (6, 2, 2, 12)
    assert three["errors"][0].startswith("500")
    assert 0.1 <= one["first_token_median"] < one["seconds"]
    assert three["tokens_per_second"] == 12 / three["seconds"]
    table = serving.as_table({"one": [one], "another": [three]})
    assert table.splitlines()[2].startswith("| 1 | one | 0.1")
    assert table.endswith("| 2 of 6 | 2 of 4 |")


def test_pauses_are_those_of_the_seed() -> None:
    """Equal clients ask at equal moments, whichever server is asked."""
    moments: list[list[float]] = []
    for _ in range(2):
        waits = serving.pauses(serving.Settings(clients=(2,), requests=3, seed=5), 2)
        moments.append([wait for client in waits for wait in client])
    assert moments[0] == moments[1]
    assert len(set(moments[0])) == 6
    assert serving.pauses(serving.Settings(seed=6), 2) != serving.pauses(serving.Settings(seed=5), 2)


def test_servers_run_as_the_report_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target has no head by its folder alone."""
    seen: dict[str, list[str]] = {}
    monkeypatch.setattr(serving, "measure", lambda commands, *others: seen.update(commands) or {})
    words = ["--device-map", "cpu", "--attn-implementation", "eager"]
    assert main(["bench", "serve", "--threads", "1", "--text", __file__, *words]) == 0
    ours, theirs, _ = seen.values()
    server = parser().parse_args(ours[ours.index("serve") :])
    assert (server.device_map, server.attn_implementation, server.threads) == ("cpu", "eager", 1)
    assert server.memory == 0, "each request comes several times"
    assert common.load(server).head_name == "packaged head"
    assert theirs[-2:] == ["--device", "cpu"]


def test_a_server_that_ends() -> None:
    command = [sys.executable, "-c", "raise SystemExit('it needs more packages')"]
    with pytest.raises(UserError, match=r"does not answer \(it needs more packages\); run it by itself"):
        serving.measure({"it": command}, "m", ["x"], serving.Settings())
