"""What a source's files hold, as one checksum: whole, but read once. Standard library only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sft_play.errors import DataError
from sft_play.files import file_sha256, read_json, text_sha256, write_json
from sft_play.runs.folder import cache_folder

THREADS = 8
WORTH_SAYING_BYTES = 4 * 2**30
Facts = list[str | int]


def files_sha256(paths: Sequence[Path]) -> str:
    """Returns a sha256 over names and contents of `paths`, in order. Raises `DataError` for a file that cannot be read.

    The checksum of each file is kept in `cache/digests/` with its size, times and inode, and taken from there until one of them
    changes: one record for all of them, since a folder may hold a hundred thousand small files.
    """
    try:
        facts = {str(path): _facts(path) for path in paths}
        known = _known(paths)
        unread = [path for path in paths if known.get(str(path), [None])[:-1] != facts[str(path)]]
        size = sum(int(facts[str(path)][0]) for path in unread)
        if size > WORTH_SAYING_BYTES:
            print(f"reading {size / 2**30:.0f} GiB of data for their checksum, this once", file=sys.stderr, flush=True)
        with ThreadPoolExecutor(THREADS) as pool:  # hashing leaves Python's lock
            digests = dict(zip(map(str, unread), pool.map(file_sha256, unread), strict=True))
        found = {name: [*fact, digests.get(name) or known[name][-1]] for name, fact in facts.items()}
        # A file that somebody writes to right now is looked at again by the next start.
        if unread and all(_facts(path) == facts[str(path)] for path in unread):
            with contextlib.suppress(OSError):  # a cache that cannot be written only costs the time again
                write_json(_record(paths), found)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", place=str(error.filename or paths[0])) from None
    return text_sha256("\n".join(f"{path.name} {found[str(path)][-1]}" for path in paths))


def _known(paths: Sequence[Path]) -> dict[str, Facts]:
    try:
        return {str(name): list(facts) for name, facts in read_json(_record(paths)).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _record(paths: Sequence[Path]) -> Path:
    names = "\n".join(str(path.resolve()) for path in paths)
    return cache_folder() / "digests" / f"data-{text_sha256(names)}.json"


def _facts(path: Path) -> Facts:
    """What changes with a file. The change time, too: a copy may keep the modification time, but not that."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
