"""Checksums of large files: complete, but each file is read once. Standard library only."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sft_play.files import file_sha256, read_json, text_sha256, write_json
from sft_play.runs.folder import cache_folder

THREADS = 8
WORTH_SAYING_BYTES = 4 * 2**30
BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""What the hub's cache calls a file: the sha256 of its content, or git's sha1 of a small one."""
Facts = list[str | int]


def blob_of(path: Path) -> str | None:
    """Returns the checksum by which the hub's cache names a file; its snapshots are links into `blobs/`."""
    target = path.resolve()
    return target.name if path.is_symlink() and target.parent.name == "blobs" and BLOB.fullmatch(target.name) else None


def digests_of(paths: Sequence[Path], what: str) -> list[str]:
    """Returns the sha256 of each file's content. Raises `OSError` for a file that cannot be read. `what` they are is for the user.

    They are kept in `cache/digests/` with size, times and inode of each file, and taken from there until one of these changes: one record for
    all `paths`, since a folder may hold a hundred thousand small files. A cache that cannot be written only costs the time again.
    """
    names = [str(path.resolve()) for path in paths]
    record = cache_folder() / "digests" / f"{text_sha256(chr(10).join(names))}.json"
    facts = dict(zip(names, map(_facts, paths), strict=True))
    known = _known(record)
    unread = [Path(name) for name, fact in facts.items() if known.get(name, [None])[:-1] != fact]
    size = sum(int(facts[str(path)][0]) for path in unread)
    if size > WORTH_SAYING_BYTES and os.environ.get("RANK", "0") == "0":
        print(f"reading {size / 2**30:.0f} GiB of {what} for their checksums, this once", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(THREADS) as pool:  # hashing leaves Python's lock
        digests = dict(zip(map(str, unread), pool.map(file_sha256, unread), strict=True))
    found = {name: [*fact, digests.get(name) or known[name][-1]] for name, fact in facts.items()}
    # A file that somebody writes to right now is looked at again by the next start.
    if unread and all(_facts(path) == facts[str(path)] for path in unread):
        with contextlib.suppress(OSError):
            write_json(record, found)
    return [str(found[name][-1]) for name in names]


def _known(record: Path) -> dict[str, Facts]:
    try:
        return {str(name): list(facts) for name, facts in read_json(record).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _facts(path: Path) -> Facts:
    """What changes with a file. The change time, too: a copy may keep the modification time, but not that."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
