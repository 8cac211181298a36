"""Shared fixtures: a cache that outlives the session, tiny models, and the program as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from sft_play.__main__ import main
from sft_play.errors import HardwareError, configured
from sft_play.plan.detect import detect
from tests import warm
from tests.documents import ROOT
from tests.doubles.machine import pynvml, sitecustomize
from tests.tiny_models import build_tiny_llama

# A busy machine is no fault of what is tested.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

NOT_INHERITED = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "RUNS_DIR", "SFT_PLAY_CACHE", "PYTHONWARNINGS")
SLOWEST_FIRST = ("distributed", "multinode", "numerics", "emulated", "contract")
WARM = ("distributed", "numerics", "multinode")
subprocess.Popen = warm.Popen  # type: ignore[misc]
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # two test processes share the cores: more threads would only wait for one


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def refused(self, code: int, *parts: str) -> None:
        """Assert that it ended with this code and these words, without a traceback."""
        assert self.code == code and all(words in self.err for words in parts) and "Traceback" not in self.err, self.err


Program = Callable[..., Done]


@pytest.fixture(scope="session")
def cache() -> Path:
    """Return the cache of all tests, so that the embedded model is fetched and converted once."""
    folder = Path(os.environ.get("SFT_PLAY_TEST_CACHE") or Path.home() / ".cache" / "sft_play_tests")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a random Llama of 140 k parameters with a ChatML tokenizer."""
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def session_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the runs folder of tests that share their runs."""
    return tmp_path_factory.mktemp("runs")


def environment(cache: Path, runs: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a test command's environment: no variables of an outer make, no hub, separate folders."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in NOT_INHERITED and not name.startswith("SFT_")
    }
    return inherited | {
        "SFT_PLAY_CACHE": str(cache),
        "RUNS_DIR": str(runs),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        **(extra or {}),
    }


def run_program(
    words: list[str], env: Mapping[str, str], *, timeout: float = 300, cwd: Path = ROOT, stdin: str | None = None
) -> Done:
    """Run `python -m sft_play ...` and return how it ended."""
    done = subprocess.run(
        [sys.executable, "-m", "sft_play", *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=dict(env),
        cwd=cwd,
        input=stdin,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def must_run(words: list[str], env: Mapping[str, str]) -> Done:
    """Run a program as `run_program` does; fail with its output unless it ends with 0."""
    done = run_program(words, env)
    assert done.code == 0, done.err + done.out
    return done


@pytest.fixture
def program(cache: Path, tmp_path: Path) -> Program:
    """Run the program with runs under `tmp_path`: `program("train", "CONFIG=x.yaml")`."""

    def run(*words: str, env: Mapping[str, str] | None = None, runs: Path | None = None, **options: Any) -> Done:
        return run_program(list(words), environment(cache, runs or tmp_path / "runs", env), **options)

    return run


@contextlib.contextmanager
def _leading_to(descriptor: int, stream: IO[str]) -> Iterator[None]:
    copy = os.dup(descriptor)
    os.dup2(stream.fileno(), descriptor)
    try:
        yield
    finally:
        os.dup2(copy, descriptor)
        os.close(copy)


@contextlib.contextmanager
def on_machine(env: Mapping[str, str]) -> Iterator[None]:
    """Give this process `env` and the machine that its `NVML_DOUBLE` describes, as a child would have them (except
    torch).
    """
    kernel, real = sitecustomize.kernel(env.get("NVML_DOUBLE")), sys.modules.get("pynvml")
    if "NVML_DOUBLE" in env:
        sys.modules["pynvml"] = pynvml
    try:
        with mock.patch.dict(os.environ, env, clear=True), mock.patch("os.uname", lambda: kernel):
            yield
    finally:
        if real is not None:
            sys.modules["pynvml"] = real
        else:
            sys.modules.pop("pynvml", None)


def called(function: Callable[[], int], env: Mapping[str, str], *, cwd: Path = ROOT) -> Done:
    """Call a program's `main` in this process, which saves its imports; output and exit code are the same."""
    with (
        tempfile.TemporaryFile("a+", encoding="utf-8") as out,
        tempfile.TemporaryFile("a+", encoding="utf-8") as err,
        on_machine(env),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _leading_to(1, out),
        _leading_to(2, err),
    ):
        try:
            code = function()
        except SystemExit as ended:
            assert isinstance(ended.code, int), ended
            code = ended.code
        configured.clear()  # as the end of the process would: the next test's hints are not of this call
        for stream in (out, err):
            stream.seek(0)
        return Done(code, out.read(), err.read())


