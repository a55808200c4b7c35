"""A server asked by the `openai` client: each text is what stock `generate` writes alone, whatever runs beside it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.client import HTTPResponse
from typing import Any

import openai
import pytest
import torch
from prometheus_client import generate_latest
from support.compare import run
from support.sentences import refused as refused_call
from support.serving import ask, begun, served
from support.tiny import VOCABULARY, tiny_head, tiny_target
from support.users import TOKENIZER, fail
from tokenizers import decoders
from transformers import LogitsProcessorList

from hf_dart import LookupDrafter, SuffixStore, TreeConfig
from hf_dart.decoding.processors import AdditivePenaltyLogitsProcessor
from hf_dart.errors import UserError
from hf_dart.serve import app
from hf_dart.serve.service import Limits, Service, length_of

NAME = "tiny"
LIMITS = Limits(length=200, seats=3, waiting=20, max_body=20_000, max_tokens=600)
PROMPT = "abcDEF"
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"


@pytest.fixture(scope="module")
def target() -> Any:
    target = tiny_target("llama")
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = 3, 0
    return target


@pytest.fixture(scope="module")
def service(target: Any) -> Iterator[Service]:
    TOKENIZER.chat_template = TEMPLATE
    yield Service(target, TOKENIZER, tiny_head(target), [NAME, "other/name"], LIMITS, SuffixStore())
    TOKENIZER.chat_template = None


@pytest.fixture
def other(target: Any) -> Service:
    """A service that nothing else is asked of."""
    return Service(target, TOKENIZER, tiny_head(target), [NAME], LIMITS)


@pytest.fixture(scope="module")
def address(service: Service) -> Iterator[str]:
    with served(service) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def stock(target: Any, prompt: str, seed: int = 0, **options: Any) -> tuple[str, str]:
    """Text that the target writes alone, and how that ends."""
    ids = torch.tensor([TOKENIZER(prompt)["input_ids"]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    written = run(target, inputs, seed, **options).sequences[0, ids.shape[1] :]
    ended = int(written[-1]) == 3
    return TOKENIZER.decode(written[: len(written) - ended], skip_special_tokens=True), "stop" if ended else "length"


CALLS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # of the client, and of stock
    ({"temperature": 0}, {"do_sample": False}),
    ({}, {"do_sample": False}),
    ({"temperature": 1}, {"do_sample": True}),
    ({"temperature": 0.6, "top_p": 0.8}, {"do_sample": True, "temperature": 0.6, "top_p": 0.8}),
    ({"top_p": 0.9}, {"do_sample": True, "top_p": 0.9}),
    ({"temperature": 1, "extra_body": {"top_k": 4, "min_p": 0.01, "repetition_penalty": 1.2}},
     {"do_sample": True, "top_k": 4, "min_p": 0.01, "repetition_penalty": 1.2}),
    ({"temperature": 1, "logit_bias": {"7": 5, "9": -100}},
     {"do_sample": True, "sequence_bias": [[[7], 5.0], [[9], -100.0]]}),
    ({"temperature": 1, "presence_penalty": 1.5, "frequency_penalty": 0.5}, {"do_sample": True}),
]  # fmt: skip


def stocks(target: Any, number: int, seed: int, tokens: int) -> tuple[str, str]:
    given, options = CALLS[number]
    if "presence_penalty" in given:
        penalty = AdditivePenaltyLogitsProcessor(len(PROMPT), given["presence_penalty"], given["frequency_penalty"])
        options = {**options, "logits_processor": LogitsProcessorList([penalty])}
    return stock(target, PROMPT, seed, max_new_tokens=tokens, **options)


def joined(parts: Any, texts: int = 1) -> list[tuple[str, str]]:
    """Each text of a completion or its stream, and how it ends."""
    found = [("", "")] * texts
    for part in parts:
        for choice in part.choices:
            text, end = found[choice.index]
            found[choice.index] = text + choice.text, choice.finish_reason or end
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_texts_under_load_are_those_of_stock(target: Any, service: Service, client: Any, stream: bool) -> None:
    """Three seats for eight calls of two texts at once: greedy and sampled, each as alone."""

    def ask(number: int) -> list[tuple[str, str]]:
        given = {"model": NAME, "prompt": PROMPT, "max_tokens": 40, "n": 2, "seed": number, **CALLS[number][0]}
        answer = client.completions.create(**given, stream=stream)
        return joined(answer if stream else [answer], 2)

    drafted = read(service, "spec_decode_num_accepted_tokens_total")
    with ThreadPoolExecutor(len(CALLS)) as pool:
        answers = list(pool.map(ask, range(len(CALLS))))
    for number, answer in enumerate(answers):
        assert answer == [stocks(target, number, seed, 40) for seed in (number, number + 1)]
    assert {end for answer in answers for _, end in answer} == {"stop", "length"}
    number, text = next((number, answer[0][0]) for number, answer in enumerate(answers) if answer[0][1] == "stop")
    given = {"model": NAME, "prompt": PROMPT, "max_tokens": len(text) + 1, "seed": number, **CALLS[number][0]}
    assert joined([client.completions.create(**given)]) == [(text, "stop")], "with the last token that it may have"
    rounds = read(service, "spec_decode_num_drafts_total")
    assert read(service, "spec_decode_num_accepted_tokens_total") > drafted + 0.05 * rounds


def read(service: Service, name: str) -> float:
    lines = generate_latest(service.metrics.registry).decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# ---- the routes ----------------------------------------------------------------------------------------------


def test_names_of_the_model(address: str, client: Any) -> None:
    """Any of its names, and none at all."""
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve("other/name").id == NAME
    with pytest.raises(openai.NotFoundError, match="no model 'tinny' here; leave it out, or name 'tiny'") as refused:
        client.models.retrieve("tinny")
    assert refused.value.body["code"] == "model_not_found"
    given = {"prompt": PROMPT, "max_tokens": 3}
    bare = json.loads(ask(address, "/v1/completions", given)[1])
    texts = [client.completions.create(model=name, **given).choices[0].text for name in (NAME, "other/name")]
    assert texts == [bare["choices"][0]["text"]] * 2
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other/model", **given)


def test_several_prompts(target: Any, client: Any) -> None:
    """Texts and token ids, each text in the place of its prompt and number, after an echo."""
    prompts = ["abc", "Hello"]
    ids = [TOKENIZER(prompt)["input_ids"] for prompt in prompts]
    given = {"model": NAME, "max_tokens": 8, "n": 2, "seed": 4, "temperature": 1, "echo": True}
    for asked in (prompts, ids):
        answer = client.completions.create(prompt=asked, **given)
        texts = [stock(target, one, seed, do_sample=True, max_new_tokens=8) for one in prompts for seed in (4, 5)]
        echoed = [prompt + text for prompt, (text, _) in zip(["abc", "abc", "Hello", "Hello"], texts, strict=True)]
        assert [choice.text for choice in answer.choices] == echoed
        parts = client.completions.create(prompt=asked, **given, stream=True, stream_options={"include_usage": True})
        *parts, last = parts
        assert [text for text, _ in joined(parts, 4)] == echoed
        assert answer.usage == last.usage
        assert last.usage.prompt_tokens == 8


def test_events_are_lines_to_any_client(address: str) -> None:
    """Also to those that end lines at other characters than HTTP does."""
    body = {"prompt": "a\x85b\u2028c\u2029", "echo": True, "stream": True, "max_tokens": 1}
    _, events, _ = ask(address, "/v1/completions", body)
    assert events.split("\n") == [*events.splitlines(), ""]
    assert json.loads(events.split("\n")[0].removeprefix("data: "))["choices"][0]["text"] == body["prompt"]


def test_a_space_that_a_decoder_drops(target: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a text begins, as Llama 2's does: completions go on from the prompt's end, and answers of a chat begin."""
    text, _ = stock(target, "uaA", do_sample=False, max_new_tokens=6)
    dropping = decoders.Sequence([decoders.Fuse(), decoders.Strip(text[0], 1, 0)])
    monkeypatch.setattr(TOKENIZER.backend_tokenizer, "decoder", dropping)
    given = {"model": NAME, "max_tokens": 6, "temperature": 0}
    assert client.completions.create(prompt="uaA", **given).choices[0].text == text
    answer = client.chat.completions.create(messages=[{"role": "user", "content": "a"}], **given)
    assert answer.choices[0].message.content == text[1:]


