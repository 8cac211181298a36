"""`make ui`: show all runs live in a browser.

It reads the runs' files, writes nothing, and listens on 127.0.0.1 unless `HOST=` names another address.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sft_play.access import App, Guard, place_of
from sft_play.config.call import Call
from sft_play.config.metrics import LABELS
from sft_play.errors import UserError
from sft_play.evaluation.compare import ROWS, compare, read_sides
from sft_play.files import finite
from sft_play.launch.runs import UNREADABLE, list_run, reason
from sft_play.report.page import PAGE_POLICY, page_files, page_html, record_of
from sft_play.runs.folder import RunFolder, runs_folder
from sft_play.runs.gate import all_runs, check_run

DEFAULT_PORT = 8600
SECONDS_BETWEEN_LOOKS = 1.0
MOST_COMPARED = 8


def main(call: Call) -> int:
    """Serve the page until Ctrl-C."""
    import uvicorn

    place = place_of(call, DEFAULT_PORT)
    url = f"{place.url}/"
    if call.json:
        print(json.dumps({"url": url, "runs": str(runs_folder()), "token": place.token is not None}), flush=True)
    else:
        password = "the token is the password; " if place.token else ""
        print(f"all runs of `{runs_folder()}` at {url}  ({password}Ctrl-C stops)", flush=True)
    uvicorn.Server(
        uvicorn.Config(
            application(place.token, place.address),
            host=place.address,
            port=place.port,
            log_level="error",
            timeout_graceful_shutdown=1,
        )
    ).run()
    return 0


def application(token: str | None, address: str) -> App:
    """Return the ASGI application: pages and JSON, with the same access check as `make serve`."""
    routes = [
        Route("/", _page),
        Route("/page/{name}", _file),
        Route("/api/runs", _runs),
        Route("/api/run/{name}", _run),
        Route("/api/compare", _compare),
        Route("/api/changes", _changes),
    ]
    return Guard(Starlette(routes=routes), token=token, address=address, as_password=True)


def _json(value: Any) -> Response:
    return Response(
        json.dumps(finite(value), default=str), media_type="application/json", headers={"cache-control": "no-store"}
    )


async def _page(_: Request) -> Response:
    return Response(
        page_html(None),
        media_type="text/html",
        headers={"content-security-policy": PAGE_POLICY, "x-content-type-options": "nosniff"},
    )


async def _file(request: Request) -> Response:
    text = page_files().get(request.path_params["name"])
    if text is None:
        return Response(status_code=404)
    kind = "text/css" if request.path_params["name"].endswith(".css") else "text/javascript"
    return Response(text, media_type=kind, headers={"x-content-type-options": "nosniff"})


async def _runs(_: Request) -> Response:
    return _json(await asyncio.to_thread(lambda: [list_run(run).cells() for run in all_runs()]))


def _named(name: str) -> RunFolder | None:
    """Return a run by its name in the list, so that a request cannot name a path."""
    return next((run for run in all_runs() if run.name == name), None)


async def _run(request: Request) -> Response:
    run = await asyncio.to_thread(_named, request.path_params["name"])
    if run is None:
        return JSONResponse({"error": "there is no such run"}, status_code=404)
    return await asyncio.to_thread(_readable, lambda: record_of(check_run(run)))


async def _compare(request: Request) -> Response:
    names = request.query_params.get("runs", "").split(",")[:MOST_COMPARED]
    runs = await asyncio.to_thread(lambda: [_named(name) for name in names])
    if len(names) < 2 or None in runs:
        return JSONResponse({"error": "there is no such run"}, status_code=404)
    return await asyncio.to_thread(_readable, lambda: _over_each_other([check_run(run) for run in runs if run]))


def _readable(read: Callable[[], Any]) -> Response:
    """Return a response with what `read` returns, or with the reason why runs cannot be read."""
    try:
        return _json(read())
    except UNREADABLE as error:
        return JSONResponse({"error": reason(error)}, status_code=422)


def _over_each_other(runs: list[RunFolder]) -> dict[str, Any]:
    try:
        compared = compare(read_sides([run.name for run in runs], None), None, ROWS)
    except UserError as error:
        compared = {"error": error.render().removeprefix("error: ")}
    return {"records": [record_of(run) for run in runs], "compared": compared, "labels": LABELS}


async def _changes(request: Request) -> Response:
    """Send the names of changed runs as server-sent events."""

    async def lines() -> AsyncIterator[str]:
        before = await asyncio.to_thread(_states)
        while not await request.is_disconnected():
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            now = await asyncio.to_thread(_states)
            if changed := sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name)):
                yield f"data: {json.dumps(changed)}\n\n"
            before = now

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"cache-control": "no-store"})


def _states() -> dict[str, tuple[float, ...]]:
    """Return run -> modification times of the files that show its progress."""
    return {
        run.name: tuple(
            map(_changed, (run.metrics, run.events, run.training_metrics, run.rank_log(0), run.path / "eval"))
        )
        for run in all_runs()
    }


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
