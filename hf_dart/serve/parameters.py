"""Requests of OpenAI's API as pydantic reads them: each parameter works, or is refused by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, Json, model_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from hf_dart.errors import LEAST_TEMPERATURE, did_you_mean

# Parameters that are not to be had, by the reason.
_REASONS = {
    "is how other routes ask for JSON; give chats response_format, responses text, or leave it out": (
        "text response_format"
    ),
    "asks for functions as they were before tools; give tools": "function_call functions",
    "asks for more than text; leave it out": "audio include modalities refusal web_search_options",
    "asks for what was said before, and this server keeps nothing; send all messages": (
        "conversation previous_response_id"
    ),
    "asks to keep the answer, and this server keeps nothing; give false": "store",
    "is not to be had here; leave it out": "background include_obfuscation moderation",
    "is not needed, as drafts are found here; leave it out": "prediction",
    "is not known to chat templates; give chat_template_kwargs": "reasoning reasoning_effort",
    "asks for text in the middle of another, which is not written here; leave it out": "suffix",
    "would drop text; leave it out, and shorten what is too long": "truncation",
    "is not known to models; say it in a message": "verbosity",
}
_REFUSED = {name: why for why, names in _REASONS.items() for name in names.split()}
# Values of these that ask for nothing.
_TEXT = {"type": "text"}
_NOTHING: tuple[Any, ...] = (None, False, "", [], {}, "none", "auto", "disabled", ["text"], _TEXT, {"format": _TEXT})
# Parameters that change no text.
_CACHED = ["prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"]
_NOTES = frozenset(["metadata", "service_tier", "max_tool_calls", "parallel_tool_calls", *_CACHED])
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(HTTPException):
    """A request that is not answered: a sentence, the parameter that it is about, HTTP's status, and OpenAI's code."""

    def __init__(self, message: str, param: str = "", status: int = 400, code: str = "", **headers: str) -> None:
        super().__init__(status, message, headers)
        kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.error = {"message": message, "type": kind, "param": param or None, "code": code or None}

    def response(self) -> JSONResponse:
        return JSONResponse({"error": self.error}, self.status_code, self.headers)


def _wrong(message: str, name: str = "") -> PydanticCustomError:
    return PydanticCustomError("refused", "{message}", {"message": message, "name": name})


class _Read(BaseModel):
    """Fields that were given, each known; `notes` are those that change no text."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    notes: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name in given.keys() - cls.model_fields.keys() - cls.notes:
            if name not in _REFUSED:
                shown = name[:100].encode(errors="replace").decode()  # JSON may bring half a character
                remedy = did_you_mean(shown, cls.model_fields, "leave it out.")
                raise _wrong(f"There is no parameter {shown!r}; {remedy}", shown)
            if given[name] not in _NOTHING or (name, given[name]) == ("truncation", "auto"):
                raise _wrong(f"{name} {_REFUSED[name]}.", name)
        return {name: value for name, value in given.items() if name in cls.model_fields}


def _text_of(content: Any) -> str | None:
    """Return the text of a message: a string, or a list of parts that are text; None for none."""
    if content is None or isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]  # which is refused
    for part in parts:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise _wrong("has more than text; send text, or a list of parts of the type text")
    return "".join(part["text"] for part in parts)


def _prompts_of(prompt: Any) -> list[str | list[int]]:
    """Return a text, token ids, or a list of either, as a list."""
    prompts = [prompt] if _is_prompt(prompt) else prompt
    if not isinstance(prompts, list) or not prompts or not all(map(_is_prompt, prompts)):
        raise _wrong("is neither text nor token ids, nor a list of either; give one of them")
    return prompts


def _is_prompt(value: Any) -> bool:
    ids = isinstance(value, list) and len(value) > 0 and all(type(one) is int for one in value)
    return ids or isinstance(value, str)


def _as_list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [] if given is None else [given]


_Stop = Annotated[str, Field(min_length=1, max_length=256)]


