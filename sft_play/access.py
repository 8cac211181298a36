"""Who may talk to a server of this project: addresses it may listen on, and the check before every request. No heavy package."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
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


def own_url(address: str, port: int) -> str:
    """Returns how a client on this machine calls a server that listens at `address`."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(address, address)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


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
            hint=f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32), which clients then send as their API key; or omit HOST and use "
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
    """An ASGI application that passes on what one model can answer, and nothing else of what transformers' server takes.

    That server also unloads models, replaces the chat template, and reads files and addresses that a request names.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Reads the body of a request, at most `MOST_BODY` bytes, and passes it on when it is one that can be answered."""
        if scope["type"] != "http" or scope.get("path") in OPEN:
            await self.app(scope, receive, send)
            return
        if scope.get("path") not in KEYS:
            await _answer(send, 404, f"there is only {', '.join(sorted(OPEN | KEYS.keys()))}")
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client has gone
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > MOST_BODY:
                await _answer(send, 413, f"the body has more than {MOST_BODY:,} bytes")
                return
        if scope.get("method") == "POST" and (wrong := wrong_with(scope["path"], body)) is not None:
            await _answer(send, 400, wrong)
            return
        left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return left.pop() if left else await receive()

        await self.app(scope, again, send)


CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
OPEN = frozenset({"/v1/models", "/health"})
SAMPLING = {"model", "stream", "temperature", "top_p", "seed"}
KEYS: Mapping[str, frozenset[str]] = {
    CHAT: frozenset(
        SAMPLING
        | {"messages", "max_tokens", "max_completion_tokens", "stop", "frequency_penalty", "tools", "chat_template_kwargs"}
    ),
    "/v1/completions": frozenset(SAMPLING | {"prompt", "max_tokens", "stop", "frequency_penalty"}),
    RESPONSES: frozenset(SAMPLING | {"input", "instructions", "max_output_tokens", "tools"}),
    "/load_model": frozenset({"model"}),
}
"""What each page takes; not `generation_config`, which could ask for anything."""
TEMPLATE_KEYS = frozenset({"enable_thinking", "thinking"})
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
"""Other parts name a picture or a sound by an address or a file, which the server would open."""
MOST_BODY = 2**20
MOST_NEW_TOKENS = 32_768


def wrong_with(path: str, body: bytes) -> str | None:
    """Return what a request asks for that is not given, `None` for an ordinary one."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return "the body is not JSON"
    if not isinstance(asked, dict):
        return "the body is not a JSON object"
    if unknown := sorted(asked.keys() - KEYS[path]):
        return f"`{unknown[0][:80]}` is not taken here; there are {', '.join(sorted(KEYS[path]))}"
    for key in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        count = asked.get(key, 1)
        if count is not None and (not isinstance(count, int) or not 1 <= count <= MOST_NEW_TOKENS):
            return f"`{key}` must be 1 to {MOST_NEW_TOKENS}"
    settings = asked.get("chat_template_kwargs", {})
    if not isinstance(settings, dict) or settings.keys() - TEMPLATE_KEYS:
        return f"`chat_template_kwargs` takes {', '.join(sorted(TEMPLATE_KEYS))}"
    key = "input" if path == RESPONSES else "messages"
    for index, message in enumerate(asked[key]) if isinstance(asked.get(key), list) else ():
        content = message.get("content") if isinstance(message, dict) else message
        parts = content if isinstance(content, list) else [content]
        if not all(
            part is None or isinstance(part, str) or (isinstance(part, dict) and part.get("type") in TEXT_PARTS) for part in parts
        ):
            return f"`{key}[{index}].content` must be text, or a list of parts of text"
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
