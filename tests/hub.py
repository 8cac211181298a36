"""Hubs on this machine with the part of the protocol that libraries use: one serves a dataset or model, one receives a
model.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "a" * 40
TOKEN = "hf_a_token_that_may_write"


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        raise NotImplementedError

    def refuse(self, status: int, code: str, **headers: str) -> None:
        self.send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code, **headers})

    def json(self, value: Any, status: int = 200) -> None:
        self.send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serve(handler: type[HubHandler], **facts: Any) -> Iterator[str]:
    """Serve with such a handler, to which `facts` are attributes; yield the address for `HF_ENDPOINT`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), facts))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class FilesHandler(HubHandler):
    """Serves `files` as the dataset or model `name` at the revisions `main` and `COMMIT`."""

    kind = "datasets"
    name: str
    files: Mapping[str, bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.json(
            [self._entry(path) for path in json.loads(body)["paths"] if path in self.files or path in self._folders()]
        )

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if "/resolve/" in path:
            self._file(path.split("/resolve/")[1].partition("/")[2])
        elif not path.startswith(f"/api/{self.kind}/{self.name}"):
            self.refuse(404, "RepoNotFound")
        elif "/tree/" in path:
            folder = path.split("/tree/")[1].partition("/")[2]
            if folder or "recursive=true" in query.lower():
                self.json([self._entry(file) for file in self.files if file.startswith(folder)])
            else:
                self.json([self._entry(file) for file in [*self.files, *self._folders()] if "/" not in file])
        elif "/revision/" in path and path.rsplit("/", 1)[1] not in ("main", COMMIT):
            self.refuse(404, "RevisionNotFound")
        else:
            facts = {"id": self.name, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "likes": 0}
            self.json({**facts, "siblings": [{"rfilename": file} for file in self.files]})

    def _folders(self) -> set[str]:
        return {file.rpartition("/")[0] for file in self.files} - {""}

    def _entry(self, path: str) -> dict[str, Any]:
        if path not in self.files:
            return {"type": "directory", "path": path, "oid": "0" * 40}
        return {
            "type": "file",
            "path": path,
            "size": len(self.files[path]),
            "oid": hashlib.sha1(self.files[path]).hexdigest(),
        }

    def _file(self, path: str) -> None:
        if path not in self.files:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        content = self.files[path]
        headers = {"ETag": f'"{self._entry(path)["oid"]}"', "X-Repo-Commit": COMMIT}
        self.send(200, content, headers)


@dataclass
class Repository:
    """The hub's content and its requests."""

    url: str = ""
    name: str = ""
    private: bool | None = None
    files: dict[str, bytes] = field(default_factory=dict)


@contextmanager
def serve_repository() -> Iterator[Repository]:
    """Yield an empty hub."""
    repository = Repository()
    with serve(RepositoryHandler, repository=repository) as repository.url:
        yield repository


class RepositoryHandler(HubHandler):
    repository: Repository

    def do_GET(self) -> None:
        self.refuse(404, "RepoNotFound")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/validate-yaml":
            self.json({"errors": [], "warnings": []})
        elif self._token() != TOKEN:
            self.json({"error": "Forbidden: you need write access"}, 403)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            self.repository.name = f"{asked.get('organization') or 'me'}/{asked['name'].rpartition('/')[2]}"
            self.repository.private = asked.get("private", asked.get("visibility") == "private")
            self.json({"url": f"{self.repository.url}/{self.repository.name}", "name": self.repository.name, "id": "1"})
        elif "/preupload/" in self.path:
            asked = [file["path"] for file in json.loads(body)["files"]]
            self.json({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in asked]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    self.repository.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            where = f"{self.repository.url}/{self.repository.name}/commit/{'b' * 40}"
            self.json({"commitUrl": where, "commitOid": "b" * 40, "hookOutput": "", "success": True})
        else:
            self.json({"error": self.path}, 404)

    def _token(self) -> str:
        return str(self.headers.get("Authorization", "")).removeprefix("Bearer ")
