"""Checksums of weight files, whole but read once: a file that has not changed since costs one `stat`."""

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

BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""What the hub's cache calls a file: the sha256 of its content, or git's sha1 of a small one."""
WORTH_SAYING_BYTES = 4 * 2**30
THREADS = 8


def weights_sha256(paths: Sequence[Path]) -> list[str]:
    """Returns a checksum over all bytes of each file: from the hub's cache its blob's name, else the sha256 of its content.

    A sha256 is kept in `cache/digests/`, together with the file's size, times and inode, and is taken from there until one of
    them changes. Raises `OSError` for a file that cannot be read; a cache that cannot be written only costs the time again.
    """
    unread = sum(path.stat().st_size for path in paths if _blob_name(path) is None and _kept(path) is None)
    if unread > WORTH_SAYING_BYTES and os.environ.get("RANK", "0") == "0":
        print(f"reading {unread / 2**30:.0f} GiB of weights for their checksums, this once", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(THREADS) as pool:  # hashing leaves Python's lock
        return list(pool.map(_digest, paths))


def _digest(path: Path) -> str:
    known = _blob_name(path) or _kept(path)
    if known is not None:
        return known
    before = _facts(path)
    digest = file_sha256(path)
    if _facts(path) == before:  # else somebody writes to it right now, and the next start looks again
        with contextlib.suppress(OSError):
            write_json(_record(path), before | {"sha256": digest})
    return digest


def _blob_name(path: Path) -> str | None:
    """Returns the checksum that the hub's cache has for a file, whose snapshots are links into `blobs/`."""
    target = path.resolve()
    return target.name if path.is_symlink() and target.parent.name == "blobs" and BLOB.fullmatch(target.name) else None


def _kept(path: Path) -> str | None:
    """Returns the sha256 that was found earlier, if the file is the same."""
    try:
        record = read_json(_record(path))
        digest = record.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return str(digest) if record == _facts(path) else None


def _record(path: Path) -> Path:
    return cache_folder() / "digests" / f"{text_sha256(str(path.resolve()))}.json"


def _facts(path: Path) -> dict[str, str | int]:
    """What changes with a file. The change time, too: a copy may keep the modification time, but not that."""
    found = path.stat()
    return {
        "path": str(path.resolve()),
        "bytes": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "inode": found.st_ino,
    }