def test_stop_strings(target: Any, service: Service, client: Any) -> None:
    """Texts end before the first of them, also where it spans tokens; the call ends with it."""
    text, _ = stock(target, PROMPT, 5, do_sample=True, max_new_tokens=60)
    stop, other = text[20:23], text[30:31]
    cut = min(text.index(stop), text.index(other))
    given = {"model": NAME, "prompt": PROMPT, "max_tokens": 60, "seed": 5, "temperature": 1, "stop": [stop, other]}
    answer = client.completions.create(**given, logprobs=0)
    assert joined([answer]) == [(text[:cut], "stop")]
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens < 35
    assert answer.usage.completion_tokens == min(text.index(one) + len(one) for one in (stop, other))
    assert joined(client.completions.create(**given, stream=True)) == [(text[:cut], "stop")]
    wait_for(lambda: service.batcher.running == 0)


def test_generation_configs_of_targets(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they stop at is served, and what drafts cannot do refused before anything is."""
    text, _ = stock(target, PROMPT, 5, do_sample=True, max_new_tokens=60)
    monkeypatch.setattr(target.generation_config, "stop_strings", [text[20:23]])
    expected, _ = stock(target, PROMPT, 5, do_sample=True, max_new_tokens=60, tokenizer=TOKENIZER)
    with served(Service(target, TOKENIZER, tiny_head(target), [NAME], LIMITS)) as address:
        body = {"prompt": PROMPT, "max_tokens": 60, "seed": 5, "temperature": 1}
        choice = json.loads(ask(address, "/v1/completions", body)[1])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    assert len(expected) < len(text)
    monkeypatch.setattr(target.generation_config, "num_beams", 2)
    start = partial(Service, target, TOKENIZER, tiny_head(target), [NAME], LIMITS)
    refused_call(start, UserError, "with the target's generation_config; change it there: .* num_beams=1")


def plainly(target: Any, prompt: str, text: str) -> tuple[torch.Tensor, list[float]]:
    """Log-probabilities of all tokens after a prompt, by one forward, and those of a text's."""
    ids = torch.tensor([TOKENIZER(prompt + text)["input_ids"]])
    with torch.no_grad():
        scores = target(ids).logits[0, -len(text) - 1 : -1].log_softmax(-1)
    return scores, scores.gather(1, ids[0, -len(text) :, None])[:, 0].tolist()


@pytest.mark.parametrize("sampled", [False, True])
def test_log_probabilities(target: Any, client: Any, sampled: bool) -> None:
    """Log-probabilities of the target's plain forward, of completions and of chat, streamed and not."""
    given = {"model": NAME, "temperature": 1.3 if sampled else 0, "seed": 2, "max_tokens": 12}
    for answer in reversed(client.completions.create(prompt=PROMPT, logprobs=3, **given, n=2).choices):
        told = answer.logprobs
        assert "".join(told.tokens) == answer.text
        assert told.text_offset == list(range(12))
        expected, wanted = plainly(target, PROMPT, answer.text)
        assert told.token_logprobs == pytest.approx(wanted, abs=1e-5)
        for top, scores in zip(told.top_logprobs, expected, strict=True):
            assert [*top] == [TOKENIZER.decode([token]) for token in scores.topk(3).indices.tolist()]
    parts = client.completions.create(prompt=PROMPT, logprobs=3, **given, stream=True)
    assert [place for part in parts for place in part.choices[0].logprobs.text_offset] == told.text_offset
    given |= {"messages": [{"role": "user", "content": "abc"}], "logprobs": True, "top_logprobs": 2}
    said = client.chat.completions.create(**given).choices[0]
    parts = client.chat.completions.create(**given, stream=True)
    told = [choice.logprobs for part in parts for choice in part.choices if choice.logprobs]
    entries = said.logprobs.content
    assert [one for each in told for one in each.content] == entries
    _, wanted = plainly(target, "uabcA", said.message.content)
    assert [one.logprob for one in entries] == pytest.approx(wanted, abs=1e-5)
    assert "".join(one.token for one in entries) == said.message.content
    assert [len(one.top_logprobs) for one in entries] == [2] * 12


def test_chat(target: Any, client: Any) -> None:
    messages = [
        {"role": "developer", "content": "ab"},
        {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
    ]
    text, end = stock(target, "sabucdA", 6, do_sample=True, max_new_tokens=30)
    given = {"model": NAME, "messages": messages, "max_completion_tokens": 30, "seed": 6, "temperature": 1}
    answer = client.chat.completions.create(**given)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, end)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (7, 7 + answer.usage.completion_tokens)
    *parts, last = client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True})
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].choices[0].finish_reason == end
    assert (last.choices, last.usage) == ([], answer.usage)
    assert all(part.usage is None for part in parts)
    again = [*messages, answer.choices[0].message.model_dump(), {"role": "user", "content": "e"}]
    answer = client.chat.completions.create(**{**given, "messages": again})
    assert answer.usage.prompt_tokens == len("sabucda" + text + "ueA")


