"""A small Hub on this machine, for the real `huggingface_hub` client: repositories, commits, LFS, permissions.

What the client sends is checked as the Hub checks it: tokens, front matter, hashes of what is uploaded, parents of
commits. A request that is not known is answered with 501, so that no test passes without its endpoint.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import transformers.utils.hub
import yaml
from huggingface_hub import close_session, constants

LFS_SUFFIXES = (".safetensors", ".bin")
RELATIONS = ("adapter", "finetune", "merge", "quantized")
REPOSITORY_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")


@dataclass
class Repository:
    """Commits by id, each with all of its files; branches and pull requests by name."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    def commit(self, ref: str, parent: str | None, files: dict[str, bytes], message: str) -> str:
        tree = "".join(f"{path}:{git_hash(files[path])}\n" for path in sorted(files))
        commit = hashlib.sha1(f"{parent}\n{message}\n{tree}".encode()).hexdigest()
        self.commits[commit], self.refs[ref], self.messages[commit] = files, commit, message
        return commit

    def resolve(self, revision: str) -> str:
        commit = self.refs.get(revision, revision)
        if commit not in self.commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.resolve(revision)]


class Refusal(Exception):
    """What a request is answered with if it fails: the Hub's error code and message go into the headers."""

    def __init__(self, status: int, code: str = "", message: str = "", body: Any = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.body = status, {"error": message} if body is None else body
        self.headers = {"X-Error-Message": message, "X-Error-Code": code, **headers}


class Hub(ThreadingHTTPServer):
    """The server and what it stores.

    Attributes:
        tokens: user of each token.
        requests: what was asked, such as "GET /api/models/alice/head".
        failing: requests that are answered with 500, by their beginning.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.tokens = {"hf_alice": "alice", "hf_bob": "bob"}
        self.requests: list[str] = []
        self.failing: set[str] = set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.cdn = f"http://localhost:{self.server_address[1]}"  # another host to the client, as the Hub's is


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: Any) -> None:
        """Silence."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = f"{self.command} {unquote(url.path)}"
        self.server.requests.append(asked)
        try:
            if any(asked.startswith(start) for start in self.server.failing):
                raise Refusal(500, message="out of order")
            for method, pattern, name in ROUTES:
                found = re.fullmatch(pattern, url.path)
                if found and self.command in method:
                    parts = {key: unquote(value) for key, value in found.groupdict().items() if value is not None}
                    return getattr(self, name)(**parts)
            raise Refusal(501, message=f"no such endpoint: {asked}")
        except Refusal as refusal:
            self._send(refusal.body, refusal.status, refusal.headers)

    do_GET = do_POST = do_PUT = do_HEAD = _answer

    def _send(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        sent = {"Content-Type": "application/json", **(headers or {}), "Content-Length": str(len(content))}
        for name, value in sent.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    # ---- who may do what ----------------------------------------------------------------------------

    @property
    def user(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.server.tokens:
            raise Refusal(401, message="Invalid credentials in Authorization header")
        return self.server.tokens.get(token)

    def _readable(self, repo: str) -> Repository:
        found = self.server.repositories.get(repo)
        if found is None or (found.private and self.user != repo.partition("/")[0]):
            # Nobody learns whether a private repository is there.
            raise Refusal(401 if self.user is None else 404, "RepoNotFound", "Repository not found")
        return found

    def _writable(self, repo: str) -> Repository:
        found = self._readable(repo)
        if self.user != repo.partition("/")[0]:
            raise Refusal(403 if self.user else 401, message=f"You may not write to {repo}")
        return found

    # ---- endpoints ----------------------------------------------------------------------------------

    def create(self) -> None:
        asked = json.loads(self.content)
        if self.user is None:
            raise Refusal(401, message="Invalid username or password.")
        owner = asked.get("organization") or self.user
        repo = f"{owner}/{asked['name']}"
        if owner != self.user:
            raise Refusal(403, message=f"You have no rights to create a model under {owner}")
        if repo in self.server.repositories:
            raise Refusal(409, message="You already created this model repo", body={"url": f"{self.server.url}/{repo}"})
        private = asked.get("private") or asked.get("visibility") == "private"
        new = self.server.repositories[repo] = Repository(private=bool(private))
        new.commit("main", None, {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        self._send({"url": f"{self.server.url}/{repo}", "name": repo, "id": repo})

    def validate(self) -> None:
        found = re.match(r"---\r?\n(.*?)\r?\n---", json.loads(self.content)["content"], re.DOTALL)
        errors = card_errors(found.group(1) if found else "")
        body = {"errors": [{"message": error} for error in errors], "warnings": []}
        self._send(body, 400 if errors else 200)

    def branch(self, repo: str, branch: str) -> None:
        found = self._writable(repo)
        if branch in found.refs:
            raise Refusal(409, message=f"Reference already exists: {branch}")
        found.refs[branch] = found.resolve(json.loads(self.content or b"{}").get("startingPoint", "main"))
        self._send({})

    def info(self, repo: str, revision: str = "main") -> None:
        found = self._readable(repo)
        commit = found.resolve(revision)
        files = [{"rfilename": path} for path in found.commits[commit]]
        self._send({"id": repo, "modelId": repo, "sha": commit, "private": found.private, "siblings": files})

    def tree(self, repo: str, revision: str, folder: str = "") -> None:
        files = self._readable(repo).files(revision)
        found = [path for path in files if path.startswith(folder and f"{folder}/")]
        self._send([self._entry(path, files[path]) for path in found])

    def _entry(self, path: str, content: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
        if path.endswith(LFS_SUFFIXES):
            entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 130}
        return entry

    def preupload(self, repo: str, revision: str) -> None:
        there = self._writable(repo).files(revision)
        answer = []
        for file in json.loads(self.content)["files"]:
            lfs, path = file["path"].endswith(LFS_SUFFIXES), file["path"]
            oid = (sha256 if lfs else git_hash)(there[path]) if path in there else None
            mode = "lfs" if lfs else "regular"
            answer.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._send({"files": answer})

    def lfs_batch(self, repo: str) -> None:
        self._writable(repo)
        answer: list[dict[str, Any]] = []
        for one in json.loads(self.content)["objects"]:
            answer.append({"oid": one["oid"], "size": one["size"]})
            if one["oid"] not in self.server.objects:
                store = {"href": f"{self.server.cdn}/lfs/{one['oid']}", "header": {}}
                answer[-1]["actions"] = {"upload": store, "verify": {"href": store["href"], "header": {}}}
        self._send({"transfer": "basic", "objects": answer})

    def lfs_object(self, oid: str) -> None:
        if self.command == "PUT":
            if sha256(self.content) != oid:
                raise Refusal(400, message="the content has another hash")
            self.server.objects[oid] = self.content
        elif oid not in self.server.objects:
            raise Refusal(404, message="no such object")
        self._send(self.server.objects[oid] if self.command in ("GET", "HEAD") else {}, headers={"ETag": f'"{oid}"'})

    def commit(self, repo: str, revision: str) -> None:
        found = self._writable(repo)
        lines = [json.loads(line) for line in self.content.splitlines()]
        header, *operations = [(line["key"], line["value"]) for line in lines]
        parent = found.resolve(revision)
        if header[1].get("parentCommit") not in (None, parent):
            raise Refusal(412, message="A commit has happened since. Please refresh and try again.")
        files = dict(found.commits[parent])
        for key, value in operations:
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.server.objects:
                    raise Refusal(400, message=f"{value['path']} was not uploaded")
                files[value["path"]] = self.server.objects[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                raise Refusal(400, message=f"unknown operation {key}")
        proposed = "create_pr" in self.query
        ref = f"refs/pr/{1 + sum(name.startswith('refs/pr/') for name in found.refs)}" if proposed else revision
        commit = found.commit(ref, parent, files, header[1]["summary"])
        answer = {"success": True, "commitOid": commit, "commitUrl": f"{self.server.url}/{repo}/commit/{commit}"}
        if proposed:
            answer["pullRequestUrl"] = f"{self.server.url}/{repo}/discussions/{ref.rpartition('/')[2]}"
        self._send(answer)

    def resolve(self, repo: str, revision: str, path: str) -> None:
        found = self._readable(repo)
        if found.gated:
            raise Refusal(403 if self.user else 401, "GatedRepo", f"Access to model {repo} is restricted")
        commit = found.resolve(revision)
        headers = {"X-Repo-Commit": commit}
        content = found.commits[commit].get(path)
        if content is None:
            raise Refusal(404, "EntryNotFound", "Entry not found", **headers)
        if not path.endswith(LFS_SUFFIXES):
            return self._send(content, headers={**headers, "ETag": f'"{git_hash(content)}"'})
        oid = sha256(content)
        headers |= {"X-Linked-ETag": f'"{oid}"', "X-Linked-Size": str(len(content))}
        return self._send(b"", 302, {**headers, "Location": f"{self.server.cdn}/lfs/{oid}"})


_REPO = r"(?P<repo>[^/]+/[^/]+?)"
ROUTES = [
    (("POST",), "/api/repos/create", "create"),
    (("POST",), "/api/validate-yaml", "validate"),
    (("POST",), f"/api/models/{_REPO}/branch/(?P<branch>[^/]+)", "branch"),
    (("GET",), f"/api/models/{_REPO}(/revision/(?P<revision>[^/]+))?", "info"),
    (("GET",), f"/api/models/{_REPO}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", "tree"),
    (("POST",), f"/api/models/{_REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
    (("POST",), f"/{_REPO}\\.git/info/lfs/objects/batch", "lfs_batch"),
    (("GET", "HEAD", "PUT", "POST"), "/lfs/(?P<oid>[0-9a-f]{64})", "lfs_object"),
    (("POST",), f"/api/models/{_REPO}/commit/(?P<revision>[^/]+)", "commit"),
    (("GET", "HEAD"), f"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
]


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def card_errors(front_matter: str) -> list[str]:
    """What the Hub would refuse in a model card's metadata."""
    try:
        known = yaml.safe_load(front_matter) or {}
        assert isinstance(known, dict), "metadata must be an object"
    except (yaml.YAMLError, AssertionError) as error:
        return [str(error)]

    def listed(name: str) -> Any:
        given = known.get(name, [])
        return [given] if isinstance(given, str) else given

    ids = [one for name in ("base_model", "datasets") for one in listed(name) if not REPOSITORY_ID.fullmatch(one)]
    errors = [f'"{one}" is not valid. Use an id from https://hf.co.' for one in ids]
    if known.get("base_model_relation", "adapter") not in RELATIONS:
        errors.append(f'"base_model_relation" must be one of {RELATIONS}')
    for name in ("tags", "language", "datasets"):
        if not isinstance(listed(name), list) or not all(isinstance(one, str) for one in listed(name)):
            errors.append(f'"{name}" must be a list of strings')
    for name in ("license", "library_name", "pipeline_tag"):
        if not isinstance(known.get(name, ""), str):
            errors.append(f'"{name}" must be a string')
    return errors


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A running Hub that this process' client takes for the real one; nobody is logged in, nothing is cached."""
    with Hub() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        found: dict[str, Any] = {
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "ENDPOINT": server.url, "HF_URL_HOSTS": frozenset({"127.0.0.1"}), "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_TOKEN_PATH": str(tmp_path / "token"),
        }  # fmt: skip
        for name, value in found.items():
            monkeypatch.setattr(constants, name, value, raising=False)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "127.0.0.1,localhost")
        close_session()  # the next one takes the environment above
        yield server
        close_session()
        server.shutdown()
        thread.join()


@pytest.fixture
def alice(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> Hub:
    """A Hub where alice is logged in."""
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    return hub


def card_of(hub: Hub, repository: str = "alice/head", revision: str = "main") -> str:
    """The card of a repository, whose front matter is right."""
    card = hub.repositories[repository].files(revision)["README.md"].decode()
    if card.startswith("---\n"):
        assert card_errors(card.split("---\n")[1]) == []
    return card
