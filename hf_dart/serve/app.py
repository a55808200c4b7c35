"""`build_app`: the routes of a server, its limits, and its errors, all as OpenAI's API has them."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from hf_dart.serve import answers
from hf_dart.serve.parameters import Asked, ChatAsked, CompletionAsked, Refusal, ResponseAsked
from hf_dart.serve.service import Service
from hf_dart.serve.writing import Texts

log = logging.getLogger("hf_dart.serve")


def build_app(service: Service, api_key: str | None = None, enable_cors: bool = False) -> FastAPI:
    """Make the app of a server, for pages of other origins too if `enable_cors`; /v1 asks for the `api_key`, if any."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="hf-dart serve", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, service=service, api_key=api_key)
    if enable_cors:
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        refusal = error if isinstance(error, Refusal) else Refusal(str(error.detail), status=error.status_code)
        request.state.note = refusal.detail
        return refusal.response()

    @app.exception_handler(RequestValidationError)
    async def misread(request: Request, error: RequestValidationError) -> Response:
        return await refused(request, _of_reading(error))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return _FAILED.response()

    @app.post("/v1/completions")
    async def completions(asked: CompletionAsked, request: Request) -> Response:
        return await _answer(service, answers.Completion, asked, request)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatAsked, request: Request) -> Response:
        return await _answer(service, answers.Chat, asked, request)

    @app.post("/v1/responses")
    async def responses(asked: ResponseAsked, request: Request) -> Response:
        return await _answer(service, answers.Response, asked, request)

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [await model(service.names[0])]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Any:
        service.check_name(name)
        return {"id": service.names[0], "object": "model", "created": 0, "owned_by": "hf-dart"}

    @app.get("/health")
    async def health() -> Any:
        return {"status": "ok", "running": service.batcher.running, "waiting": service.batcher.waiting}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/")
    async def page() -> Response:
        return FileResponse(Path(__file__).with_name("page.html"))

    return app


_BODY_SECONDS = 30  # in which the body of a request has to come
_READ_AT_ONCE = 32  # requests that may be here beside those whose texts are written or wait
_FAILED = Refusal("The server failed; its log says why.", status=500)


async def _answer(service: Service, kind: Any, asked: Asked, request: Request) -> Response:
    """Write what was asked for, whole or as a stream."""
    service.refuse_if_full()
    loop = asyncio.get_running_loop()
    texts = Texts(service, asked, *await loop.run_in_executor(service.reader, service.read, asked), request)
    streams = False
    try:
        await texts.begin()
        answer = kind(asked, texts, service.names[0], service.tokenizer)
        streams = bool(asked.stream)
        return _Stream(answer, texts, service.limits.timeout) if streams else JSONResponse(await answer.whole())
    except ClientDisconnect:
        return Response(status_code=499)
    finally:
        if not streams:
            texts.close()


class _Stream(StreamingResponse):
    """Answer as a stream of events, which ends late even if its client does not read it."""

    def __init__(self, answer: Any, texts: Texts, seconds: float) -> None:
        super().__init__(_events(answer), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._texts, self._seconds = texts, seconds

    async def __call__(self, *given: Any) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._seconds + 1):
                    await super().__call__(*given)
        finally:
            self._texts.close()


async def _events(answer: Any) -> AsyncIterator[str]:
    """Yield the events of an answer; an error is one, too, as the status has been sent."""
    try:
        async for one in answer.events():
            yield one
    except ClientDisconnect:
        return
    except Refusal as refusal:
        yield answer.failed(refusal)
    except Exception:
        log.exception("An answer failed.")
        yield answer.failed(_FAILED)


class Guard:
    """Checks of a request to /v1 before it is read: key, size and time; and its line in the log."""

    def __init__(self, app: Any, service: Service, api_key: str | None) -> None:
        self._app, self._service, self._key, self._inside = app, service, api_key, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        begun, status = perf_counter(), 500
        self._inside += 1

        async def noted(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            self._check(dict(scope["headers"]).get(b"authorization", b""))
            await self._app(scope, self._bounded(receive), noted)
        except Refusal as refusal:
            await refusal.response()(scope, receive, noted)
        finally:
            self._inside -= 1
            note = scope.get("state", {}).get("note", "")
            log.info("%s %s %d, %.3f s, %s", scope["method"], scope["path"], status, perf_counter() - begun, note)

    def _check(self, key: bytes) -> None:
        """Raise a `Refusal` for a wrong key, and for more requests than those that may be read while others wait."""
        if self._key is not None and not hmac.compare_digest(key, b"Bearer " + self._key.encode()):
            raise Refusal("The API key is missing or wrong; send it as Authorization: Bearer KEY.", status=401)
        if self._inside > self._service.room + _READ_AT_ONCE:
            raise Refusal("Too many requests are here; try again in a second.", status=429, **{"Retry-After": "1"})

    def _bounded(self, receive: Any) -> Any:
        """Return `receive` for a body that is neither too large nor too slow."""
        most, size, whole = self._service.limits.max_body, 0, False
        end = asyncio.get_running_loop().time() + _BODY_SECONDS

        async def bounded() -> Any:
            nonlocal size, whole
            try:
                async with asyncio.timeout_at(None if whole else end):
                    message = await receive()
            except TimeoutError:
                raise Refusal(f"The request took more than {_BODY_SECONDS} s; send it faster.", status=408) from None
            size, whole = size + len(message.get("body", b"")), not message.get("more_body", False)
            if size > most:
                raise Refusal(f"The request has more than {most} bytes; send less.", status=413)
            return message

        return bounded


def _of_reading(error: RequestValidationError) -> Refusal:
    """Return the first of what is wrong with a request as a refusal that names the parameter."""
    first = error.errors()[0]
    place, name = [str(part) for part in first["loc"][1:]], first.get("ctx", {}).get("name")
    if name:
        return Refusal(first["msg"], name)
    if not place or (first["type"] == "json_invalid" and len(place) == 1):
        return Refusal("The request is no object of JSON; send one in UTF-8, as application/json.")
    remark = first["msg"] if first["type"] == "refused" else f"is not as it should be: {first['msg']}"
    return Refusal(f"{'.'.join(place)} {remark}.", place[0])