def test_responses(target: Any, client: Any) -> None:
    text, _ = stock(target, "sabucdA", do_sample=False, max_new_tokens=20)
    given = {"model": NAME, "instructions": "ab", "input": "cd", "max_output_tokens": 20, "temperature": 0}
    answer = client.responses.create(**given)
    assert answer.output_text == text
    assert answer.usage.input_tokens == 7
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    *events, last = client.responses.create(**given, stream=True)
    assert [event.sequence_number for event in [*events, last]] == list(range(len(events) + 1))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert (last.type, last.response.output_text) == ("response.incomplete", text)
    with client.responses.stream(**given, extra_body={"stop": text[9:11]}) as stream:  # put together from the events
        assert stream.get_final_response().output_text == text[: text.index(text[9:11])]
    turns = [{"role": "user", "content": "cd"}, answer.output[0].model_dump(), {"role": "user", "content": "e"}]
    assert client.responses.create(**{**given, "input": turns}).usage.input_tokens == len("sabucda" + text + "ueA")


def test_a_memory_for_each_user(target: Any) -> None:
    """Texts come again in fewer rounds for the same user, and for requests that name none, and for nobody else."""
    memory, rounds = SuffixStore(), list[float]()
    service = Service(target, TOKENIZER, LookupDrafter(TreeConfig(nodes=8)), [NAME], LIMITS, memory)
    text, _ = stock(target, PROMPT, 3, do_sample=True, max_new_tokens=60)
    body = {"prompt": PROMPT, "max_tokens": 60, "seed": 3, "temperature": 1}
    with served(service) as address:
        for user in ({"user": "ada"}, {"user": "ada"}, {"safety_identifier": "bob"}, {}, {"user": ""}):
            before = read(service, "spec_decode_num_drafts_total")
            answer = json.loads(ask(address, "/v1/completions", {**body, **user})[1])
            assert answer["choices"][0]["text"] == text
            rounds.append(read(service, "spec_decode_num_drafts_total") - before)
        assert refused(address, "completions", {**body, "user": 7})[1]["param"] == "user"
    first, again, other, unnamed, unnamed_again = rounds
    assert other == unnamed == first
    assert max(again, unnamed_again) < first / 1.5
    assert sorted(memory.names) == ["", "ada", "bob"]
    without = Service(target, TOKENIZER, LookupDrafter(), [NAME], LIMITS)
    assert without.batcher._prefixes._most == 0 < service.batcher._prefixes._most, "nor are beginnings kept"


