"""Checksums of files (a checkpoint's manifest, models, data), `states.json`, and the space that a checkpoint needs. No
torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.config.reader import misfit
from sft_play.errors import CheckpointError
from sft_play.files import file_sha256, read_json, sync_path, text_sha256, write_json
from sft_play.runs.folder import cache_folder
from sft_play.text import gib, tell

NAME = "manifest.json"
PART = re.compile(r"\.manifest-rank(\d+)\.json")
ALGORITHM = "xxh3_128"
"""Algorithm, and the key of a file's checksum."""
BLOCK_BYTES = 2**20
"""Bytes per read, so that they stay in the processor's cache while they are hashed."""
THREADS = 4
"""Most files that are hashed in parallel."""

Facts = dict[str, Any]
"""`bytes` of a file, and its checksum under the algorithm's name."""


def describe(folder: Path, files: Iterable[Path]) -> dict[str, Facts]:
    """Return sizes and checksums of `files` by their names relative to `folder`."""
    paths = sorted(set(files))

    def describe_file(path: Path) -> Facts:
        return {"bytes": path.stat().st_size, ALGORITHM: checksum(path)}

    with ThreadPoolExecutor(_threads(len(paths))) as pool:
        return {
            path.relative_to(folder).as_posix(): facts
            for path, facts in zip(paths, pool.map(describe_file, paths), strict=True)
        }


def sync(files: Iterable[Path]) -> None:
    """Sync files to the disk. Raise `OSError`."""
    for path in sorted(set(files)):
        sync_path(path)


def write_part(folder: Path, rank: int, files: Mapping[str, Facts]) -> None:
    """Write a rank's part of the manifest, for `seal`."""
    write_json(folder / f".manifest-rank{rank}.json", {"files": files})


def seal(folder: Path, *, ranks: Iterable[int]) -> None:
    """Join the parts of `ranks` to `manifest.json`, describe the files that no part contains, and sync the folder.

    Raise `OSError` if a part or a file is missing, or a file's size differs from its rank's description.
    """
    parts = [path for path in folder.iterdir() if PART.fullmatch(path.name)]
    missing = set(ranks) - {int(path.name.removeprefix(".manifest-rank").removesuffix(".json")) for path in parts}
    if missing:
        names = ", ".join(map(str, sorted(missing)))
        raise OSError(f"what rank {names} wrote is not in `{folder}`: do all ranks see one folder?")
    files: dict[str, Facts] = {}
    for part in parts:
        files |= read_json(part)["files"]
    for name, facts in files.items():
        size = (folder / name).stat().st_size
        if size != facts["bytes"]:
            raise OSError(f"`{name}` has {size} bytes, not {facts['bytes']} as it was written")
    unlisted = [path for path in _files(folder) if path.relative_to(folder).as_posix() not in files]
    sync(unlisted)
    files |= describe(folder, unlisted)
    write_json(folder / NAME, {"files": dict(sorted(files.items()))})
    for part in parts:
        part.unlink()
    _sync_folders(folder)


def sync_below(folder: Path) -> None:
    """Sync every file below `folder`, and the folders, to the disk."""
    sync(_files(folder))
    _sync_folders(folder)


def verify(folder: Path, *, needed: Callable[[str], bool] | None = None, sizes_only: bool = False) -> str | None:
    """Return why a checkpoint is damaged, or `None` if every file exists and is unchanged.

    `needed` selects files by name (relative to `folder`); by default all are checked. `sizes_only` reads the manifest
    only, for callers without time for more.
    """
    if not folder.is_dir():
        return "it is not there"
    try:
        manifest: dict[str, Any] = read_json(folder / NAME, follow=False)
        listed: dict[str, Facts] = dict(manifest["files"].items())
    except FileNotFoundError:
        return "it has no manifest: it was never completed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read: {error}"
    if not listed:
        return "its manifest lists no file"
    outside = next((name for name in listed if Path(name).is_absolute() or ".." in Path(name).parts), None)
    if outside is not None:
        return f"its manifest names `{outside}`, which is not in the folder"
    chosen = {name: facts for name, facts in listed.items() if needed is None or needed(name)}
    return damage(folder, chosen, sizes_only=sizes_only)


