"""`make serve RUN=` (or `MODEL=`): a model behind an OpenAI-compatible API, on 127.0.0.1 unless `HOST=` says
otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sft_play.access import TOKEN_VARIABLE, App, Guard, address_of, is_loopback, own_url, serve_token
from sft_play.data.chat import template_sha256
from sft_play.errors import HardwareError, UserError
from sft_play.launch.environment import next_free_port
from sft_play.launch.run_folder import find_run
from sft_play.plan.plan import Plan
from sft_play.runs.checkpoints import label_of, plain_model, weights_folder
from sft_play.runs.prepared import common_system, needs_system
from sft_play.text import tell

if TYPE_CHECKING:
    from sft_play.config.call import Call
    from sft_play.serve.engine import Engine
    from sft_play.serve.replies import Completion

DEFAULT_PORT = 8000
SECONDS_TO_END = 5
"""After the first signal; an answer that is being made then is cut off."""
SECONDS_BETWEEN_LOOKS = 1.0
"""Whether a client that waits for a whole answer is still there."""
AT_ONCE = 8
"""Requests answered together where no plan says how many."""


def main(call: Call) -> int:
    """Serve until stopped. Find the port before the model is loaded."""
    plain = plain_model(call.options, "serve")
    if call.overrides:
        raise UserError(
            f"`make serve` cannot change {', '.join(f'`{o.key}`' for o in call.overrides)} of a trained run",
            hint="it takes RUN or MODEL, CHECKPOINT, HOST and PORT",
        )
    address = address_of(call.options.get("HOST"))
    token = serve_token(address)
    run = None if plain else find_run(call.options["RUN"])
    weights = weights_folder(run, call.options.get("CHECKPOINT")) if run else None
    asked = call.port("PORT") or DEFAULT_PORT
    port = next_free_port(asked, address, "PORT")
    if port != asked:
        tell(f"port {asked} is taken; using {port}")
    from sft_play.model import use

    with contextlib.redirect_stdout(sys.stderr):  # libraries print there
        if run and weights:
            name = name_for_clients(run.path.resolve().name, label_of(run, weights))
            tell(f"loading {name} ...")
            (model, tokenizer), at_once = use.load_for_use(run, weights), Plan.load(run.plan).eval_batch_size
            system = common_system(run)
        else:
            name = name_for_clients(Path(plain or "").resolve().name)
            config, folder = use.find_plain(call, plain or "")
            tell(f"loading {name} ...")
            (model, tokenizer), at_once, system = use.load_plain(config, folder), AT_ONCE, None
    template_sha256(tokenizer)  # in a request nothing would end a template that never does
    from sft_play.serve.engine import Engine

    engine = Engine(model, tokenizer, at_once=at_once)
    try:
        return _serve(engine, name, Place(address, port, token, system), as_json=call.json)
    finally:
        engine.stop(SECONDS_TO_END)


class Place(NamedTuple):
    """Where the server listens, and what a request must bear."""

    address: str
    port: int
    token: str | None
    system: str | None = None
    """The system turn of all training rows, which a request should have."""

    @property
    def url(self) -> str:
        """As a client on this machine calls it."""
        return f"{own_url(self.address, self.port)}/v1"


def name_for_clients(name: str, label: str = "model") -> str:
    """Return the model's name in the API, with the checkpoint's where one was asked for (`demo-step-000040`)."""
    name = re.sub(r"[^\w.=+-]", "-", name)
    return name if label == "model" else f"{name}-{label}"


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, which uvicorn passes on when it has ended; the last answer may not hold it up."""
    stopped: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        stopped.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(engine: Engine, name: str, place: Place, *, as_json: bool) -> int:
    """Answer requests until a signal; return 130 or 143."""

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            _announce(name, place, as_json=as_json)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if not self.should_exit:
                last = threading.Timer(2 * SECONDS_TO_END, os._exit, [128 + sig])
                last.daemon = True  # a computation that cannot be interrupted would keep the interpreter alive
                last.start()
            super().handle_exit(sig, frame)

    settings = uvicorn.Config(
        application(engine, name, place),
        host=place.address,
        port=place.port,
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=SECONDS_TO_END,
    )
    with _stop_on_signals() as stopped:
        try:
            Server(settings).run()
        except SystemExit:
            raise HardwareError(
                f"the server could not open port {place.port} of {place.address}", hint="choose another PORT="
            ) from None
    return 128 + stopped[0] if stopped else 1