def call_program(words: list[str], env: Mapping[str, str]) -> Done:
    """Run a program as `run_program` does, in this process."""
    return called(lambda: main(words), env)


@pytest.fixture
def in_process(cache: Path, tmp_path: Path) -> Program:
    """Run the program as `program` does, but in this process, for commands that need no separate one."""

    def run(*words: str, env: Mapping[str, str] | None = None, runs: Path | None = None) -> Done:
        return call_program(list(words), environment(cache, runs or tmp_path / "runs", env))

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest folders first, so that no test process is left with them at the end. Of a test marked
    `broad_but(...)`, mark those parameters `broad` whose id contains none of these words.
    """
    for item in items:
        mark = item.get_closest_marker("broad_but")
        if mark and not any(word in item.name for word in mark.args):
            item.add_marker("broad")
    order = {folder: place for place, folder in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let processes that load torch start warm; skip tests that need a GPU if none can be used, with the reason."""
    heavy = item.path.parent.name in WARM or item.get_closest_marker("slow") is not None
    warm.allowed = heavy and not item.get_closest_marker("cold")
    if item.get_closest_marker("gpu") and (reason := no_gpu()):
        pytest.skip(reason)


def no_gpu() -> str:
    """Return why no GPU can be used here, or an empty string."""
    try:
        return "" if detect().kind == "cuda" else "no NVIDIA GPU answers on this machine"
    except HardwareError as error:
        return error.message


LEFT_OUT = Counter[str]()
"""Mark -> tests that were not chosen. Each process of xdist collects all."""


def pytest_deselected(items: list[pytest.Item]) -> None:
    marks = [
        next((mark for mark in ("gpu", "quiet", "long", "broad") if item.get_closest_marker(mark)), "")
        for item in items
    ]
    LEFT_OUT.update(filter(None, marks))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for mark, count in getattr(node, "workeroutput", {}).get("left_out", {}).items():
        LEFT_OUT[mark] = max(LEFT_OUT[mark], count)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print in one line what was not run, and why."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    parts = [f"{count} {mark}" for mark, count in LEFT_OUT.items()] + [
        f"{count}: {reason}" for reason, count in reasons.items()
    ]
    if parts:
        terminalreporter.write_line(f"not run here (`make test-all`, `make test-gpu`): {'; '.join(parts)}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Accept that one half of `make test-all` has no tests for the named `TESTS`.

    Processes of xdist report the tests that they left out.
    """
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and "quiet" in session.config.option.markexpr:
        session.exitstatus = pytest.ExitCode.OK
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(LEFT_OUT)


def metrics(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Return the rows of one kind of a run's metrics.jsonl."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["kind"] == kind]


def ragged_rows(path: Path, count: int, seed: int = 0, weights: Sequence[float] = ()) -> Path:
    """Write `count` prompt/completion rows of very different lengths as jsonl, with `weights` in turn."""
    from pydoc_data.topics import topics

    chance = random.Random(seed)
    words = " ".join(list(topics.values())[:10]).split()

    def piece(low: int, high: int) -> str:
        start = chance.randrange(len(words) - high)
        return " ".join(words[start : start + chance.randint(low, high)])

    rows = [{"prompt": piece(2, 20), "completion": piece(1, 15)} for _ in range(count)]
    weighed = [{"weight": weights[at % len(weights)]} if weights else {} for at in range(count)]
    lines = [json.dumps(row | weight) + "\n" for row, weight in zip(rows, weighed, strict=True)]
    path.write_text("".join(lines), encoding="utf-8")
    return path
