"""Run folders that a stranger made: one file or folder of a complete run as a link, a pipe, a device, endless JSON or
of other types.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

DEEP = "[" * 200_000
SECRET = "planted-outside-of-the-run"


def parts_of(run: Path) -> list[str]:
    """Return every file and folder of a run by relative name, without links, and one of equal checkpoints."""
    parts = {path.name: path for path in sorted(run.rglob("*")) if not path.is_symlink()}
    return sorted(path.relative_to(run).as_posix() for path in parts.values())


def _link(path: Path, outside: Path) -> None:
    target = outside / "folder" if path.is_dir() else outside / "secret.txt"
    _remove(path)
    path.symlink_to(target)


def _dangling(path: Path, outside: Path) -> None:
    _remove(path)
    path.symlink_to(outside / "made-by-us")


def _pipe(path: Path, _: Path) -> None:
    _remove(path)
    os.mkfifo(path)


def _device(path: Path, _: Path) -> None:
    _remove(path)
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero


def _deep(path: Path, _: Path) -> None:
    path.write_text(f'{{"event": {DEEP}\n' if path.suffix == ".jsonl" else DEEP)


def _foreign(path: Path, _: Path) -> None:
    """Give every value another type, one depth after another: texts for numbers, lists for objects."""
    if path.suffix == ".jsonl":
        path.write_text(
            "".join(
                f"{json.dumps(other)}\n"
                for line in path.read_text().splitlines()
                for other in _others(json.loads(line))
            )
        )
    else:
        path.write_text(json.dumps(next(_others(json.loads(path.read_text())))))


def _others(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield {name: next(_others(item)) for name, item in value.items()}
        yield {name: [{"x": item}] for name, item in value.items()}
        yield [value]
    elif isinstance(value, list):
        yield {"x": 5}
    elif isinstance(value, str):
        yield 5
    else:
        yield "x"


FILES: Mapping[str, Callable[[Path, Path], None]] = {
    "link": _link,
    "dangling": _dangling,
    "pipe": _pipe,
    "device": _device,
}
"""What no part of a run may be."""
FOLDERS = ("link", "dangling", "pipe")
CONTENTS: Mapping[str, Callable[[Path, Path], None]] = {"deep": _deep, "foreign": _foreign}
"""What a JSON file of a run may hold."""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_hostile(run: Path, part: str, kind: str, outside: Path) -> None:
    """Turn a part of a run into something hostile; what it leads to is in `outside`, with `SECRET` in it."""
    (outside / "folder").mkdir(parents=True, exist_ok=True)
    for path in (outside / "secret.txt", outside / "folder" / "rank0.log", outside / "folder" / "scores.json"):
        path.write_text(SECRET)
    {**FILES, **CONTENTS}[kind](run / part, outside)