def damage(folder: Path, files: Mapping[str, Facts], *, sizes_only: bool = False) -> str | None:
    """Return the first difference between `files` and their description, or `None`."""

    def wrong_content(name: str) -> str | None:
        try:
            if checksum(folder / name) != files[name][ALGORITHM]:
                return f"`{name}` has another checksum than the manifest says"
        except (OSError, KeyError, TypeError, ValueError) as error:
            return f"`{name}` cannot be checked: {error}"
        return None

    # Sizes first: comparing them costs nothing.
    if (reason := next(filter(None, (_wrong_size(folder, *item) for item in files.items())), None)) or sizes_only:
        return reason
    with ThreadPoolExecutor(_threads(len(files))) as pool:
        return next(filter(None, pool.map(wrong_content, files)), None)


def checksum(path: Path) -> str:
    """Return the hexadecimal checksum of a file."""
    import xxhash

    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as stream:
        block = memoryview(bytearray(BLOCK_BYTES))
        while count := stream.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def _wrong_size(folder: Path, name: str, facts: Facts) -> str | None:
    try:
        status = (folder / name).lstat()  # a link could lead anywhere, and a pipe or a device never ends
        if not stat.S_ISREG(status.st_mode):
            return f"`{name}` is not a plain file"
        size = status.st_size
        return None if size == facts["bytes"] else f"`{name}` has {size} bytes, not {facts['bytes']}"
    except FileNotFoundError:
        return f"`{name}` is missing"
    except (OSError, KeyError, TypeError, ValueError) as error:
        return f"`{name}` cannot be checked: {error}"


def _sync_folders(folder: Path) -> None:
    sync([*(path for path in folder.rglob("*") if path.is_dir()), folder])


def _threads(files: int) -> int:
    return max(1, min(THREADS, files, len(os.sched_getaffinity(0))))


def _files(folder: Path) -> list[Path]:
    """Return every file below `folder` except the manifest and its parts."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != NAME and not PART.fullmatch(p.name))


# `states.json` of a checkpoint: what a launcher must know about its states before it starts workers. No torch.


STATES_NAME = "states.json"
FORMAT = 1
"""Format version, increased when older files can no longer be read."""


def optimizer_file(rank: int) -> str:
    """Return the name of the file with a rank's pieces of optimizer states."""
    return f"optimizer-rank{rank}.safetensors"


def random_file(rank: int) -> str:
    """Return the name of the file with a rank's random states."""
    return f"rng-rank{rank}.safetensors"


def is_state_file(name: str) -> bool:
    """Return whether a checkpoint's file contains states, which only `make resume` reads."""
    return name == STATES_NAME or name.startswith(("optimizer-rank", "rng-rank"))


@dataclass(frozen=True, kw_only=True, slots=True)
class StatesFacts:
    """The content of `states.json`."""

    format: int
    strategy: str
    world_size: int
    optimizer: str
    """Name of its class."""
    reshardable: bool
    """Whether its states can be resharded: one number per element of a parameter, updated independently of the
    others.
    """
    files: int
    """Ranks that wrote pieces: all where states are sharded, else one."""
    groups: list[dict[str, Any]]
    scheduler: dict[str, Any] | None
    scaler: dict[str, Any] | None
    engine: dict[str, Any] | None
    """DeepSpeed's counters."""
    counters: dict[str, Any]
    """Counters of `training_metrics.json` since the run's start."""
    own: dict[str, Any] | None = None
    """For ranks with separate states under DDP (local steps): what each has trained since the last average; else
    `None`.
    """


def read_facts(checkpoint: Path) -> StatesFacts:
    """Read `states.json`. Raise `CheckpointError` if it is missing (an older version wrote pickles) or invalid."""
    path = checkpoint / STATES_NAME
    hint = (
        "resume it with the version that wrote it, which its stamp.json names (`make stamp`), or start a new run from"
        " its weights"
    )
    try:
        facts: dict[str, Any] = read_json(path, follow=False)
        if (key := misfit(facts, StatesFacts)) is not None:
            raise TypeError(f"`{key}` is of another type")
        if facts["format"] != FORMAT:
            text = f"its states have the format {facts['format']}; this version reads {FORMAT}"
            raise CheckpointError(text, place=str(path), hint=hint)
        return StatesFacts(**facts)
    except FileNotFoundError:
        text = (
            f"`{checkpoint.name}` has no `{STATES_NAME}`: an older version wrote it, with states in pickles, which are"
            " no longer read"
        )
        raise CheckpointError(text, place=str(checkpoint), hint=hint) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"it cannot be read: {error}", place=str(path), hint="use an earlier checkpoint"
        ) from error


