"""Python processes that start warm: forked from one that has imported torch and its kin, and otherwise what `python -m`
would start.

`tests/conftest.py` puts `Popen` in the place of subprocess's. A command `python -m MODULE ...` is forked from a server,
and so is every such command that it starts, as its own child: `make train` becomes launcher, preparation, `accelerate
launch` and ranks, with their own pids, command lines, environments, sessions and descriptors, but without 5 to 9
seconds of imports each. Modules of this project are imported again in each. Everything else is executed as ever: other
programs, and Pythons whose environment would change what an import does. `SFT_PLAY_TEST_COLD=1` (`make test-all`)
executes everything.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import io
import multiprocessing.process
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
OURS = ("sft_play", "tests", "benchmarks")
READ_AT_START = ("HF_", "LD_", "OMP_", "PYTHON")
"""Beginnings of variables that libraries, libc or Python itself read when they are loaded."""
READ_LATER = {
    "HF_HUB_DISABLE_TELEMETRY",
    "HF_HUB_DISABLE_PROGRESS_BARS",
    "HF_TOKEN",
    "HF_SECRET_THING",
    "PYTHONPATH",
    "PYTHONSAFEPATH",
    "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER",
}
"""Of these, what changes nothing, or is done for a forked process too."""
ALWAYS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
"""Environment of a process unless a test sets it."""
LIBRARIES = (
    "torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict",
    "torch.utils.tensorboard", "accelerate.commands.launch", "transformers.trainer",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "datasets", "peft", "peft.utils.transformers_weight_conversion", "deepspeed", "bitsandbytes", "omegaconf", "psutil",
    "jinja2", "safetensors.torch", "rouge_score.rouge_scorer", "pandas",
)  # fmt: skip
ROOM = 2**14
"""Bytes of arguments, and of environment, that a forked process can show in /proc."""


def module_of(words: Sequence[str]) -> int:
    """Return the place of MODULE in `python [-u] -m MODULE ...`; 0 for another command."""
    place = 3 if list(words[1:2]) == ["-u"] else 2
    return place if list(words[:1]) == [sys.executable] and list(words[place - 1 : place]) == ["-m"] else 0


def inside(words: Sequence[str]) -> tuple[str, str, Sequence[str]]:
    """Return whose namespaces a command of `tests/lan.py` enters, its folder there, and what it starts there."""
    match words:
        case ["nsenter", "-t", host, "-n", "-u", "-m", "--", "env", "-C", folder, *rest]:
            return host, folder, rest
    return "", "", words


def read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    variables = {
        name: value for name, value in env.items() if name.startswith(READ_AT_START) and name not in READ_LATER
    }
    customised = [folder for folder in folders_of(env) if Path(folder, "sitecustomize.py").exists()]
    return ALWAYS | variables | {"sitecustomize": ":".join(customised)}


def folders_of(env: Mapping[str, str]) -> list[str]:
    """Return the folders of PYTHONPATH."""
    return [folder for folder in env.get("PYTHONPATH", "").split(":") if folder]


# The tests' side.


_cold_popen = subprocess.Popen


class Popen(_cold_popen[Any]):
    """A `subprocess.Popen` whose process is a child of the server."""

    _line: socket.socket | None = None

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        *others: Any,
    ) -> None:
        pipes, session, variables = others[3:9], others[-2], dict(os.environ if env is None else env)
        plain = not (executable or preexec_fn or pass_fds or isinstance(args, (str, bytes, Path)))
        host, cwd_there, words = inside(list(map(str, args)) if plain else [])
        address = server_for(variables) if module_of(words) else None
        if address is None:
            first = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env)
            super()._execute_child(*first, *others)  # type: ignore[misc]
            return
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(address)
        request = {
            "words": words,
            "env": variables,
            "host": host,
            "cwd": cwd_there or str(cwd or Path.cwd()),
            "session": session,
        }
        descriptors = [number if number >= 0 else own for own, number in enumerate((pipes[0], pipes[3], pipes[5]))]
        socket.send_fds(self._line, [pickle.dumps(request)], descriptors)
        self.pid, self._child_created = int(self._line.recv(64)), True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._line is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        if not select.select([self._line], [], [], 0 if wait_flags & os.WNOHANG else None)[0]:
            return 0, 0
        status = self._line.recv(64)
        self._line.close()
        return self.pid, int(status or signal.SIGKILL)

    def _internal_poll(self, *arguments: Any, **named: Any) -> int | None:
        if self._line is None:
            return super()._internal_poll(*arguments, **named)  # type: ignore[misc,no-any-return]
        if self.returncode is None and (status := self._try_wait(os.WNOHANG))[0]:
            self._handle_exitstatus(status[1])  # type: ignore[attr-defined]
        return self.returncode


allowed = False
"""Whether processes of the test that runs may start warm."""


@functools.cache
def _server() -> tuple[str, dict[str, str]]:
    """Start the server of this test process; return where it listens, and what it read at its start."""
    address = f"\0sft-play-tests-{os.getpid()}"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    variables |= ALWAYS | {
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "TRANSFORMERS_VERBOSITY": "error",
        "ROOM": "x" * ROOM,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        words = [sys.executable, "-c", "from tests.warm import serve; serve()", str(listener.fileno()), "x" * ROOM]
        server = _cold_popen(words, env=variables, cwd=ROOT, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    atexit.register(lambda: (server.kill(), server.wait()))
    return address, read_at_start(variables)


def server_for(env: Mapping[str, str]) -> str | None:
    """Return the address of a server that may fork processes with this environment; none with a GPU: CUDA does not
    survive a fork.
    """
    if (
        not allowed
        or os.environ.get("SFT_PLAY_TEST_COLD")
        or sys.platform != "linux"
        or Path("/dev/nvidiactl").exists()
    ):
        return None
    address, process = _server()
    return address if read_at_start(env) == process else None


# The server's side.


def serve() -> NoReturn:
    """Fork a process for each request, and send its pid and then its status, until the test process has ended."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    _import_libraries()
    subprocess._fork_exec = _fork_exec  # type: ignore[attr-defined]
    os.posix_spawn = _posix_spawn
    poll, lines = select.poll(), {}
    poll.register(listener, select.POLLIN)
    poll.register(0, select.POLLIN | select.POLLHUP)
    while True:
        for ready, _ in poll.poll():
            if ready == 0:
                os._exit(0)
            if ready == listener.fileno():
                line, _ = listener.accept()
                data, descriptors, _, _ = socket.recv_fds(line, 2**20, 3)
                request = pickle.loads(data)
                if (pid := os.fork()) == 0:
                    _become(request, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                line.send(str(pid).encode())
                handle = os.pidfd_open(pid)
                lines[handle] = (pid, line)
                poll.register(handle, select.POLLIN)
            else:
                pid, line = lines.pop(ready)
                with contextlib.suppress(OSError), line:
                    line.send(str(os.waitpid(pid, 0)[1]).encode())
                poll.unregister(ready)
                os.close(ready)


_registered: list[Callable[..., object]] = []
"""What was registered for the end of a process since the libraries were imported."""
_added = {"", str(ROOT)}
"""What the command lines and environments of this process and its parents put on `sys.path`."""
_kept: list[object] = []
"""What a forked process has from its parent, and must not close: buffers would be written twice."""


def _import_libraries() -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    _forget_our_modules()
    register = atexit.register

    def noted(function: Callable[..., object], *arguments: Any, **named: Any) -> Callable[..., object]:
        _registered.append(function)
        return register(function, *arguments, **named)

    atexit.register = noted  # type: ignore[assignment]
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, threading.enumerate()


def _forget_our_modules() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in OURS and name != "tests.warm"]:
        _kept.append(sys.modules.pop(name))


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Turn a child of the server into the requested process."""
    try:
        if request["session"]:
            os.setsid()
        for kind in ("net", "uts", "mnt") if request["host"] else ():
            with Path(f"/proc/{request['host']}/ns/{kind}").open() as namespace:
                assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0, kind
        os.chdir(request["cwd"])
        _set_descriptors(descriptors, keep=())
        _start(request["words"], request["env"])
    finally:
        os._exit(255)


def _fork_exec(args: Sequence[Any], executables: Any, *others: Any) -> int:
    """Replace `_posixsubprocess.fork_exec`: fork if this process can stand in for the program."""
    words = [os.fsdecode(word) for word in args]
    env_list = others[3]
    env = (
        dict(os.environ) if env_list is None else dict(os.fsdecode(descriptor).split("=", 1) for descriptor in env_list)
    )
    if not module_of(words) or read_at_start(env) != _read:
        return int(_execute(args, executables, *others))
    close_fds, pass_fds, cwd = others[:3]
    p2cread, _, _, c2pwrite, _, errwrite = others[4:10]
    errpipe, session, group, preexec = others[11], others[13], others[14], others[19]
    if pid := os.fork():
        return pid
    try:
        keep = [*pass_fds, *(() if close_fds else _open_descriptors())]
        if session:
            os.setsid()
        if group >= 0:
            os.setpgid(0, group)
        if cwd is not None:
            os.chdir(cwd)
        if preexec is not None:
            preexec()
        _set_descriptors(
            [p2cread, c2pwrite, errwrite],
            keep=[descriptor for descriptor in keep if descriptor != errpipe and os.get_inheritable(descriptor)],
        )
        _start(words, env)
    finally:
        os._exit(255)


_execute, _spawn, _read = subprocess._fork_exec, os.posix_spawn, read_at_start(os.environ)  # type: ignore[attr-defined]


def _posix_spawn(path: str, argv: Sequence[str], env: Mapping[str, str], **options: Any) -> int:
    """Replace `os.posix_spawn`; signals are reset in any case."""
    if not module_of(argv) or read_at_start(env) != _read or options.keys() - {"setsigdef"}:
        return _spawn(path, argv, env, **options)
    if pid := os.fork():
        return pid
    try:
        _set_descriptors([], keep=[descriptor for descriptor in _open_descriptors() if os.get_inheritable(descriptor)])
        _start(argv, dict(env))
    finally:
        os._exit(255)


def _open_descriptors() -> list[int]:
    descriptors = []
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):
            os.fstat(descriptor)
            descriptors.append(descriptor)
    return descriptors


def _set_descriptors(standard: Sequence[int], keep: Sequence[int]) -> None:
    """Make `standard` the descriptors 0 to 2 (-1: as they are) and close all others but `keep`."""
    copies = [os.dup(standing) if standing >= 0 else -1 for standing in standard]
    for place, standing in enumerate(copies):
        if standing >= 0:
            os.dup2(standing, place)
    for standing in _open_descriptors():
        if standing > 2 and standing not in keep:
            with contextlib.suppress(OSError):
                os.close(standing)


def _start(words: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Run `python [-u] -m MODULE ...` in this freshly forked process, and end as the interpreter would."""
    os.environ.clear()
    os.environ.update(env)
    _show(words, env)  # over strings that libc's `environ` no longer names
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    for function in _registered:
        atexit.unregister(function)
    _registered.clear()
    _kept.extend([sys.stdin, sys.stdout, sys.stderr, *weakref.finalize._registry.items()])  # type: ignore[attr-defined]
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    subprocess._active = []  # type: ignore[attr-defined]
    sys.stdin = sys.__stdin__ = _stream(0, "r")  # type: ignore[misc]
    at_once = words[1] == "-u" or bool(env.get("PYTHONUNBUFFERED"))
    sys.stdout = sys.__stdout__ = _stream(1, "w", at_once=at_once)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w", at_once=True)  # type: ignore[misc]
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    _forget_our_modules()
    place = module_of(words)
    module = words[place]
    _kept.extend([sys.modules.pop(module, None), sys.modules["__main__"]])
    sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = ["-m", *words[place + 1 :]]
    folders = [*([] if env.get("PYTHONSAFEPATH") else [str(Path.cwd())]), *folders_of(env)]
    sys.path[:] = [*folders, *(folder for folder in sys.path if folder not in _added)]
    _added.update(folders)
    code: object = 0
    try:
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = -signal.SIGINT
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if code is not None and code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit((code or 0) & 255)


def _stream(descriptor: int, mode: str, *, at_once: bool = False) -> Any:
    """Return a standard stream as Python opens it, or `None` if its descriptor is closed."""
    try:
        raw = open(descriptor, mode + "b", closefd=False)  # noqa: SIM115
    except OSError:
        return None
    errors = "backslashreplace" if descriptor == 2 else "strict"
    return io.TextIOWrapper(
        raw, encoding="utf-8", errors=errors, line_buffering=at_once or raw.isatty(), write_through=at_once
    )


def _show(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Write command line and environment where the kernel shows them to others (proc(5)), as far as they fit."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    for start, end, parts in zip(
        fields[45:49:2], fields[46:49:2], (words, [f"{k}={v}" for k, v in env.items()]), strict=True
    ):
        room = int(end) - int(start)
        text = b"".join(os.fsencode(part) + b"\0" for part in parts)[: room - 1]
        ctypes.memset(int(start), 0, room)
        ctypes.memmove(int(start), text, len(text))
