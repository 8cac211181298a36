"""A share of a core for a process, by the kernel's CPU quota (cgroup v1 or v2): it computes slower without sleeping."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launcher import workers_of
from tests.waiting import until

PERIOD = 10_000
"""Microseconds between two allowances: short, so that each micro-step is slowed evenly."""


def _controller(name: str) -> tuple[Path, int]:
    """Return the folder in which groups with a controller can be made, and the version of its files; skip the test
    without one.
    """
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup" and name in options.split(","):
            return Path(where), 1
        if kind == "cgroup2":
            with contextlib.suppress(OSError):
                if name in (Path(where) / "cgroup.subtree_control").read_text(encoding="utf-8").split():
                    return Path(where), 2
    pytest.skip(f"no cgroup with the controller `{name}` is mounted")


@contextlib.contextmanager
def quota(share: float, period: int = PERIOD) -> Iterator[Path]:
    """Yield a group whose processes share `share` of a core; `move(pid, group)` adds one. Skip the test without
    permission.
    """
    with _group("cpu") as (group, version):
        allowance = int(share * period)
        if version == 1:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(allowance))
        else:
            (group / "cpu.max").write_text(f"{allowance} {period}")
        yield group


@contextlib.contextmanager
def memory_limit(most_bytes: int) -> Iterator[Path]:
    """Yield a group whose processes get at most so much memory together: the kernel kills one that asks for more.
    Skips as `quota`, and where only cgroup v1 has the controller.
    """
    with _group("memory") as (group, version):
        if version == 1:
            pytest.skip("the launcher reads the counters of cgroup v2")
        limit_memory(group, most_bytes)
        yield group


def limit_memory(group: Path, most_bytes: int) -> None:
    """Change the limit of a group of `memory_limit`."""
    (limit,) = (group / name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).is_file())
    limit.write_text(str(most_bytes))


@contextlib.contextmanager
def _group(controller: str) -> Iterator[tuple[Path, int]]:
    root, version = _controller(controller)
    group = root / f"sft-play-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
    except OSError as problem:
        pytest.skip(f"no group for `{controller}` can be made: {problem}")
    try:
        yield group, version
    finally:
        for process in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                move(int(process), root)
        with contextlib.suppress(OSError):
            group.rmdir()


def move(pid: int, group: Path) -> None:
    """Put a process with all its threads into a group."""
    (group / "cgroup.procs").write_text(str(pid))


@contextlib.contextmanager
def slowed(pid: int, share: float) -> Iterator[None]:
    """Limit a process to `share` of a core inside the context: by a quota, or by stopping and continuing it if no group
    can be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            move(pid, stack.enter_context(quota(share, 20_000)))  # the kernel takes no quota below a millisecond
        except pytest.skip.Exception:
            over = threading.Event()

            def interrupt() -> None:
                process = psutil.Process(pid)
                with contextlib.suppress(psutil.Error):
                    while not over.wait(share * 0.02):
                        process.suspend()
                        time.sleep((1 - share) * 0.02)
                        process.resume()

            thread = threading.Thread(target=interrupt)
            thread.start()
            stack.callback(thread.join)
            stack.callback(over.set)
        yield


def worker_of(launcher: int, rank: int) -> int:
    """Return the id of a rank's worker among a launcher's children once it has started."""
    until(lambda: rank in workers_of(launcher), seconds=240)
    return workers_of(launcher)[rank].pid
