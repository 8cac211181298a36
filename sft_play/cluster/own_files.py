"""The files of this machine that the others of a cluster shall have, and their sha256: as many as can be read within a few seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from sft_play.cluster.bring import code_files, project
from sft_play.cluster.examined import Wanted
from sft_play.cluster.probe import OutOfTime, sha256
from sft_play.config.schema import Config
from sft_play.errors import UserError
from sft_play.files import file_sha256
from sft_play.runs.prepared_index import lookup, sources_of

NOT_CODE = ("docs/", "tests/", "benchmarks/", "examples/")
"""Files of the project that no run executes."""
MOST_CODE_BYTES = 16 * 2**20
"""Of one file of the project: a larger one is no code, and train-cluster compares it when it sends it."""
MOST_SOURCE_BYTES, MOST_SOURCES = 512 * 10**6, 2_000
"""Of the data's files: more would not be read within the time."""


def wanted_of(config: Config | None, port: int, seconds: float) -> Wanted:
    """Returns what the machines shall agree with: this machine's code and, with a configuration, data and backend.

    The data's files are read for `seconds` at most.
    """
    code = {name: file_sha256(project() / name) for name in _code()}
    if config is None:
        return Wanted(port=port, code=code)
    known = lookup(config)
    splits = [split for split in (known.train, known.validation) if split] if known else []
    until = time.monotonic() + seconds
    paths, more_left = _listed(config, until)
    sources, left = _hashed(paths, until)
    return Wanted(
        port=port,
        backend=config.launch.backend,
        code=code,
        sources=sources,
        left_files=len(left),
        left_bytes=sum(left),
        more_left=more_left,
        prepared={Path(split.path).name: split.fingerprint for split in splits},
        shared=config.data.sync == "shared",
    )


def _code() -> list[str]:
    """Returns the files that a run executes, relative to the project; the package's own where there is no git."""
    try:
        names = code_files()
    except UserError:
        names = [str(path.relative_to(project())) for path in sorted((project() / "sft_play").rglob("*.py"))]
    files = ((name, project() / name) for name in names if not name.startswith(NOT_CODE))
    return [name for name, path in files if path.is_file() and path.stat().st_size <= MOST_CODE_BYTES]


def _listed(config: Config, until: float) -> tuple[list[Path], bool]:
    """Returns the data's files that lie here, and whether there are more than could be listed by `until`."""
    paths: list[Path] = []
    for path in _data_files(config):
        if time.monotonic() > until:
            return sorted(paths), True
        paths.append(path)
    return sorted(paths), False


def _data_files(config: Config) -> Iterator[Path]:
    for source in sources_of(config):
        path = Path(source.path).expanduser()
        if path.is_file():
            yield path
        elif path.is_dir():
            yield from (one for one in path.rglob("*") if one.is_file())
        elif "*" in path.name and path.parent.is_dir():
            yield from (one for one in path.parent.glob(path.name) if one.is_file())


def _hashed(paths: list[Path], until: float) -> tuple[dict[str, str], list[int]]:
    """Returns file, as a configuration names it -> sha256, and the bytes of each that is too many, too large, or was not read by `until`."""
    here, found, left, room = Path.cwd(), dict[str, str](), list[int](), MOST_SOURCE_BYTES
    for path in paths:
        size = path.stat().st_size
        try:
            digest = sha256(path, until) if size <= room and len(found) < MOST_SOURCES else None
        except OutOfTime:
            digest = None
        if digest is None:
            left.append(size)
            continue
        room -= size
        found[str(path.relative_to(here) if path.is_relative_to(here) else path)] = digest
    return found, left