def _arguments_of(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    if schema is not None and schema.get("type", "object") != "object":
        raise _wrong("are the schema of no object; give one of the type object, with a property for each argument")
    return schema


def _biases_of(biases: dict[str, float]) -> dict[int, float]:
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10 and -100 <= bias <= 100):
            raise _wrong("takes token ids, each with a number from -100 to 100; leave others out")
    return {int(token): bias for token, bias in biases.items()}


def _temperature_of(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise _wrong(f"is {value:g}; give 0, or {LEAST_TEMPERATURE:g} or more")
    return value


class _StreamOptions(_Read):
    include_usage: bool = False


class _ResponseFormat(_Read):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.type == "json_schema" and not isinstance((self.json_schema or {}).get("schema"), dict):
            raise _wrong("has no schema of its json_schema; give one")
        return self

    @property
    def schema_of_text(self) -> str | None:
        """JSON schema that the text has to follow; None for free text."""
        if self.type == "text":
            return None
        return json.dumps(self.json_schema["schema"] if self.json_schema else {"type": "object"})


def _format_of(given: Any) -> Any:
    """Return a format as chats have it; in those of responses, the fields of a schema stand beside its type."""
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


class _TextOptions(_Read):
    format: Annotated[_ResponseFormat, BeforeValidator(_format_of)] | None = None


class _Function(_Read):
    notes = frozenset(["strict", "type"])
    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, AfterValidator(_arguments_of)] = None


class _Tool(_Read):
    type: Literal["function"]
    function: _Function


class _Called(_Read):
    notes = frozenset(["parsed_arguments"])
    name: str
    arguments: Json[dict[str, Any]]


class _Call(_Read):
    notes = frozenset(["index"])
    type: Literal["function"] = "function"
    id: str
    function: _Called


class _Message(_Read):
    notes = frozenset(["type", "id", "status", "phase", "annotations", "parsed"])  # of an answer that is handed back
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, AfterValidator(_text_of)] = None
    name: str | None = None
    tool_calls: Annotated[list[_Call], FailFast(), BeforeValidator(_as_list)] = []
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise _wrong("has no content; give some text")
        if self.role == "tool" and self.tool_call_id is None:
            raise _wrong("is the result of no call; give its tool_call_id")
        return self

    def for_template(self) -> dict[str, Any]:
        said = {"role": "system" if self.role == "developer" else self.role, "content": self.content or ""}
        return {name: value for name, value in self.model_dump().items() if value} | said


_Messages = Annotated[list[_Message], FailFast(), Field(min_length=1, max_length=10_000)]


def _tool_of(given: Any) -> dict[str, Any]:
    """Return a tool as chats have it; in those of responses, the fields of the function stand beside its type."""
    if not isinstance(given, dict) or given.get("type") != "function":
        raise _wrong("is no function; give tools of the type function")
    return given if "function" in given else {"type": "function", "function": {**given}}


_AnyTool = Annotated[_Tool, BeforeValidator(_tool_of)]


def _choice_of(choice: Any) -> Any:
    """Return "none", "auto", "required", or a function as responses name it."""
    if choice in (None, "none", "auto", "required"):
        return choice or "auto"
    function = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    if isinstance(function, dict):
        return {"type": "function", "name": function.get("name")}
    raise _wrong("is not known here; give none, auto, required, or a function")


class Asked(_Read):
    """Parameters of all three routes; names that OpenAI does not have are vLLM's."""

    notes = _NOTES
    model: str | None = None
    temperature: Annotated[float, Field(ge=0), AfterValidator(_temperature_of)] | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float], AfterValidator(_biases_of)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(1, ge=1, le=128)
    best_of: Literal[1] | None = None
    stop: Annotated[list[_Stop], FailFast(), Field(max_length=4), BeforeValidator(_as_list)] = []
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    most: ClassVar[Any]  # new tokens at most; None for as many as the model takes
    said: ClassVar[str] = "prompt"  # parameter that has the text
    form: ClassVar[str] = "response_format"  # parameter that asks for JSON
    schema_of_text: ClassVar[Any] = None
    functions: ClassVar[Any] = ()  # tools that the model is told of
    forced: ClassVar[Any] = ()  # tools of which one has to be called
    parallel: ClassVar[Any] = True  # whether a text may have several calls
    top: ClassVar[Any] = None  # likeliest tokens that are told beside each; None: not even its log-probability

    @property
    def masked(self) -> bool:
        """True if a grammar holds the text to something."""
        return self.schema_of_text is not None or bool(self.forced)

    def sampling(self, samples: bool) -> dict[str, Any]:
        """Return options of `generate`; `samples` says if a call without options samples."""
        options: dict[str, Any] = {}
        if self.repetition_penalty is not None:
            options["repetition_penalty"] = self.repetition_penalty
        if self.logit_bias:
            options["sequence_bias"] = [[[token], bias] for token, bias in self.logit_bias.items()]
        drawing = self.model_dump(include={"temperature", "top_p", "top_k", "min_p"}, exclude_none=True)
        if self.temperature == 0 or not (samples or drawing):
            return {**options, "do_sample": False}
        return {**options, **drawing, "do_sample": True}


