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
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sft_play.access import TOKEN_VARIABLE, App, Guard, Place, place_of
from sft_play.data.chat import template_sha256
from sft_play.errors import HardwareError
from sft_play.files import typed_path
from sft_play.launch.run_folder import find_run
from sft_play.plan.plan import Plan
from sft_play.runs.adapters import run_around
from sft_play.runs.checkpoints import label_of, plain_model, weights_folder
from sft_play.runs.prepared import common_system, needs_system
from sft_play.serve.parameters import ENDPOINTS, Refused
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
    place = place_of(call, DEFAULT_PORT)
    run = None if plain else find_run(call.options["RUN"])
    weights = weights_folder(run, call.options.get("CHECKPOINT")) if run else None
    from sft_play.model import use

    with contextlib.redirect_stdout(sys.stderr):  # libraries print there
        if run and weights:
            label = label_of(run, weights)
            name = name_for_clients(run.path.resolve().name, label if "CHECKPOINT" in call.options else "model")
            tell(f"loading {label} of the run {run.name} ...")
            (model, tokenizer), at_once = use.load_for_use(run, weights), Plan.load(run.plan).eval_batch_size
            system = common_system(run)
        else:
            name = name_for_clients(Path(plain or "").resolve().name)
            config, folder = use.find_plain(call, plain or "")
            tell(f"loading {name} ...")
            (model, tokenizer), at_once = use.load_plain(config, folder), AT_ONCE
            origin = run_around(typed_path(plain or ""))
            system = common_system(origin) if origin else None
    template_sha256(tokenizer)  # in a request nothing would end a template that never does
    from sft_play.serve.engine import Engine

    engine = Engine(model, tokenizer, at_once=at_once)
    try:
        return _serve(engine, name, place, system, as_json=call.json)
    finally:
        engine.stop(SECONDS_TO_END)


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


def _serve(engine: Engine, name: str, place: Place, system: str | None, *, as_json: bool) -> int:
    """Answer requests until a signal; return 130 or 143."""

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            _announce(name, place, system, as_json=as_json)

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


def _announce(name: str, place: Place, system: str | None, *, as_json: bool) -> None:
    """Print where the model is served; `system` is the system turn of all training rows."""
    url = f"{place.url}/v1"
    if system is not None:
        tell(f"note: {needs_system(system)}: requests need it too")
    if as_json:
        facts = {"url": url, "model": name, "pid": os.getpid(), "token": place.token is not None}
        print(json.dumps(facts), flush=True)
        return
    first = [] if system is None else [{"role": "system", "content": system}]
    body = json.dumps({"model": name, "messages": [*first, {"role": "user", "content": "Hello"}]}, ensure_ascii=False)
    key = f' -H "Authorization: Bearer ${TOKEN_VARIABLE}"' if place.token else ""
    print(
        f"serving {name} at {url}  (Ctrl-C stops)\n"
        f"try: curl {url}/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}",
        flush=True,
    )


def application(engine: Engine, name: str, place: Place) -> App:
    """Return the ASGI application of one model, behind the access check."""
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


def _error(refused: Refused) -> Response:
    return JSONResponse(refused.body, status_code=refused.status)


async def _answer(engine: Engine, name: str, request: Request, body: Any) -> Response:
    from sft_play.serve.replies import read_completion, reply

    loop, grown = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(grown.set)

    completion = read_completion(engine, request.url.path, body, name, notify)
    for answering in completion.answerings:
        engine.waiting.put(answering)
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
    if error := _error_of(completion):
        raise error
    return JSONResponse(reply(completion))


def _cancel(completion: Completion) -> None:
    for answering in completion.answerings:
        answering.cancelled |= not answering.done


async def _stream(completion: Completion, grown: asyncio.Event) -> AsyncIterator[str]:
    """Yield server-sent events until all answers of a request are made."""
    from sft_play.serve.replies import CompletionEvents, ResponseEvents

    events = ResponseEvents(completion) if completion.path == "/v1/responses" else CompletionEvents(completion)
    ended = [False] * len(completion.answerings)
    try:
        for event in events.begin():
            yield _line(event)
        while not all(ended):
            await grown.wait()
            grown.clear()
            done = [answering.done for answering in completion.answerings]
            if error := _error_of(completion):
                yield _line(error.body)
                return
            for event in events.grown():
                yield _line(event)
            for index, is_done in enumerate(done):
                for event in events.end(index) if is_done and not ended[index] else ():
                    yield _line(event)
            ended = done
        if isinstance(events, CompletionEvents):
            if completion.usage:
                yield _line(events.usage())
            yield "data: [DONE]\n\n"
    finally:
        _cancel(completion)


def _error_of(completion: Completion) -> Refused | None:
    return next((Refused(answering.error, status=503) for answering in completion.answerings if answering.error), None)


def _line(event: Any) -> str:
    kind = f"event: {event['type']}\n" if "type" in event else ""
    return f"{kind}data: {json.dumps(event, ensure_ascii=False)}\n\n"
