"""Every parameter that OpenAI's client sends works, changes no text, or is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from hf_dart.serve import parameters
from hf_dart.serve.parameters import Asked, ChatAsked, CompletionAsked, ResponseAsked

MESSAGES = [{"role": "user", "content": "x"}]
ASKED = {CompletionAsked: {"prompt": "x"}, ChatAsked: {"messages": MESSAGES}, ResponseAsked: {"input": "x"}}


def wrong(kind: type[Asked], **given: Any) -> tuple[str, str]:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({**ASKED[kind], **given})
    first = refused.value.errors()[0]
    return (first.get("ctx") or {}).get("name") or str(first["loc"][0]), first["msg"]


@pytest.mark.parametrize("name", parameters._REFUSED)
def test_what_is_not_to_be_had(name: str) -> None:
    kind = {"response_format": CompletionAsked}.get(name, ChatAsked)
    something = {"truncation": "auto"}.get(name, {"type": "anything"})
    for value in parameters._NOTHING:
        if value != something:
            assert name not in kind.model_validate({**ASKED[kind], name: value}).model_dump()
    param, message = wrong(kind, **{name: something})
    assert param == name
    assert message.startswith(f"{name} ")
    assert ";" in message


WRONG: dict[str, list[Any]] = {
    "temperature": [-1, 1e-9, float("nan"), "1"],
    "top_p": [0, 1.1],
    "seed": [2**63, 1.5],
    "n": [0, True],
    "stop": [["a"] * 5, "", 3],
    "logit_bias": [{"x": 1}, {"1": 101}],
    "presence_penalty": [3],
    "repetition_penalty": [1e-300, 1e300],
    "stream": ["yes"],
    "prompt": [{}, [], [[]], [1, True]],
    "logprobs": [21],
    "max_tokens": [0],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_values_out_of_range(name: str, value: Any) -> None:
    found, message = wrong(CompletionAsked, **{name: value})
    assert found == name
    assert message


def test_unknown_names() -> None:
    assert wrong(CompletionAsked, temprature=1) == (
        "temprature", "There is no parameter 'temprature'; did you mean 'temperature'?"
    )  # fmt: skip
    assert wrong(ChatAsked, temprature=1)[1].startswith("There is no parameter 'temprature'; ")
    assert wrong(CompletionAsked, **{"\ud800": 3}) == ("?", "There is no parameter '?'; leave it out.")
    assert "give chats response_format" in wrong(CompletionAsked, response_format={"type": "json_object"})[1]
    assert wrong(ResponseAsked, text={"verbosity": "low"})[0] == "verbosity"


def test_json_of_responses() -> None:
    """Their format is that of chats, the fields of its schema beside the type."""
    schema = {"type": "array"}
    flat = {"format": {"type": "json_schema", "name": "rows", "strict": True, "schema": schema}}
    asked = [ResponseAsked(input="x", text=text) for text in (flat, {"format": {"type": "json_object"}}, {}, None)]
    assert [one.schema_of_text and json.loads(one.schema_of_text) for one in asked] == [
        schema, {"type": "object"}, None, None,
    ]  # fmt: skip
    assert [one.masked for one in asked] == [True, True, False, False]


def test_what_tells_nothing_by_itself() -> None:
    assert wrong(CompletionAsked, echo=True, logprobs=0)[0] == "echo"
    assert wrong(ChatAsked, top_logprobs=2)[0] == "top_logprobs"
    assert wrong(CompletionAsked, stream_options={"include_usage": True, "x": 1})[0] == "x"


@pytest.mark.parametrize(
    "message",
    [1, {}, {"role": "tool", "content": "x"}, {"role": "user"}, {"role": "user", "content": None},
     {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, {"role": "user", "content": "x", "y": 1},
     {"role": "assistant", "content": "x", "tool_calls": [{}]}],
)  # fmt: skip
def test_messages_that_are_none(message: Any) -> None:
    wrong(ChatAsked, messages=[*MESSAGES, message])
    wrong(ResponseAsked, input=[*MESSAGES, message])


def test_many_wrong_items_are_one_error() -> None:
    """A large body of nonsense costs no more than to read it."""
    for kind, name in ((ChatAsked, "messages"), (ResponseAsked, "input")):
        with pytest.raises(ValidationError) as refused:
            kind.model_validate({name: [1] * 10_000})
        assert refused.value.error_count() == 1
    with pytest.raises(ValidationError) as refused:
        CompletionAsked.model_validate({"prompt": "x", **{f"x{number}": 1 for number in range(10_000)}})
    assert refused.value.error_count() == 1


@pytest.mark.parametrize(
    ("given", "samples", "options"),
    [
        ({}, False, {"do_sample": False}),
        ({}, True, {"do_sample": True}),
        ({"temperature": 0, "top_p": 0.5}, True, {"do_sample": False}),
        ({"temperature": 0.5}, False, {"do_sample": True, "temperature": 0.5}),
        ({"top_p": 0.5}, False, {"do_sample": True, "top_p": 0.5}),
        ({"top_k": 3, "temperature": 1}, False, {"do_sample": True, "top_k": 3, "temperature": 1.0}),
    ],
)
def test_when_texts_are_sampled(given: dict[str, Any], samples: bool, options: dict[str, Any]) -> None:
    assert CompletionAsked(prompt="x", **given).sampling(samples) == options


def test_lengths_that_nobody_names() -> None:
    """A body without options is OpenAI's: 16 tokens of a completion, as many as there is room for in chat."""
    assert CompletionAsked(prompt="x").most == 16
    assert (ChatAsked(messages=MESSAGES).most, ResponseAsked(input="x").most) == (None, None)
