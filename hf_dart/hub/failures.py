"""Errors of the Hub and its client, in one sentence that names the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import constants, errors, get_token

try:
    from huggingface_hub.utils import httpx
except ImportError:  # huggingface_hub 1
    import httpx  # type: ignore[no-redef]

_REMEDIES = {
    401: "log in with `hf auth login`, or pass a valid token=",
    403: "take a token that may write there",
    409: "push again",
    412: "it was changed meanwhile, push again",
}


@contextmanager
def hub_errors(
    repository: str, *, token: str | bool | None = None, revision: str | None = None, **others: Any
) -> Iterator[None]:
    """Errors of the Hub inside become an OSError with one sentence on the repository that is asked; others pass."""
    try:
        yield
    except (OSError, errors.EntryNotFoundError, httpx.TransportError) as error:
        sentence = _sentence(error, repository, token, revision)
        if sentence is None:
            raise
        raise OSError(sentence) from error


def _sentence(error: BaseException, repository: str, token: str | bool | None, revision: str | None) -> str | None:
    """Return the first error of the chain that we know, in words."""
    known: BaseException | None = error
    while known is not None:
        if isinstance(known, errors.GatedRepoError):
            return f"{repository!r} is gated; ask for access on {constants.ENDPOINT}/{repository}, then log in."
        if isinstance(known, errors.RepositoryNotFoundError | errors.LocalEntryNotFoundError) and "/" not in repository:
            return f"There is no folder {repository!r}, and an id of the Hub names its user; give USER/{repository}."
        if isinstance(known, errors.RepositoryNotFoundError):
            if isinstance(token, str) or (token is not False and get_token()):
                return f"The Hub shows this token no repository {repository!r}; check the name, or take another token."
            return (
                f"The Hub shows no repository {repository!r} without a token; check the name or, if it is private, "
                "log in with `hf auth login` or pass token=."
            )
        if isinstance(known, errors.RevisionNotFoundError):
            return f"{repository!r} has no revision {revision!r}; give one of its branches, tags or commits."
        if isinstance(known, errors.OfflineModeIsEnabled):
            return f"The Hub was not asked for {repository!r}, since HF_HUB_OFFLINE is set; unset it."
        if isinstance(known, errors.LocalEntryNotFoundError):
            return (
                f"The Hub cannot be reached and {repository!r} is not on this machine as a whole; go online "
                "(HF_HUB_OFFLINE=0, local_files_only=False) once."
            )
        if isinstance(known, errors.EntryNotFoundError):
            return f"{repository!r} lacks a file of a head; push what save_pretrained wrote once more."
        if isinstance(known, errors.HfHubHTTPError):
            status, said = known.response.status_code, " ".join((known.server_message or str(known)).split())
            return f"The Hub refused {repository!r} with {status} ({said}); {_REMEDIES.get(status, 'try again later')}."
        if isinstance(known, httpx.TransportError):
            return f"The Hub cannot be reached at {constants.ENDPOINT} ({known or type(known).__name__}); try again."
        known = known.__cause__
    return None
