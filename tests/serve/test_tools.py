"""Tools in `hf-dart serve`, by the `openai` client: calls that have to be made, that a model makes, earlier ones."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from support.serving import served
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import get_response_template

from hf_dart import LookupDrafter
from hf_dart.bench.pair import load_pair
from hf_dart.serve.answers import Chat
from hf_dart.serve.parameters import ChatAsked, ResponseAsked
from hf_dart.serve.service import Limits, Service
from hf_dart.serve.tools import Reader

TEMPLATE = """{% if tools %}{{ tools | tojson }}
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}
{{ c.function.name }}({{ c.function.arguments.path }}){% endfor %}{{ m.tool_call_id }}
{% endfor %}{% if add_generation_prompt %}# code
{% endif %}"""
PROMPT = "import os\n\ndef names(path):\n    "
MESSAGES = [{"role": "user", "content": PROMPT}]
COPY = {
    "type": "object",
    "properties": {"path": {"enum": ["a", "b"]}, "again": {"$ref": "#/$defs/again"}},
    "required": ["path", "again"],
    "additionalProperties": False,
    "$defs": {"again": {"type": "boolean"}},
}
STATE = {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]}
FUNCTIONS = [
    {"name": "copy_file", "description": "Copy a file.", "parameters": COPY},
    {"name": "state", "parameters": STATE},
    {"name": "stop"},
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
FLAT = [{"type": "function", "strict": True, **function} for function in FUNCTIONS]
CODE = {
    "start_anchor": "# code\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?P<name>[a-z_]+)\(", "close": ")", "repeats": True, "content": "text",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}  # fmt: skip
"""Calls as code has them, which the packaged target writes by itself."""


@pytest.fixture(scope="module")
def service() -> Service:
    pair = load_pair()
    tokenizer = copy.deepcopy(pair.tokenizer)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, CODE
    return Service(pair.model, tokenizer, LookupDrafter(), ["code"], Limits(length=1200))


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with served(service) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def stock(service: Service, tools: Any = None, seed: int = 0, **options: Any) -> tuple[str, str]:
    """What stock `generate` writes to the messages, and the prompt."""
    asked = {"tokenize": False, "add_generation_prompt": True, **({"tools": tools} if tools else {})}
    prompt = service.tokenizer.apply_chat_template(MESSAGES, **asked)
    ids = torch.tensor([service.tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    torch.manual_seed(seed)
    new = type(service.model).generate(service.model, ids, do_sample=True, **options)[0, ids.shape[1] :].tolist()
    return service.tokenizer.decode([token for token in new if token not in service.ends]), prompt


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


@pytest.mark.parametrize(
    ("choice", "parallel", "tokens"),
    [
        ("required", True, 120),
        ("required", False, 60),
        ({"type": "function", "function": {"name": "copy_file"}}, True, 60),
    ],
)
def test_calls_that_have_to_be_made(service: Service, client: Any, choice: Any, parallel: bool, tokens: int) -> None:
    """The text is stock's with the processor of the same grammar; arguments are those of the schema."""
    of = pytest.importorskip("xgrammar.contrib.hf")
    given = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    asked = ChatAsked(**given)
    held = [of.LogitsProcessor(service.grammar(asked))]
    text, _ = stock(service, asked.functions, max_new_tokens=tokens, logits_processor=held)
    written = map(json.loads, re.findall("<tool_call>\n(.*)\n</tool_call>", text))
    wanted = [(one["name"], one["arguments"]) for one in written]
    rest = text.rpartition("</tool_call>")[2]  # of a call that max_tokens cuts
    assert (len(wanted) > 1, rest != "") == (tokens == 120, tokens == 120)
    for name, arguments in wanted:
        assert {"copy_file": {"path", "again"}, "state": {"deep"}, "stop": set()}[name] == arguments.keys()
        assert name == "copy_file" or isinstance(choice, str)
    options = {"model": "code", **given, "temperature": 1, "seed": 0, "max_tokens": tokens}
    (whole,) = client.chat.completions.create(**options).choices
    with client.chat.completions.stream(**options) as stream:  # put together from the deltas
        stream.until_done()
        (streamed,) = stream.current_completion_snapshot.choices
    for made in (whole, streamed):
        found = [(name, json.loads(arguments)) for name, arguments in calls_of(made.message)]
        assert (found, made.finish_reason) == (wanted, "length" if rest else "tool_calls")
        assert rest.endswith(made.message.content or "")
        assert len({call.id for call in made.message.tool_calls}) == len(wanted)
    assert whole.message.content == (streamed.message.content or None)
    if not rest:  # handed back with what the client has made of it
        messages = [*MESSAGES, stream.get_final_completion().choices[0].message]
        assert client.chat.completions.create(model="code", messages=messages, max_tokens=1).choices