# ---- refusals and bounds -------------------------------------------------------------------------------------


def refused(address: str, path: str, body: Any) -> tuple[int, dict[str, Any], Any]:
    status, text, headers = ask(address, f"/v1/{path}", body)
    return status, json.loads(text)["error"], headers


BODIES = [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 9000, b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", b'"x"']


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_bodies_that_are_none(address: str, path: str, body: bytes) -> None:
    status, error, _ = refused(address, path, body)
    assert status == 400
    assert error.keys() == {"message", "type", "param", "code"}


def test_what_the_model_refuses(address: str) -> None:
    asked = {
        "prompt": [
            ({"prompt": ""}, "The prompt is empty"),
            ({"prompt": "x" * 300}, "The model takes 200 tokens, and 300 of the prompt and 16 new ones are more"),
            ({"prompt": "x", "max_tokens": 200}, "The model takes 200 tokens, and 1 of the prompt and 200 new ones"),
            ({"prompt": [1, VOCABULARY]}, f"has ids that are no tokens; give some below {VOCABULARY}"),
            ({"prompt": "\ud800"}, "half a character"),
        ],
        "logit_bias": [({"prompt": "x", "logit_bias": {"999": 1}}, f"names token 999; give ids below {VOCABULARY}")],
        "n": [({"prompt": "x", "n": 50}, "50 texts are asked for at once; ask for 23 at most")],
    }
    for param, cases in asked.items():
        for body, message in cases:
            status, error, _ = refused(address, "completions", body)
            assert (status, error["param"]) == (400, param)
            assert message in error["message"]
    assert refused(address, "completions", {"prompt": "x", "model": 5})[1]["code"] is None
    for content, code in (("x" * 300, "context_length_exceeded"), ("\ud800", None)):
        bodies = ("messages", [{"role": "user", "content": content}]), ("input", content), ("prompt", content)
        for path, (param, given) in zip(("chat/completions", "responses", "completions"), bodies, strict=True):
            _, error, _ = refused(address, path, {param: given})
            assert (error["param"], error["code"]) == (param, code)


def test_the_length_of_a_model() -> None:
    assert length_of(tiny_target("llama", max_position_embeddings=77), 200) == 77
    assert length_of(tiny_target("llama", max_position_embeddings=77), 50) == 50
    assert length_of(tiny_target("mamba2"), 200) == 200  # which has no positions
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 30}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0, 3, 4, 5]}
    assert length_of(tiny_target("llama", rope_parameters=rope), 200) == 30  # no request may go beyond in a seat


