"""Who may talk to a server of this project: addresses it may listen on, and the check before every request. No heavy package."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from types import NoneType
from typing import Any
from urllib.parse import urlsplit

from sft_play.errors import UserError

LOOPBACK = "127.0.0.1"
TOKEN_VARIABLE = "SFT_PLAY_SERVE_TOKEN"
LEAST_TOKEN = 16
"""Letters that a token must have: a shorter one is guessed."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def address_of(host: str | None) -> str:
    """Returns the IP address that `HOST=` names, 127.0.0.1 when it was not given. Raises `UserError` for a name or nonsense."""
    text = (host or LOOPBACK).strip()
    if text == "localhost":
        return LOOPBACK
    try:
        return str(ipaddress.ip_address(text.removeprefix("[").removesuffix("]")))
    except ValueError:
        hint = "HOST=0.0.0.0 is every network of this machine; without HOST it is 127.0.0.1"
        raise UserError(f"`HOST` is `{text}`; expected an IP address of this machine", hint=hint) from None


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address."""
    return ipaddress.ip_address(address).is_loopback


def serve_token(address: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the token that requests must bear; `None` on a loopback address when none is set.

    Raises `UserError` where an address that others can reach has none, or a weak one.
    """
    token = (os.environ if environ is None else environ).get(TOKEN_VARIABLE, "")
    if not token and is_loopback(address):
        return None
    if not token:
        raise UserError(
            f"`HOST` is `{address}`, which other machines can reach, and `{TOKEN_VARIABLE}` is not set",
            hint=f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32), which clients then send as their API key; or leave HOST away and use "
            f"`ssh -L`",
        )
    if len(token) < LEAST_TOKEN or not re.fullmatch(r"[\x21-\x7e]+", token):
        raise UserError(
            f"`{TOKEN_VARIABLE}` has {len(token)} letters; expected at least {LEAST_TOKEN}, without blanks and of ASCII",
            hint=f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32)",
        )
    return token


class Guard:
    """An ASGI application that asks for the token before another one, and refuses what a browser was talked into.

    Without a token (on a loopback address) a request must name this machine as its host, and must not come from another site's page:
    a page that anyone wrote can make a browser call 127.0.0.1.
    """

    def __init__(self, app: App, *, token: str | None, address: str) -> None:
        self.app = app
        self._digest = hashlib.sha256(token.encode()).digest() if token else None
        self._own = {"localhost", address, LOOPBACK, "::1"}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers 401 or 403."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refused = self._refusal([(bytes(name).lower(), bytes(value)) for name, value in scope.get("headers", ())])
        if refused is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(send, *refused)

    def _refusal(self, headers: list[tuple[bytes, bytes]]) -> tuple[int, str] | None:
        def named(wanted: bytes) -> list[bytes]:
            return [value for name, value in headers if name == wanted]

        if self._digest is not None:
            given = named(b"authorization")
            scheme, _, token = given[0].strip().partition(b" ") if len(given) == 1 else (b"", b"", b"")
            # Of digests, so that neither the time nor the length tells how much was right.
            same = hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._digest)
            return None if same and scheme.lower() == b"bearer" else (401, "the API key is missing or wrong")
        hosts = [_hostname("//" + value.decode("latin-1")) for value in named(b"host")]
        if len(hosts) != 1 or hosts[0] not in self._own:
            return 403, "the request names another host than this machine"
        origins = [_hostname(value.decode("latin-1")) for value in named(b"origin")]
        if any(origin not in self._own for origin in origins):
            return 403, "the request comes from a page of another site"
        return None


class Checked:
    """An ASGI application that answers 400 for requests that transformers' server would break on (500, without a word)."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Reads the body of a request that has JSON, and passes it on when it is one that can be answered."""
        if scope["type"] != "http" or scope.get("method") != "POST" or scope.get("path") not in CHECKED:
            await self.app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client has gone
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if (wrong := wrong_with(scope["path"], body)) is not None:
            await _answer(send, 400, wrong)
            return
        left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return left.pop() if left else await receive()

        await self.app(scope, again, send)


CHAT = "/v1/chat/completions"
CHECKED = frozenset({CHAT, "/v1/completions", "/v1/responses", "/load_model"})


def wrong_with(path: str, body: bytes) -> str | None:
    """Returns what is wrong with the body of a request, `None` where nothing is."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return "the body is not JSON"
    if not isinstance(asked, dict):
        return "the body is no JSON object"
    if not isinstance(asked.get("model", ""), (str, NoneType)):
        return "`model` is no text"
    if path != CHAT:
        return None
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        return "`messages` must be a list with at least one message"
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"`messages[{index}]` must be an object with a `role`"
        if not isinstance(message.get("content"), (str, list, NoneType)):
            return f"`messages[{index}].content` must be text, or a list of parts"
    return None


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


async def _answer(send: Send, status: int, text: str) -> None:
    """Sends an error as OpenAI's API words it."""
    body = json.dumps({"error": {"message": text, "type": "invalid_request_error", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
