"""`hf-dart serve` as a process: names, keys and templates from its command line, and its end."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import pytest

from hf_dart.cli import main
from hf_dart.hub.loading import PACKAGED_TARGET

openai = pytest.importorskip("openai")
serving = pytest.importorskip("support.serving")  # which needs the packages of a server

LONG = {"prompt": "import os\n", "max_tokens": 120, "temperature": 1, "seed": 1, "logit_bias": {"0": -100}}


def test_sigterm_lets_what_runs_be_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DART_API_KEY", "of the environment")
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    options = ("--target", str(PACKAGED_TARGET), "--chat-template", str(template), "--seats", "1", "--dtype", "float32")
    with (
        serving.command(*options) as (process, address),
        openai.OpenAI(base_url=f"{address}/v1", api_key="wrong") as client,
    ):
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        client.api_key = "of the environment"
        messages = [{"role": "user", "content": "import os"}]
        for name in (str(PACKAGED_TARGET), PACKAGED_TARGET.name, client.models.list().data[0].id):
            answer = client.chat.completions.create(model=name, messages=messages, max_tokens=3)
            assert answer.usage.prompt_tokens == 2
        stream = client.completions.create(model=name, **LONG, stream=True)
        parts = [next(stream)]
        process.send_signal(signal.SIGTERM)
        parts += stream
        assert parts[-1].choices[0].finish_reason == "length"
        assert process.wait(20) in (0, -signal.SIGTERM)


def test_what_runs_past_the_grace_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DART_API_KEY", "")  # as files of containers leave it: no key is asked for
    options = ("--target", str(PACKAGED_TARGET), "--dtype", "float32", "--grace", "1")
    with (
        serving.command(*options) as (process, address),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(
            model=PACKAGED_TARGET.name, **{**LONG, "max_tokens": 2000, "n": 8}, stream=True
        )
        parts = [next(stream)]
        process.send_signal(signal.SIGTERM)
        with suppress(Exception):  # of the connection
            parts += stream
        assert process.wait(20) in (0, -signal.SIGTERM)
        assert all(part.choices[0].finish_reason != "length" for part in parts)


def test_a_template_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--chat-template", "nowhere.jinja"]) == 2
    assert "Cannot read the chat template 'nowhere.jinja'" in capsys.readouterr().err