def test_chat_that_no_template_takes(address: str) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}]}
    TOKENIZER.chat_template = "{{ raise_exception('No user may speak here.') }}"
    try:
        status, error, _ = refused(address, "chat/completions", asked)
        assert (status, error["message"].split(": ")[1]) == (400, "No user may speak here.")
        TOKENIZER.chat_template = None
        for path, body in (("chat/completions", asked), ("responses", {"input": "x"})):
            status, error, _ = refused(address, path, body)
            assert status == 400
            assert "has no chat template; start the server with --chat-template FILE" in error["message"]
    finally:
        TOKENIZER.chat_template = TEMPLATE
    flags = {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    assert "nothing that a template reads" in refused(address, "chat/completions", asked | flags)[1]["message"]


def test_bodies_that_are_too_large(address: str) -> None:
    for content in (b" " * 30_000, iter([b" " * 6_000] * 5)):  # with a length, and in chunks
        status, error, _ = refused(address, "completions", content)
        assert (status, error["message"]) == (413, "The request has more than 20000 bytes; send less.")


def test_bodies_that_do_not_come(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_BODY_SECONDS", 0.1)
    with begun(address, {}, length=9000) as half:
        answer = HTTPResponse(half)
        answer.begin()
        message = json.loads(answer.read())["error"]["message"]
    assert (answer.status, message) == (408, "The request took more than 0.1 s; send it faster.")


def test_routes_that_are_none(address: str) -> None:
    for method, path, status in (("POST", "load_model", 404), ("POST", "reset", 404), ("GET", "v1/completions", 405)):
        found, answer, _ = ask(address, f"/{path}", method=method)
        assert (found, json.loads(answer).keys()) == (status, {"error"})


def test_more_than_may_wait(service: Service, address: str, client: Any) -> None:
    long = {"model": NAME, "prompt": PROMPT, "max_tokens": 150, "temperature": 0, "logit_bias": {"3": -100}}
    with client.completions.create(**long, n=23, stream=True):
        status, error, headers = refused(address, "completions", {"prompt": "x"})
        assert (status, headers["Retry-After"], error["type"]) == (429, "1", "rate_limit_error")
        assert "23 texts are written or wait" in error["message"]
    wait_for(lambda: service.taken == 0)


def test_more_requests_than_are_read(other: Service) -> None:
    """Bodies that do not come hold no more memory than so many may."""
    with served(other) as address, ExitStack() as stack:
        for _ in range(32 + other.room):
            stack.enter_context(begun(address, {}, length=9000))
        wait_for(lambda: ask(address, "/v1/completions", {"prompt": "x"})[0] == 429)
        status, error, headers = refused(address, "completions", {"prompt": "x"})
        assert (status, error["message"], headers["Retry-After"]) == (
            429, "Too many requests are here; try again in a second.", "1"
        )  # fmt: skip
        stack.close()
        wait_for(lambda: ask(address, "/v1/completions", {"prompt": "x"})[0] == 200)


# ---- clients that leave, and the end -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_seat_within_a_round(
    service: Service, address: str, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The call ends where it is."""
    rounds, waits, goes_on = [0], threading.Event(), threading.Event()
    run = service.batcher._round

    def held() -> None:
        rounds[0] += 1
        if rounds[0] == 3:
            waits.set()
            assert goes_on.wait(20)
        run()

    monkeypatch.setattr(service.batcher, "_round", held)
    body = {"prompt": PROMPT, "temperature": 0, "logit_bias": {"3": -100}, "max_tokens": 190, "stream": stream}
    with begun(address, body):
        assert waits.wait(20)
        (handle,) = (one.handle for one in service.batcher._running)
    wait_for(handle.cancelled)
    goes_on.set()
    wait_for(lambda: service.batcher.running == 0)
    assert rounds[0] == 3
    assert len(handle.tokens) < 40


def test_an_answer_that_takes_too_long(target: Any) -> None:
    limits = Limits(length=200, timeout=1.0)
    service = Service(target, TOKENIZER, tiny_head(target), [NAME], limits)
    run = service.batcher._round

    def slow() -> None:
        time.sleep(0.1)
        run()

    service.batcher._round = slow
    asked = {"prompt": PROMPT, "max_tokens": 190, "logit_bias": {"3": -100}, "temperature": 1}
    with served(service) as address:
        status, error, _ = refused(address, "completions", asked)
        assert error["type"] == "server_error"
        assert (status, error["message"]) == (504, "The answer took more than 1 s; ask for fewer tokens.")
        _, answer, _ = ask(address, "/v1/completions", {**asked, "stream": True})
        assert answer.splitlines()[-2].startswith('data: {"error": {"message": "The answer took more than 1 s')


def test_calls_that_fail_on_the_way(other: Service, caplog: pytest.LogCaptureFixture) -> None:
    """The client is told, whole or as an event, and nothing else."""
    error = MemoryError("with what no client should see")
    with served(other) as address:
        other.batcher._seats.round = lambda: fail(error)
        status, told, _ = refused(address, "completions", {"prompt": PROMPT})
        assert (status, told["message"]) == (500, "The server failed; its log says why.")
        other.batcher._seats.round = lambda: fail(error)
        _, answer, _ = ask(address, "/v1/completions", {"prompt": PROMPT, "stream": True})
        assert "no client" not in answer
        assert '"The server failed; its log says why."' in answer
    assert "with what no client should see" in caplog.text


def test_an_api_key(other: Service) -> None:
    with served(other, api_key="secret") as address:
        for key in ("none", "secre", "secrets"):
            wrong = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
            with wrong, pytest.raises(openai.AuthenticationError, match="The API key is missing or wrong"):
                wrong.models.list()
        with openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0) as client:
            assert client.completions.create(model=NAME, prompt="x", max_tokens=2).usage.completion_tokens == 2
        health = ask(address, "/health", method="GET")[1]
        assert json.loads(health) == {"status": "ok", "running": 0, "waiting": 0}
        assert "vllm:num_requests_running" in ask(address, "/metrics", method="GET")[1]


# ---- figures -------------------------------------------------------------------------------------------------


def test_metrics(other: Service, caplog: pytest.LogCaptureFixture) -> None:
    """The acceptance length is that of the calls, and the log has a line for each."""
    caplog.set_level("INFO", "hf_dart.serve")
    with served(other) as address:
        asked = {"prompt": PROMPT, "max_tokens": 60, "n": 2, "seed": 1, "temperature": 1, "logit_bias": {"3": -100}}
        answer = json.loads(ask(address, "/v1/completions", asked)[1])
        assert answer["usage"]["completion_tokens"] == 120
        refused(address, "completions", {"prompt": ""})
        _, page, headers = ask(address, "/", method="GET")
        assert headers["content-type"].startswith("text/html")
        assert "://" not in page  # of itself alone
    figures = {name: read(other, name) for name in (
        "spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total", "spec_decode_num_draft_tokens_total",
        "generation_tokens_total", "prompt_tokens_total", "request_success_total",
        "time_to_first_token_seconds_count", "num_seats",
    )}  # fmt: skip
    accepted, drafts = figures["spec_decode_num_accepted_tokens_total"], figures["spec_decode_num_drafts_total"]
    assert accepted == figures["spec_decode_num_accepted_tokens_per_pos_total"] > 0
    assert accepted + drafts == 118  # the first token of each follows its prompt
    assert figures["spec_decode_num_draft_tokens_total"] >= accepted
    assert figures["generation_tokens_total"] == 120
    assert (figures["prompt_tokens_total"], figures["num_seats"]) == (6, 3)
    assert (figures["request_success_total"], figures["time_to_first_token_seconds_count"]) == (2, 1)
    lines = [record.getMessage() for record in caplog.records if record.name == "hf_dart.serve"]
    assert [line.split(", ")[0] for line in lines] == ["POST /v1/completions 200", "POST /v1/completions 400"]
    assert "6 + 120 tokens" in lines[0]
    assert lines[0].endswith("length, seed 1")
    assert lines[1].endswith("The prompt is empty; give some text.")