class CompletionAsked(Asked):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[Any, AfterValidator(_prompts_of)]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = False
    most = property(lambda self: self.max_tokens)
    top = property(lambda self: self.logprobs)

    @model_validator(mode="after")
    def _scores_no_prompt(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise _wrong("echo shows a prompt, which has no logprobs here; leave one of them out.", "echo")
        return self


class _Talk(Asked):
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    tools: Annotated[list[_AnyTool], FailFast(), Field(max_length=128), BeforeValidator(_as_list)] = []
    tool_choice: Annotated[Any, AfterValidator(_choice_of)] = "auto"
    parallel_tool_calls: bool | None = True

    @model_validator(mode="after")
    def _can_be_called(self) -> Self:
        if self.tool_choice not in ("none", "auto") and not self.forced:
            raise _wrong("tool_choice names no function of tools; add it there, or give auto.", "tool_choice")
        if self.functions and self.schema_of_text:
            raise _wrong(f"{self.form} and tools exclude each other here; leave one of them out.", self.form)
        return self

    @property
    def functions(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def forced(self) -> list[dict[str, Any]]:
        if isinstance(self.tool_choice, dict):
            return [tool for tool in self.functions if tool["function"]["name"] == self.tool_choice["name"]]
        return self.functions if self.tool_choice == "required" else []

    @property
    def parallel(self) -> bool:
        return self.parallel_tool_calls is not False and isinstance(self.tool_choice, str)


class ChatAsked(_Talk):
    """Body of `POST /v1/chat/completions`."""

    messages: _Messages
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: _ResponseFormat | None = None
    said = "messages"
    most = property(lambda self: self.max_completion_tokens or self.max_tokens)
    top = property(lambda self: (self.top_logprobs or 0) if self.logprobs else None)
    turns = property(lambda self: [one.for_template() for one in self.messages])
    schema_of_text = property(lambda self: self.response_format and self.response_format.schema_of_text)

    @model_validator(mode="after")
    def _tells(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise _wrong("top_logprobs are told beside logprobs; give logprobs true, or leave it out.", "top_logprobs")
        return self


def _messages_of(given: Any) -> Any:
    """Return a text, or a list of items, as messages of a chat."""
    messages, calls = list[Any](), list[Any]()
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else _as_list(given):
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "function_call":
            call = {"id": item.get("call_id"), "function": {key: item.get(key) for key in ("name", "arguments")}}
            calls = [*calls, call]
            said = messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"
            messages.append({"role": "assistant", **(messages.pop() if said else {}), "tool_calls": calls})
            continue
        calls = []
        if kind == "function_call_output":
            messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
        else:
            messages.append(item)
    return messages


class ResponseAsked(_Talk):
    """Body of `POST /v1/responses`."""

    input: Annotated[_Messages, BeforeValidator(_messages_of)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    n: Literal[1] | None = 1
    top_logprobs: Literal[0] | None = None
    text: _TextOptions | None = None
    said, form = "input", "text"
    most = property(lambda self: self.max_output_tokens)
    schema_of_text = property(lambda self: self.text and self.text.format and self.text.format.schema_of_text)

    @property
    def turns(self) -> list[dict[str, str]]:
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*first, *(one.for_template() for one in self.input)]