def _announce(name: str, place: Place, *, as_json: bool) -> None:
    if not is_loopback(place.address):
        tell("note: what is sent is not encrypted: beyond a network that you trust put it behind TLS or `ssh -L`")
    if place.system is not None:
        tell(f"note: {needs_system(place.system)}: requests need it too")
    if as_json:
        facts = {"url": place.url, "model": name, "pid": os.getpid(), "token": place.token is not None}
        print(json.dumps(facts), flush=True)
        return
    first = [] if place.system is None else [{"role": "system", "content": place.system}]
    body = json.dumps({"model": name, "messages": [*first, {"role": "user", "content": "Hello"}]}, ensure_ascii=False)
    key = f' -H "Authorization: Bearer ${TOKEN_VARIABLE}"' if place.token else ""
    print(
        f"serving {name} at {place.url}  (Ctrl-C stops)\n"
        f"try: curl {place.url}/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}",
        flush=True,
    )


def application(engine: Engine, name: str, place: Place) -> App:
    """Return the ASGI application of one model, behind the access check."""
    from sft_play.serve.parameters import ENDPOINTS, Refused

    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "sft-play"}

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    async def model(request: Request) -> Response:
        if request.path_params["name"] == name:
            return JSONResponse(card)
        return _error(Refused(f"there is one model here: `{name}`", param="model", status=404, code="model_not_found"))

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def answer(request: Request) -> Response:
        try:
            body = json.loads(await request.body())
        except (ValueError, RecursionError):
            return _error(Refused("the request's body is not JSON"))
        try:
            return await _answer(engine, name, request, body)
        except Refused as refused:
            return _error(refused)

    async def refuse(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        text = str(error.detail) if isinstance(error, HTTPException) else f"{type(error).__name__}: {error}"
        if status in (404, 405):
            served = ", ".join(f"POST {path}" for path in ENDPOINTS)
            text = f"{request.method} {request.url.path} is not served here; there are {served} and GET /v1/models"
        return _error(Refused(text, status=status))

    routes = [
        *(Route(path, answer, methods=["POST"]) for path in ENDPOINTS),
        Route("/v1/models", models),
        Route("/v1/models/{name}", model),
        Route("/health", health),
    ]
    inner = Starlette(routes=routes, exception_handlers={HTTPException: refuse, Exception: refuse})
    return Guard(inner, token=place.token, address=place.address)


def _error(refused: Any) -> Response:
    return JSONResponse(refused.body, status_code=refused.status)


async def _answer(engine: Engine, name: str, request: Request, body: Any) -> Response:
    from sft_play.serve.parameters import Refused
    from sft_play.serve.replies import read_completion, reply

    loop, grown = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(grown.set)

    completion = read_completion(engine, request.url.path, body, name, notify)
    for answering in completion.answerings:
        engine.submit(answering)
    if completion.stream:
        return StreamingResponse(_stream(completion, grown), media_type="text/event-stream")
    try:
        while not all(answering.done for answering in completion.answerings):
            grown.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(grown.wait(), SECONDS_BETWEEN_LOOKS)
                continue
            if await request.is_disconnected():
                break
    finally:
        _cancel(completion)
    if error := next((answering.error for answering in completion.answerings if answering.error), None):
        raise Refused(error, status=503)
    return JSONResponse(reply(completion))


def _cancel(completion: Completion) -> None:
    for answering in completion.answerings:
        answering.cancelled = answering.cancelled or not answering.done


async def _stream(completion: Completion, grown: asyncio.Event) -> AsyncIterator[str]:
    """Yield server-sent events until all answers of a request are made."""
    from sft_play.serve.parameters import Refused
    from sft_play.serve.replies import Pieces, ResponseEvents, chunks, last_chunks, usage_chunk

    events = ResponseEvents(completion) if completion.path == "/v1/responses" else None
    pieces = [Pieces(completion, answering) for answering in completion.answerings]
    begun, ended = False, [False] * len(pieces)
    try:
        for event in events.begin() if events else ():
            yield _line(event, named=True)
        while not all(ended):
            await grown.wait()
            grown.clear()
            done = [answering.done for answering in completion.answerings]
            if error := next((answering.error for answering in completion.answerings if answering.error), None):
                yield _line(Refused(error, status=503).body)
                return
            for event in events.grown() if events else chunks(completion, pieces, begun):
                yield _line(event, named=events is not None)
            begun = True
            for index, is_done in enumerate(done):
                if is_done and not ended[index]:
                    ended[index] = True
                    for event in events.end() if events else last_chunks(completion, index):
                        yield _line(event, named=events is not None)
        if completion.usage:
            yield _line(usage_chunk(completion))
        if events is None:
            yield "data: [DONE]\n\n"
    finally:
        _cancel(completion)


def _line(event: Any, *, named: bool = False) -> str:
    kind = f"event: {event['type']}\n" if named else ""
    return f"{kind}data: {json.dumps(event, ensure_ascii=False)}\n\n"
