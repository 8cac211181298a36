"""A hub of one dataset on this machine, in so much of the hub's own protocol as the libraries use to read it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

COMMIT = "a" * 40


@contextmanager
def serve_dataset(name: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Serves `files` as the dataset `name` at the revisions `main` and `COMMIT`; yields the address for `HF_ENDPOINT`."""
    handler = type("Handler", (_Handler,), {"dataset": name, "files": files})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    dataset: str
    files: Mapping[str, bytes]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body).get("paths", [])
        self._json([self._entry(path) for path in paths if path in self.files or path in self._folders()])

    def _answer(self) -> None:
        path, _, query = self.path.partition("?")
        if "/resolve/" in path:
            self._file(path.split("/resolve/")[1].partition("/")[2])
        elif not path.startswith(f"/api/datasets/{self.dataset}"):
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in path:
            folder = path.split("/tree/")[1].partition("/")[2]
            if folder or "recursive=true" in query.lower():
                self._json([self._entry(file) for file in self.files if file.startswith(folder)])
            else:
                self._json([self._entry(file) for file in [*self.files, *self._folders()] if "/" not in file])
        elif "/revision/" in path and path.rsplit("/", 1)[1] not in ("main", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            facts = {"id": self.dataset, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "likes": 0}
            self._json({**facts, "siblings": [{"rfilename": file} for file in self.files]})

    def _folders(self) -> set[str]:
        return {file.rpartition("/")[0] for file in self.files} - {""}

    def _entry(self, path: str) -> dict[str, Any]:
        if path not in self.files:
            return {"type": "directory", "path": path, "oid": "0" * 40}
        return {"type": "file", "path": path, "size": len(self.files[path]), "oid": hashlib.sha1(self.files[path]).hexdigest()}

    def _file(self, path: str) -> None:
        if path not in self.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        content = self.files[path]
        headers = {"ETag": f'"{self._entry(path)["oid"]}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if wanted is None:
            self._send(200, content, headers)
            return
        first, _, last = wanted.split("=")[1].partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        end = int(first) + len(part) - 1
        self._send(206, part, {**headers, "Content-Range": f"bytes {first}-{end}/{len(content)}"})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
