"""Whether the kernel killed a process of ours for memory: counters of its cgroups, and the kernel's own log.

A process that the kernel kills can say nothing. SIGKILL alone proves nothing either: a person may have sent it. cgroup v2 counts such
kills in `memory.events`, v1 in `memory.oom_control`, both as `oom_kill N` (Linux, Documentation/admin-guide/cgroup-v2.rst and
cgroup-v1/memory.rst); the kernel log names the process.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

COUNTED = re.compile(r"^oom_kill (\d+)$", re.M)
KERNEL_LOG = Path("/dev/kmsg")


@dataclass(kw_only=True, slots=True)
class MemoryKills:
    """Counters of this process's cgroups and their parents, and of those of every process that is followed, from now on."""

    before: dict[Path, int] = field(default_factory=dict)
    """Counter file -> kills when it was first looked at."""
    pids: set[int] = field(default_factory=set)
    log: int | None = None
    """Descriptor of the kernel log, at its end when this began; `None` where it may not be read."""

    @staticmethod
    def begin() -> MemoryKills:
        """Takes note of the counters as they are now."""
        kills = MemoryKills()
        with contextlib.suppress(OSError):
            kills.log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(kills.log, 0, os.SEEK_END)
        kills.follow(os.getpid(), ours=False)
        return kills

    def follow(self, pid: int, *, ours: bool = True) -> None:
        """Takes note of the cgroups of a process, which may have been moved; its own name in the kernel log counts from now on."""
        if ours:
            self.pids.add(pid)
        for file in counters_of(pid):
            if file not in self.before and (count := read_counter(file)) is not None:
                self.before[file] = count

    def evidence(self) -> str | None:
        """Returns in words what shows that a process was killed for memory since, `None` when nothing does."""
        for file, count in self.before.items():
            now = read_counter(file)
            if now is not None and now > count:
                return f"`{file}` counts {now - count} kill{'s' if now - count > 1 else ''} for memory"
        for pid in self._in_kernel_log():
            if pid in self.pids:
                return f"the kernel log says that process {pid} was killed for memory"
        return None

    def close(self) -> None:
        """Closes the kernel log."""
        if self.log is not None:
            os.close(self.log)
            self.log = None

    def _in_kernel_log(self) -> list[int]:
        """Returns the processes that the kernel has killed for memory since the last look (ids of the first pid namespace)."""
        found: list[int] = []
        while self.log is not None:
            try:
                record = os.read(self.log, 8192).decode("utf-8", errors="replace")
            except BrokenPipeError:  # records were overwritten before they were read; the next read goes on with the oldest
                continue
            except OSError:  # no more records
                break
            if not record:
                break
            if match := re.search(r"[Oo]ut of memory: Killed process (\d+)", record):
                found.append(int(match[1]))
        return found


def read_counter(file: Path) -> int | None:
    """Returns the kills that a cgroup's file counts; `None` where there is no such file or line."""
    try:
        match = COUNTED.search(file.read_text(encoding="ascii"))
    except OSError:
        return None
    return int(match[1]) if match else None


def counters_of(pid: int, proc: Path = Path("/proc")) -> list[Path]:
    """Returns the counter files of a process's memory cgroup and of all its parents, v2 and v1, those that exist."""
    try:
        groups = (proc / str(pid) / "cgroup").read_text(encoding="utf-8")
        mounts = (proc / "self" / "mountinfo").read_text(encoding="utf-8")
    except OSError:  # it has gone, or this is no Linux
        return []
    found: list[Path] = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            kind, name = ("cgroup2", "memory.events") if controllers == "" else ("cgroup", "memory.oom_control")
            for root, mount in _mounts(mounts, kind):
                found += [folder / name for folder in _with_parents(path, root, mount) if (folder / name).is_file()]
    return found


def _mounts(mountinfo: str, kind: str) -> list[tuple[str, Path]]:
    """Returns (root, mount point) of each mounted hierarchy of a kind; of v1's, those with the memory controller."""
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, described = before.split(), after.split()
        if len(fields) < 5 or len(described) < 3 or described[0] != kind:
            continue
        if kind == "cgroup2" or "memory" in described[2].split(","):
            found.append((fields[3], Path(fields[4])))
    return found


def _with_parents(path: str, root: str, mount: Path) -> list[Path]:
    """Returns the folder of a cgroup and of its parents. `root` is what of the hierarchy a container sees at `mount`."""
    inside = path[len(root.rstrip("/")) :] if path == root or path.startswith(root.rstrip("/") + "/") else "/"
    folder = mount / inside.strip("/")
    return [folder, *(parent for parent in folder.parents if parent == mount or mount in parent.parents)]