@pytest.mark.parametrize(("seed", "count"), [(1, 0), (3, 3)])
def test_calls_that_the_model_makes(service: Service, client: Any, seed: int, count: int) -> None:
    """Calls as the tokenizer's response template has them, the rest is text; without parallel calls one ends it."""
    given = {"model": "code", "messages": MESSAGES, "tools": TOOLS, "temperature": 1, "max_tokens": 30, "seed": seed}
    text, prompt = stock(service, TOOLS, seed, max_new_tokens=30)
    wanted = [one["function"] for one in service.tokenizer.parse_response(text, prefix=prompt).get("tool_calls", ())]
    assert len(wanted) == count
    events = client.chat.completions.create(**given, stream=True)
    deltas = [choice.delta for event in events for choice in event.choices]
    assert [call.index for delta in deltas for call in delta.tool_calls or ()] == [*range(count)]
    whole = client.chat.completions.create(**given).choices[0].message
    pairs = [(one["name"], one["arguments"]) for one in wanted]
    assert calls_of(whole) == [pair for delta in deltas for pair in calls_of(delta)] == pairs
    assert (whole.content or "") == "".join(delta.content or "" for delta in deltas)
    once = client.chat.completions.create(**given, parallel_tool_calls=False)
    assert calls_of(once.choices[0].message) == pairs[:1]
    if pairs:
        assert once.choices[0].finish_reason == "tool_calls"
        assert once.usage.completion_tokens < 30
        assert (whole.content or "").startswith(once.choices[0].message.content or "")
        cut = client.chat.completions.create(**given, stop=", name").choices[0].message  # in the last call
        assert (calls_of(cut), cut.content) == (pairs[:2], f"{whole.content[:-1]}ict(str")
    none = client.chat.completions.create(**given, tool_choice="none").choices[0].message
    assert (none.tool_calls, none.content) == (None, stock(service, seed=seed, max_new_tokens=30)[0])


@pytest.mark.parametrize(
    ("choice", "kinds"),
    [("auto", ["message", "function_call"]), ({"type": "function", "name": "state"}, ["function_call"])],
)
def test_responses(service: Service, client: Any, choice: Any, kinds: list[str]) -> None:
    """Calls are items after the message, whole and as events."""
    if choice != "auto":
        pytest.importorskip("xgrammar")
    options = {"model": "code", "input": PROMPT, "tools": FLAT, "temperature": 1, "max_output_tokens": 60}
    options |= {"tool_choice": choice, "parallel_tool_calls": False, "extra_body": {"seed": 3}}
    answer = client.responses.create(**options)
    assert ([item.type for item in answer.output], answer.status) == (kinds, "completed")
    assert (answer.tools[0].name, answer.tool_choice == "auto") == ("copy_file", choice == "auto")
    if choice != "auto":
        assert (answer.output[0].name, json.loads(answer.output[0].arguments).keys()) == ("state", {"deep"})
    with client.responses.stream(**options) as stream:  # put together from the events
        streamed = stream.get_final_response()
    for made in (answer, streamed):
        shown = [(item.type, getattr(item, "arguments", None)) for item in made.output]
        assert shown == [(item.type, getattr(item, "arguments", None)) for item in answer.output]
        assert made.output_text == answer.output_text


