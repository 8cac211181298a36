"""A resume on a full disk ends with one message that names the run's folder, and changes nothing there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft_play.errors import DataError, HardwareError
from sft_play.files import disk_errors_told, write_json
from sft_play.launch.resume import restored_on_error
from sft_play.prepare import place_hint
from sft_play.runs.folder import RunFolder, cache_folder


@pytest.fixture
def small(tmp_path: Path) -> Iterator[RunFolder]:
    """The folder of a run on a disk of 64 KiB."""
    run = RunFolder(tmp_path / "mine")
    run.path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(run.path)], capture_output=True, check=False
    ).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield run
    finally:
        subprocess.run(["umount", str(run.path)], check=True, timeout=20)


def fill(folder: Path) -> None:
    with pytest.raises(OSError, match="No space left"), (folder / "filler").open("wb", buffering=0) as stream:
        while True:
            stream.write(b"x" * 4096)


def test_what_is_written_names_the_run_that_is_full_and_not_the_cache(small: RunFolder) -> None:
    small.prepared.write_text("{}")
    fill(small.path)
    with (
        pytest.raises(HardwareError, match="no space is left on the disk") as refused,
        disk_errors_told(cache_folder(), place_hint),
    ):
        write_json(small.prepared, {"model": "x" * 9000})
    assert (refused.value.exit_code, refused.value.place) == (3, str(small.prepared))
    assert str(small.path) in (refused.value.hint or "") and str(cache_folder()) not in refused.value.render()
    assert small.prepared.read_text() == "{}" and sorted(path.name for path in small.path.iterdir()) == [
        "filler",
        "prepared.json",
    ]


def test_what_a_refused_resume_changed_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "prepared.json"
    path.write_text("old")
    for change in (lambda: path.write_text("new"), path.unlink):
        with pytest.raises(DataError), restored_on_error(path):
            change()
            raise DataError("no rows")
        assert path.read_text() == "old"
    inode = path.stat().st_ino
    with pytest.raises(DataError), restored_on_error(path):
        raise DataError("no rows")
    assert path.stat().st_ino == inode, "what nobody changed is not written again"
