"""TensorBoard on 127.0.0.1, started once and identified by a pid file, and trainings with TensorBoard."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from sft_play.config.call import Call
from sft_play.errors import HardwareError, typed_here
from sft_play.files import read_json, write_json
from sft_play.launch.commands import train as train_alone
from sft_play.launch.environment import next_free_port
from sft_play.runs.folder import runs_folder
from sft_play.text import tell

HOST = "127.0.0.1"
DEFAULT_PORT = 6006
START_SECONDS = 60.0
STOP_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBoardServer:
    """The process that this project started."""

    pid: int
    started: float
    """The process's start time in seconds since 1970, since another process may have reused the pid."""
    url: str
    folder: str

    @property
    def process(self) -> psutil.Process | None:
        """Return the running process, or `None` if it has ended or the pid was reused."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started) < 1 and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


def pid_file() -> Path:
    """Return the path of the pid file."""
    return runs_folder() / ".tensorboard.json"


def train(call: Call) -> int:
    """Start TensorBoard before a training and leave it running, so that the curves can still be read."""
    if "RUN" not in call.options:
        call.load_config()  # a mistake in it is reported before anything is started
    code = start(replace(call, options={k: v for k, v in call.options.items() if k == "TENSORBOARD_PORT"}, json=False))
    if code:
        return code
    code = train_alone(call)
    tell("TensorBoard keeps running; `make tensorboard-stop` ends it")
    return code


def start(call: Call) -> int:
    """Start TensorBoard and print its URL once it answers; a running one is kept, unless another port is typed."""
    typed, server = call.port("TENSORBOARD_PORT"), find_server()
    if server and typed in (None, urlsplit(server.url).port):
        return _say(call, server, "already runs; `make tensorboard-stop` ends it")
    if server:
        _end(server)
    folder, asked = runs_folder().resolve(), typed or DEFAULT_PORT
    folder.mkdir(parents=True, exist_ok=True)
    port = next_free_port(asked, HOST, "TENSORBOARD_PORT")
    taken = f"port {asked} is taken; " if port != asked else ""
    return _say(call, _spawn(folder, port), f"{taken}`make tensorboard-stop` ends it")


def stop(call: Call) -> int:
    """End the TensorBoard that this project started."""
    if server := find_server():
        _end(server)
    pid_file().unlink(missing_ok=True)
    return call.show(
        {"stopped": server is not None, "pid": server.pid if server else None},
        f"TensorBoard (pid {server.pid}) has ended" if server else "no TensorBoard of this project runs",
    )


def _end(server: TensorBoardServer) -> None:
    if process := server.process:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except psutil.TimeoutExpired:
            process.kill()


def find_server() -> TensorBoardServer | None:
    """Return the running server of the pid file, or `None`."""
    try:
        server = TensorBoardServer(**read_json(pid_file()))
    except (OSError, TypeError, json.JSONDecodeError):
        return None
    return server if server.process else None


def _spawn(folder: Path, port: int) -> TensorBoardServer:
    log = pid_file().with_name(".tensorboard.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    arguments = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", HOST, "--port", str(port)]
    environment = {k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MFLAGS"}}
    with log.open("wb") as stream:  # a separate session: Ctrl-C in the training's terminal must not end it
        process = subprocess.Popen(
            arguments,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = TensorBoardServer(
        pid=process.pid,
        started=psutil.Process(process.pid).create_time(),
        url=f"http://{HOST}:{port}/",
        folder=str(folder),
    )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if answers(server.url):
            write_json(pid_file(), asdict(server))
            return server
        time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait(STOP_SECONDS)
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
    raise HardwareError(f"TensorBoard did not start on port {port}; the end of its log:\n{tail}")


def answers(url: str) -> bool:
    """Return whether an HTTP server answers at `url`, without a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _say(call: Call, server: TensorBoardServer, note: str) -> int:
    text = typed_here(f"TensorBoard: {server.url}\n  {server.folder}\n  {note}")
    return call.show(asdict(server) | {"note": note}, text)
