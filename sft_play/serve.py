"""`make serve RUN=` (or `MODEL=`): a model behind transformers' own OpenAI-compatible server, on 127.0.0.1 unless
`HOST=` says otherwise.

That server asks nobody who he is and loads whatever model a client names; both are settled here before it sees a
request.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from logging import getLogger
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from sft_play.access import TOKEN_VARIABLE, Guard, address_of, is_loopback, own_url, serve_token
from sft_play.config.load import read_config
from sft_play.data.answers import response_template
from sft_play.data.chat import template_sha256
from sft_play.errors import HardwareError, UserError
from sft_play.evaluation.evaluate import check_stamp
from sft_play.files import file_sha256, text_sha256
from sft_play.launch.environment import next_free_port
from sft_play.launch.run_folder import find_run
from sft_play.model.resolve import check_trained
from sft_play.model.tokenizer import ends_of_answers, load_tokenizer
from sft_play.runs.checkpoints import kind_of, label_of, plain_model, weights_folder
from sft_play.runs.folder import RunFolder, cache_folder
from sft_play.text import tell

if TYPE_CHECKING:
    from sft_play.config.call import Call

DEFAULT_PORT = 8000
SECONDS_TO_END = 5
"""After the first signal; an answer that is being made then is cut off."""
LONGEST_ANSWER_SECONDS = 600
PAGES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/load_model", "/health"})
"""What one model can answer; transformers' server has others, which unload models."""


def main(call: Call) -> int:
    """Serve until stopped. Find the port before the model is merged or loaded."""
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
    wanted = call.port("PORT") or DEFAULT_PORT
    port = next_free_port(wanted, address, "PORT")
    if port != wanted:
        tell(f"port {wanted} is taken; using {port}")
    folder, name = (
        (whole_model(run, weights), name_for_clients(run, label_of(run, weights)))
        if run and weights
        else _plain(call, plain or "")
    )
    tokenizer = load_tokenizer(folder)
    template_sha256(tokenizer)  # in a request nothing would end a template that never does
    with _stop_on_signals() as stopped, _named(folder, name):
        return _serve(name, Place(address, port, token), stopped, ends=ends_of_answers(tokenizer), as_json=call.json)


class Place(NamedTuple):
    """Where the server listens, and what a request must bear."""

    address: str
    port: int
    token: str | None

    @property
    def url(self) -> str:
        """As a client on this machine calls it."""
        return f"{own_url(self.address, self.port)}/v1"


def whole_model(run: RunFolder, weights: Path) -> Path:
    """Return a folder that holds the whole model: the weights themselves, or a merged copy in the cache, made when
    needed.

    The cache is keyed by the adapter's content, so that training on makes a new copy.
    """
    check_trained(weights)
    if kind_of(weights) == "full":
        check_stamp(run, read_config(run.config).config, weights, "infer")
        return weights
    content = "".join(file_sha256(p) for p in sorted(weights.glob("adapter_*")))
    folder = cache_folder() / "merged" / text_sha256(f"{run.path.resolve()} {content}")[:32]
    if not (folder / "stamp.json").is_file():
        from sft_play.model.use import merge

        tell("the server needs whole weights: merging the adapters into a copy in the cache ...")
        with contextlib.redirect_stdout(sys.stderr):
            merge(run, weights, folder)
    return folder


def _plain(call: Call, model: str) -> tuple[Path, str]:
    """Return the folder of a model that no run made, and what clients call it: the last part of its name."""
    from sft_play.model.use import find_plain

    _, found = find_plain(call, model)
    return Path(found.path), _api_name(Path(model).resolve().name)


def name_for_clients(run: RunFolder, label: str) -> str:
    """Return the model's name in the API: the run's, with the checkpoint's where one was asked for
    (`demo-step-000040`).

    transformers reads `@` as a revision, so it cannot stand in a name.
    """
    name = _api_name(run.path.resolve().name)
    return name if label == "model" else f"{name}-{label}"


def _api_name(name: str) -> str:
    return re.sub(r"[^\w.=+-]", "-", name)


