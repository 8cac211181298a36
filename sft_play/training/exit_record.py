"""What a worker leaves for its launcher: its exit code and error, also when the disk is full. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sft_play.files import write_json
from sft_play.runs.folder import RunFolder
from sft_play.runs.space import is_full, is_gone

PEER_GONE = re.compile(
    r"Connection (closed|reset) by (remote )?peer|Socket closed|Connection refused|remote process exited|Broken pipe"
    r"|NCCL.*(timeout|remote error)|Timed out waiting \d+ms|failed to pass monitoredBarrier"
    r"|NCCL communicator was aborted|ncclRemoteError|Watchdog caught collective operation timeout"
)
"""What gloo and NCCL say in a rank whose peer has died."""
RESERVED_BYTES = 64 * 2**10
"""Room for the record and for the launcher's event."""
FULL = re.compile(r"os error (28|122)\b")
"""What safetensors says: ENOSPC, EDQUOT."""
WRITE_FAILED = re.compile(
    r"No space left on device|PytorchStreamWriter failed|inline_container|file write failed|unexpected pos \d+"
)
"""What torch says, of whatever kept it from writing, shared memory included."""


def reserve(run: RunFolder, rank: int) -> None:
    """Takes the space that the record will need. Raises `OSError` where there is none."""
    path = _reserved(run, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\1" * RESERVED_BYTES)


def leave_record(run: RunFolder, rank: int, record: Mapping[str, Any]) -> None:
    """Writes `exit-rank{N}.json` with the time, on a full disk in the place of what was reserved; nothing where the run's folder is gone."""
    value = {**record, "time": time.time()}
    if is_gone(run.path):
        return
    try:
        write_json(run.rank_exit(rank), value)
        _reserved(run, rank).unlink(missing_ok=True)
    except OSError:
        with contextlib.suppress(OSError):  # the launcher looks at the disk when a rank says nothing
            _reserved(run, rank).unlink(missing_ok=True)
            write_json(run.rank_exit(rank), value)


def ran_out_of_disk(error: BaseException, run: RunFolder) -> bool:
    """Whether an error, or what it came from, is a write for which the disk had no space."""
    for link in _links(error):
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if FULL.search(str(link)) or (WRITE_FAILED.search(str(link)) and is_full(run.path)):
            return True
    return False


def lost_its_peer(error: BaseException) -> bool:
    """Whether an error, or what it came from, only says that another rank has gone.

    torch raises such errors of gloo and NCCL as plain RuntimeErrors or of its own types; a tracker's server that refuses is another's.
    """
    torchs = (link for link in _links(error) if type(link) is RuntimeError or type(link).__module__.startswith("torch"))
    return any(PEER_GONE.search(str(link)) for link in torchs)


def _links(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and what it came from."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def describe_full_disk(error: BaseException, run: RunFolder) -> str:
    """Returns what the user reads."""
    place = (error.filename if isinstance(error, OSError) else None) or run.path
    hint = f"the last checkpoint is as it was; free some space, then: make resume RUN={run.name}"
    return f"error: {place}: no space is left on the disk\n\nhint: {hint}"


def _reserved(run: RunFolder, rank: int) -> Path:
    return run.rank_exit(rank).with_suffix(".reserved")