SHARDED = frozenset({"zero1", "zero2", "zero3", "fsdp2"})


def check_states(checkpoint: Path, *, strategy: str, world_size: int) -> None:
    """Raise `CheckpointError` if a checkpoint's states do not fit another strategy or number of processes.

    Only an optimizer whose states cannot be resharded is refused: one that needs complete parameters, when they are
    sharded.
    """
    facts = read_facts(checkpoint)
    same = facts.strategy == strategy and (facts.world_size == world_size or strategy not in SHARDED)
    if facts.reshardable or same or not {facts.strategy, strategy} & SHARDED:
        return
    raise CheckpointError(
        f"the states of the optimizer `{facts.optimizer}` cannot be resharded: they were written by {facts.world_size}"
        f" processes under {facts.strategy}, and {world_size} under {strategy} would continue",
        place=str(checkpoint),
        hint=(
            f"resume with NUM_GPUS={facts.world_size} and the command that started the run, or start a new run with"
            " `train.optim: adamw_torch`, whose states fit any number of processes"
        ),
    )


# Space for a checkpoint on the disk and in memory.


SPARE_BYTES = 2**20
"""Allowance for a checkpoint's small files: JSON, the tokenizer's settings, folders."""
SPARE_SHARE = 0.02
"""Overhead of a file system: blocks, indirect blocks, journals."""
SPARE_MEMORY_BYTES = 512 * 2**20
"""Host memory that must stay free when states are copied."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a checkpoint needs, and bytes that are free."""

    needed: int
    free: int

    @property
    def enough(self) -> bool:
        return self.free >= self.needed

    def __str__(self) -> str:
        return f"it needs {gib(self.needed)} and {gib(self.free)} are free"


def with_spare(predicted: int) -> int:
    """Return the bytes that must be free to write `predicted` bytes of files."""
    return predicted + int(predicted * SPARE_SHARE) + SPARE_BYTES


# Checksums of large files of models and data, cached so that each file is read once.


HASHED_TOGETHER = 8
WORTH_SAYING_BYTES = 4 * 2**30
BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Name of a file in the hub's cache: the sha256 of its content, or git's sha1 for a small file."""


def blob_of(path: Path) -> str | None:
    """Return the checksum in the hub's cache of a snapshot's file, which is a link into `blobs/`."""
    target = path.resolve()
    return target.name if path.is_symlink() and target.parent.name == "blobs" and BLOB.fullmatch(target.name) else None


def digests_of(paths: Sequence[Path], what: str) -> list[str]:
    """Return the sha256 of each file's content; `what` names the files to the user. Raise `OSError` for an unreadable
    file.

    The cache `cache/digests/` has one record for all `paths`, since a folder may contain a hundred thousand small
    files, and is valid until a file's size, times or inode change. A cache that cannot be written only costs the time
    again.
    """
    names = [str(path.resolve()) for path in paths]
    record = cache_folder() / "digests" / f"{text_sha256(chr(10).join(names))}.json"
    facts = dict(zip(names, map(_facts, paths), strict=True))
    recorded = _known(record)
    unread = [Path(name) for name, fact in facts.items() if recorded.get(name, [None])[:-1] != fact]
    size = sum(int(facts[str(path)][0]) for path in unread)
    if size > WORTH_SAYING_BYTES and os.environ.get("RANK", "0") == "0":
        tell(f"reading {size / 2**30:.0f} GiB of {what} for their checksums, this once")
    with ThreadPoolExecutor(HASHED_TOGETHER) as pool:  # hashing releases the GIL
        digests = dict(zip(map(str, unread), pool.map(file_sha256, unread), strict=True))
    entries = {name: [*fact, digests.get(name) or recorded[name][-1]] for name, fact in facts.items()}
    if unread:
        with contextlib.suppress(OSError):
            write_json(record, entries)
    return [str(entries[name][-1]) for name in names]


def _known(record: Path) -> dict[str, list[str | int]]:
    try:
        return {str(name): list(facts) for name, facts in read_json(record).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _facts(path: Path) -> list[str | int]:
    """Return what changes with a file, including the change time, since a copy may preserve the modification time."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