@contextlib.contextmanager
def _named(folder: Path, name: str) -> Iterator[None]:
    """Make `folder` reachable as `name` from the working folder, which is a temporary one meanwhile.

    The server calls a model by the path that it was given; clients shall see the run's name instead.
    """
    target, before = folder.resolve(), Path.cwd()
    with tempfile.TemporaryDirectory(prefix="sft-play-serve-") as place:
        (Path(place) / name).symlink_to(target, target_is_directory=True)
        os.chdir(place)
        try:
            yield
        finally:
            os.chdir(before)


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying by them, so that the server can finish what it answers."""
    stopped: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if stopped:  # the second time the user means it
            raise SystemExit(128 + number)
        stopped.append(number)
        # A request that a thread is busy with would keep the interpreter alive for as long as it likes.
        last = threading.Timer(SECONDS_TO_END, os._exit, [128 + number])
        last.daemon = True
        last.start()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(name: str, place: Place, stopped: list[int], *, ends: dict[str, Any], as_json: bool) -> int:
    """Load the model into transformers' server and wait for the end; return 130 or 143 after a signal."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # the model is here; the server would ask the hub for its revision
    from transformers.cli.serve import Serve

    class Guarded(Serve):  # type: ignore[misc]
        """Puts the check before the application between its making and its first request."""

        def start_server(self) -> None:
            only_model(self._model_manager, name)
            know_marks(self._model_manager)
            for handler in (self._chat_handler, self._completion_handler, self._response_handler):
                limit_handler(handler, ends)
                check_template_keys(handler)
            config = self.server.config
            assert not config.loaded, "the application must not be in use yet"
            for log in ("uvicorn.error", "uvicorn.access"):  # a line for each request, whatever `log_level` says
                getLogger(log).setLevel("ERROR")
            config.app = Guard(config.app, token=place.token, address=place.address, pages=PAGES)
            super().start_server()

    tell(f"loading {name} ...")
    from sft_play.model.use import best_device

    device = best_device()
    with contextlib.redirect_stdout(sys.stderr):  # uvicorn's access log would go to stdout
        server: Any = Guarded(
            force_model=name, device=device, host=place.address, port=place.port, log_level="error", non_blocking=True
        )
    try:
        while not server.server.started and server._thread.is_alive() and not stopped:
            time.sleep(0.05)
        if not server._thread.is_alive():
            raise HardwareError(
                f"the server could not open port {place.port} of {place.address}", hint="choose another PORT="
            )
        if not is_loopback(place.address):
            tell("note: what is sent is not encrypted: beyond a network that you trust put it behind TLS or `ssh -L`")
        if as_json:
            facts = {"url": place.url, "model": name, "pid": os.getpid(), "token": place.token is not None}
            print(json.dumps(facts), flush=True)
        else:
            print(f"serving {name} at {place.url}  (Ctrl-C stops)\n{_example(place, name)}", flush=True)
        while server._thread.is_alive() and not stopped:
            time.sleep(0.2)
    finally:
        server.kill_server()
    return 128 + stopped[0] if stopped else 1


def know_marks(manager: Any) -> None:
    """Make the server show thoughts apart from the text for families whose marks it does not know."""
    from transformers.cli.serving.utils import get_response_template

    load = manager.load_model_and_processor

    def with_marks(*arguments: Any, **named: Any) -> tuple[Any, Any]:
        model, processor = load(*arguments, **named)
        if get_response_template(processor, model) is None:
            tokenizer = getattr(processor, "tokenizer", processor)
            tokenizer.response_template = response_template(tokenizer)
        return model, processor

    manager.load_model_and_processor = with_marks


def limit_handler(handler: Any, ends: dict[str, Any]) -> None:
    """End each answer of a handler where its turn ends, and after `LONGEST_ANSWER_SECONDS`, since answers wait for one
    another.
    """
    build = handler._build_generation_config

    def bounded(*arguments: Any, **named: Any) -> Any:
        config = build(*arguments, **named)
        config.max_time = LONGEST_ANSWER_SECONDS
        config.eos_token_id = ends["eos_token_id"]
        return config

    handler._build_generation_config = bounded


TEMPLATE_KEYS = frozenset({"enable_thinking", "preserve_thinking", "reasoning_effort", "thinking", "thinking_budget"})
"""What a request may tell the chat template."""
LONGEST_TEMPLATE_VALUE = 64


def check_template_keys(handler: Any) -> None:
    """Refuse a request that tells the chat template more than `TEMPLATE_KEYS`: one that brings a template would run it,
    for ever and in C.
    """
    from fastapi import HTTPException

    validate = handler._validate_request

    def checked(body: dict[str, Any]) -> None:
        given = body.pop("chat_template_kwargs", None) or {}
        if not isinstance(given, dict) or given.keys() - TEMPLATE_KEYS or not all(map(_is_short, given.values())):
            raise HTTPException(
                400,
                f"`chat_template_kwargs` takes {', '.join(sorted(TEMPLATE_KEYS))}, each a short text, number or true",
            )
        validate(body)
        body |= {"chat_template_kwargs": given} if given else {}

    handler._validate_request = checked


def _is_short(value: Any) -> bool:
    return value is None or (isinstance(value, bool | int | float | str) and len(str(value)) <= LONGEST_TEMPLATE_VALUE)


def only_model(manager: Any, name: str) -> None:
    """Make the server know one model: by itself it loads any folder or hub id that a request names, and lists the hub's
    cache.
    """
    from fastapi import HTTPException

    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "sft-play"}
    known = manager.process_model_name
    own = known(name)

    def process(asked: Any) -> Any:
        if not isinstance(asked, str) or known(asked) != own:
            raise HTTPException(status_code=404, detail=f"there is one model here: {name}")
        return own

    streamed = manager.load_model_streaming

    def stream(asked: str, gguf_file: str | None = None) -> Any:
        if gguf_file is not None:
            raise HTTPException(status_code=404, detail=f"there is one model here: {name}")
        return streamed(asked)

    manager.process_model_name, manager.load_model_streaming = process, stream
    manager.get_gen_models = lambda *_: [model]


def _example(place: Place, name: str) -> str:
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    key = f' -H "Authorization: Bearer ${TOKEN_VARIABLE}"' if place.token else ""
    return f"try: curl {place.url}/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
