"""`hf-dart serve`, asked over HTTP by the `openai` client: the text is stock's, streamed or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from hf_dart import attach, detach
from hf_dart.bench.pair import Pair, load_pair
from hf_dart.cli.serve import build_app

PROMPT = "import os\nimport sys\n\n\ndef main():\n"


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as asked:
        yield asked


def stock(pair: Pair, text: str, tokens: int, seed: int | None = None) -> str:
    """What the target writes without drafts."""
    inputs = pair.tokenizer(text, return_tensors="pt")
    options: dict[str, Any] = {"do_sample": False} if seed is None else {"do_sample": True}
    torch.manual_seed(seed or 0)
    ids = pair.model.generate(**inputs, **options, max_new_tokens=tokens, assistant=None)
    return pair.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def drafted(pair: Pair) -> bool:
    stats, pair.head.last_stats = pair.head.last_stats, None
    return stats is not None and stats.accepted > 0


def test_the_model_is_listed(pair: Pair, client: Any) -> None:
    assert [model.id for model in client.models.list()] == [pair.target_name]


@pytest.mark.parametrize("stream", [False, True])
def test_completions(pair: Pair, client: Any, stream: bool) -> None:
    given = {"model": pair.target_name, "prompt": PROMPT, "max_tokens": 32, "temperature": 0.0}
    answer = client.completions.create(**given, stream=stream)
    text = "".join(part.choices[0].text for part in answer) if stream else answer.choices[0].text
    assert drafted(pair)
    assert text == stock(pair, PROMPT, 32)


@pytest.mark.parametrize("stream", [False, True])
def test_chat(pair: Pair, client: Any, stream: bool) -> None:
    turn = [{"role": "user", "content": "imports"}]
    given = {"model": pair.target_name, "messages": turn, "max_tokens": 32, "temperature": 0.0}

    def asked() -> str:
        answer = client.chat.completions.create(**given, stream=stream)
        if stream:
            return "".join(part.choices[0].delta.content or "" for part in answer if part.choices)
        return answer.choices[0].message.content

    text = asked()
    assert drafted(pair)
    detach(pair.model)
    try:
        assert text == asked()
        assert not drafted(pair)
        assert len(text) > 32
    finally:
        attach(pair.model, pair.head)


def test_sampled_with_a_seed(pair: Pair, client: Any) -> None:
    pair.model.generation_config.do_sample = True
    try:
        given = {"model": pair.target_name, "prompt": PROMPT, "max_tokens": 32, "seed": 5}
        text = client.completions.create(**given).choices[0].text
        assert drafted(pair)
        assert text == stock(pair, PROMPT, 32, seed=5)
    finally:
        pair.model.generation_config.do_sample = False


def test_a_client_that_leaves_ends_its_call(pair: Pair, client: Any) -> None:
    given = {"model": pair.target_name, "prompt": PROMPT, "max_tokens": 900, "temperature": 0.0}
    with client.completions.create(**given, stream=True) as answer:
        next(iter(answer))
    short = client.completions.create(**{**given, "max_tokens": 4})  # calls are served in turn
    assert short.choices[0].text == stock(pair, PROMPT, 4)
    pair.head.last_stats = None


def test_a_tokenizer_without_a_chat_template_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    build_app(load_pair())
    assert "no chat template: /v1/completions answers" in capsys.readouterr().err


def test_another_model_is_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="400"):
        client.completions.create(model="other/model", prompt="x", max_tokens=4)
