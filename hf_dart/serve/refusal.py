"""`Refusal`: an error that is sent as OpenAI's error object."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(HTTPException):
    """A request that is not answered: a sentence, the parameter that it is about, HTTP's status, and OpenAI's code."""

    def __init__(self, message: str, param: str = "", status: int = 400, code: str = "", **headers: str) -> None:
        super().__init__(status, message, headers)
        kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.error = {"message": message, "type": kind, "param": param or None, "code": code or None}

    def response(self) -> JSONResponse:
        return JSONResponse({"error": self.error}, self.status_code, self.headers)
