"""Access to this project's servers: the addresses they may listen on, and the check of every request."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from sft_play.config.call import Call
from sft_play.errors import UserError
from sft_play.launch.environment import next_free_port
from sft_play.text import tell

LOOPBACK = "127.0.0.1"
TOKEN_VARIABLE = "SFT_PLAY_SERVE_TOKEN"
LEAST_TOKEN = 16
"""Least letters of a token; a shorter one could be guessed."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def address_of(host: str | None) -> str:
    """Return the IP address in `HOST=`, or 127.0.0.1 without it. Raise `UserError` for anything but an IP address."""
    text = (host or LOOPBACK).strip()
    if text == "localhost":
        return LOOPBACK
    try:
        return str(ipaddress.ip_address(text.removeprefix("[").removesuffix("]")))
    except ValueError:
        hint = "HOST=0.0.0.0 is every network of this machine; without HOST it is 127.0.0.1"
        raise UserError(f"`HOST` is `{text}`; expected an IP address of this machine", hint=hint) from None


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address."""
    return ipaddress.ip_address(address).is_loopback


def own_url(address: str, port: int) -> str:
    """Return the host with which a client on this machine reaches a server that listens at `address`."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(address, address)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve_token(address: str) -> str | None:
    """Return the token that requests must have; `None` on a loopback address without one. Raise `UserError` if an
    address that others can reach has no token or a weak one.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and is_loopback(address):
        return None
    if not token:
        raise UserError(
            f"`HOST` is `{address}`, which other machines can reach, and `{TOKEN_VARIABLE}` is not set",
            hint=(
                f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32), which clients then send as their API key; or omit"
                " HOST and use `ssh -L`"
            ),
        )
    if len(token) < LEAST_TOKEN or not re.fullmatch(r"[\x21-\x7e]+", token):
        raise UserError(
            f"`{TOKEN_VARIABLE}` has {len(token)} characters; expected at least {LEAST_TOKEN} ASCII characters"
            " without spaces",
            hint=f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32)",
        )
    return token


class Place(NamedTuple):
    """Where a server listens, and the token that a request must have."""

    address: str
    port: int
    token: str | None

    @property
    def url(self) -> str:
        """As a client on this machine calls it."""
        return own_url(self.address, self.port)


def place_of(call: Call, default_port: int) -> Place:
    """Return the place that `HOST` and `PORT` name, or one with the next free port, and note what may surprise."""
    address, typed = address_of(call.options.get("HOST")), call.port("PORT") or default_port
    token, port = serve_token(address), next_free_port(typed, address, "PORT")
    if port != typed:
        tell(f"port {typed} is taken; using {port}")
    if not is_loopback(address):
        tell("note: nothing is encrypted; outside a network that you trust, use TLS or `ssh -L`")
    return Place(address, port, token)


class Guard:
    """An ASGI application in front of another one that requires the token, or refuses cross-site requests.

    Without a token (on a loopback address) a request must name this machine as its host and must not come from another
    site's page, since any page can make a browser call 127.0.0.1.
    """

    def __init__(self, app: App, *, token: str | None, address: str, as_password: bool = False) -> None:
        """Wrap `app`; with `as_password` a browser may send the token as a password."""
        self.app, self._as_password = app, as_password
        self._digest = hashlib.sha256(token.encode()).digest() if token else None
        self._own = {"localhost", address, LOOPBACK, "::1"}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401 or 403."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refused = self._refusal([(bytes(name).lower(), bytes(value)) for name, value in scope.get("headers", ())])
        if refused is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(send, *refused, challenge=b'Basic realm="SFT-Play"' if self._as_password else b"Bearer")

    def _refusal(self, headers: list[tuple[bytes, bytes]]) -> tuple[int, str] | None:
        def named(key: bytes) -> list[bytes]:
            return [value for name, value in headers if name == key]

        if self._digest is not None:
            credentials = named(b"authorization")
            scheme, _, token = credentials[0].strip().partition(b" ") if len(credentials) == 1 else (b"", b"", b"")
            if self._as_password and scheme.lower() == b"basic":
                scheme, token = b"bearer", _password(token)
            # Digests are compared, so that neither time nor length reveals how much was right.
            same = hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._digest)
            return None if same and scheme.lower() == b"bearer" else (401, "the API key is missing or wrong")
        hosts = [_hostname("//" + value.decode("latin-1")) for value in named(b"host")]
        if len(hosts) != 1 or hosts[0] not in self._own:
            return 403, "the request names another host than this machine"
        origins = [_hostname(value.decode("latin-1")) for value in named(b"origin")]
        if any(origin not in self._own for origin in origins):
            return 403, "the request comes from a page of another site"
        return None


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _password(encoded: bytes) -> bytes:
    """Return the password of `Authorization: Basic ...`, or nothing."""
    try:
        return base64.b64decode(encoded.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


async def _answer(send: Send, status: int, text: str, *, challenge: bytes) -> None:
    """Send an error in the format of OpenAI's API."""
    body = json.dumps({"error": {"message": text, "type": "invalid_request_error", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", challenge))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