def test_calls_of_earlier_answers(service: Service, client: Any) -> None:
    """Chat templates read calls, with arguments as a mapping, and their results, from items of responses, too."""
    call = {"name": "copy_file", "arguments": '{"path": "a"}'}
    said = {"role": "assistant", "content": "Well."}
    result = {"type": "function_call_output", "call_id": "c1", "output": "done"}
    items = [
        *MESSAGES,
        said,
        {"type": "function_call", "id": "x", "call_id": "c1", **call, "status": "completed"},
        result,
    ]
    made = {**said, "tool_calls": [{"id": "c1", "type": "function", "function": call}]}
    messages = [*MESSAGES, made, {"role": "tool", "tool_call_id": "c1", "content": "done"}]
    prompt = f"user: {PROMPT}\nassistant: Well.copy_file(a)\ntool: donec1\n# code\n"
    text = client.completions.create(model="code", prompt=prompt, max_tokens=20, temperature=0).choices[0].text
    answer = client.chat.completions.create(model="code", messages=messages, max_tokens=20, temperature=0)
    assert answer.choices[0].message.content == text
    assert client.responses.create(model="code", input=items, max_output_tokens=20, temperature=0).output_text == text
    first, second, third = ({"type": "function_call", "call_id": one, **call} for one in "123")
    turns = ResponseAsked(input=[*MESSAGES, first, second, result, third]).turns
    assert [[one["id"] for one in turn.get("tool_calls", ())] for turn in turns] == [[], ["1", "2"], [], ["3"]]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0 is no function; give tools of the type function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name is not as it should"),
        ({"tool_choice": "required"}, "tool_choice names no function of tools; add it there, or give auto"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "names no function of t"),
        ({"tools": TOOLS, "tool_choice": "often"}, "tool_choice is not known here; give none, auto, required, or a f"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format and tools exclude each other"),
        ({"functions": FUNCTIONS}, "functions asks for functions as they were before tools; give tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0 is the result of no call; give its tool"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0 has no content; give some text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "", "function": {"name": "f", "arguments": "{"}}]}]},
         "messages.0.tool_calls.0.function.arguments is not as it should be"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
         "tools.0.function.parameters are the schema of no object; give one of the type object"),
    ],
)  # fmt: skip
def test_refusals(client: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(**{"model": "code", "messages": MESSAGES, **given})


def test_a_schema_that_cannot_be_met(service: Service, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By no text, or by none of a model without end tokens."""
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"path": {"type": "nothing"}}}
    broken = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(openai.BadRequestError, match="The schema of tool_choice cannot be met"):
        client.chat.completions.create(model="code", messages=MESSAGES, tools=broken, tool_choice="required")
    monkeypatch.setattr(service, "_grammars", None)
    monkeypatch.setattr(service, "ends", frozenset())
    with pytest.raises(openai.BadRequestError, match="The schema of response_format cannot be met: stop_token_ids"):
        client.chat.completions.create(model="code", messages=MESSAGES, response_format={"type": "json_object"})


def test_response_format(client: Any) -> None:
    """JSON of a schema, or any object."""
    pytest.importorskip("xgrammar")
    given: dict[str, Any] = {"model": "code", "messages": MESSAGES, "max_tokens": 60, "temperature": 1, "seed": 3}
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "row", "schema": COPY, "strict": True}}
    scores = {"logprobs": True, "top_logprobs": 2}  # of the target's own distribution
    written = client.chat.completions.create(**given, **scores, n=2, response_format=form).choices
    for choice in written:
        assert choice.logprobs.content[0].logprob < -0.01, "although the schema forces it"
        assert json.loads(choice.message.content).keys() == {"path", "again"}
        assert choice.finish_reason == "stop"
    told = {"input": MESSAGES, "max_output_tokens": 60, "extra_body": {"seed": 3}, "temperature": 1, "model": "code"}
    row = {"type": "json_schema", **form["json_schema"]}
    answer = client.responses.create(**told, text={"format": row})
    assert (answer.output_text, answer.status) == (written[0].message.content, "completed")
    for wrong in {"type": "json_schema", "name": "row"}, {**row, "schema": {"type": "nothing"}}, {"type": "lark"}:
        with pytest.raises(openai.BadRequestError, match="text") as refused:
            client.responses.create(**told, text={"format": wrong})
        assert refused.value.param == "text"
    with pytest.raises(openai.BadRequestError, match="text and tools exclude each other"):
        client.responses.create(**told, text={"format": row}, tools=FLAT)
    any_object = client.chat.completions.create(**given, response_format={"type": "json_object"})
    assert any_object.choices[0].message.content.startswith("{")
    for wrong in ({"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}, {"type": "json_schema"}):
        with pytest.raises(openai.BadRequestError, match="response_format"):
            client.chat.completions.create(**given, response_format=wrong)


def test_a_schema_that_takes_too_long(service: Service, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client is told, and others go on."""
    goes_on = Event()
    monkeypatch.setattr(service, "grammar", lambda asked: goes_on.wait(60))
    monkeypatch.setattr(service, "limits", replace(service.limits, timeout=0.5))
    given: dict[str, Any] = {"model": "code", "messages": MESSAGES, "max_tokens": 1}
    try:
        with pytest.raises(openai.APIStatusError, match=r"more than 0\.5 s; ask for fewer tokens, or a simpler schema"):
            client.chat.completions.create(**given, response_format={"type": "json_object"})
        monkeypatch.setattr(service, "limits", replace(service.limits, timeout=20.0))
        assert client.with_options(timeout=20).chat.completions.create(**given).usage.completion_tokens == 1
    finally:
        goes_on.set()


def test_a_schema_that_contains_itself(client: Any) -> None:
    """Its forced text, brackets, has no end."""
    pytest.importorskip("xgrammar")
    schema = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
    form = {"type": "json_schema", "json_schema": {"name": "nested", "schema": schema}}
    asked: dict[str, Any] = {"model": "code", "messages": MESSAGES, "max_tokens": 8, "response_format": form}
    assert set(client.chat.completions.create(**asked).choices[0].message.content) == {"["}


def test_what_is_missing_on_the_server(service: Service, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that reads tools, one that tells calls from text, and a grammar library."""
    given = {"model": "code", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 5}
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(openai.BadRequestError, match="tool_choice needs xgrammar on the server"):
        client.chat.completions.create(**given, tool_choice="required")
    monkeypatch.setattr(service.tokenizer, "response_template", None)
    monkeypatch.setattr(service.model.config, "model_type", "other")
    with pytest.raises(openai.BadRequestError, match="The tokenizer has no response_template"):
        client.chat.completions.create(**given)
    monkeypatch.setattr(service.tokenizer, "chat_template", "{{ messages[0].content }}")
    with pytest.raises(openai.BadRequestError, match="The chat template does not read tools; start the server with"):
        client.chat.completions.create(**given)


@pytest.mark.parametrize(("text", "content", "count"), [("<too", "<too", 0), ("{call}\n<tool", "\n<tool", 1)])
def test_calls_that_are_cut_before_they_begin(service: Service, text: str, content: str, count: int) -> None:
    """Where one has to be made, a part of its first word is text, too."""
    asked = ChatAsked(messages=MESSAGES, tools=TOOLS, tool_choice="required")
    written = text.format(call='<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>')
    shown, calls = Reader(asked, service.tokenizer, service.model, []).add(written, last=True)
    assert (shown, len(calls)) == (content, count)


def test_calls_that_are_cut(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3.5's, of which any part may be read, and whose end might go on."""
    monkeypatch.setattr(service.tokenizer, "response_template", None)
    monkeypatch.setattr(service.model.config, "model_type", "qwen3_5_text")
    call = "<tool_call>\n<function=state>\n<parameter=deep>\ntrue\n</parameter>\n</function>\n</tool_call>"
    for size in range(len(call) + 1):
        reader = Reader(ChatAsked(messages=MESSAGES, tools=TOOLS), service.tokenizer, service.model, [])
        shown, calls = reader.add(f"Well.{call[:size]}", last=True, cut=True)
        made = [("state", '{"deep": true}')] if size == len(call) else []
        assert ([one[2:] for one in calls], shown) == (made, "Well." if made else f"Well.{call[:size]}")


def test_parts_of_a_character_have_no_bytes(service: Service) -> None:
    """Those that clients join to characters; a text of its own has them."""
    part = service.tokenizer("€", add_special_tokens=False)["input_ids"][0]
    answer = Chat(None, SimpleNamespace(size=1), "m", service.tokenizer)
    whole = service.tokenizer("a", add_special_tokens=False)["input_ids"][0]
    assert [answer._token((token, -1.0))["bytes"] for token in (part, whole)] == [None, [97]]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_text_that_only_looks_like_a_call(service: Service, size: int) -> None:
    """Qwen's form of calls, in pieces: what cannot be read as one is text, and nothing is lost."""
    tokenizer: PreTrainedTokenizerBase = copy.deepcopy(service.tokenizer)
    tokenizer.response_template = None
    if size == 7:  # as a template of its own, which may name several words for one
        template = copy.deepcopy(get_response_template(tokenizer, service.model))
        for field in (one for one in template["fields"].values() if "open" in one):
            field["open"] = [field["open"]]
        tokenizer.response_template = template
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    for text, content, count, *prompt in (
        (f"<think>so</think>Well.\n{call}\n{call}", "<think>so</think>Well.", 2),
        ("a <tool_cal> b", "a <tool_cal> b", 0),
        (f"{call}\n<tool_call>\nno</tool_call> and", "\n<tool_call>\nno</tool_call> and", 1),
        ('Well.<tool_call>{"name": "f"', 'Well.<tool_call>{"name": "f"', 0),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", 0),
        (f"<tool_call></tool_call> I\n{call} x{call}", "<tool_call></tool_call> I x", 2),
        (f"a\n<think>{call} <<</think>{call}", f"a\n<think>{call} <<</think>", 1),
        (f"<think>{call}</thin", f"<think>{call}</thin", 0),
        (f"{call}\n<tool_call></think>\n{call}", f"{call}\n<tool_call></think>", 1, "<think>\n"),
        (f"{call}\n", "\n", 1, "<think>\n\n</think>\n\n"),
    ):
        ids = tokenizer("".join(prompt))["input_ids"]
        reader = Reader(ChatAsked(messages=MESSAGES, tools=TOOLS), tokenizer, service.model, ids)
        found = [reader.add(text[start : start + size]) for start in range(0, len(text), size)]
        found.append(reader.add("", last=True))
        calls = [one for _, made in found for one in made]
        assert [(one.number, one.name, json.loads(one.arguments)) for one in calls] == [
            (number, "f", {"a": 1}) for number in range(count)
        ]
        assert "".join(shown for shown, _ in found) == content
