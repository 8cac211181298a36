"""The space that a launch requires, a run on a full disk, and files torn by a crash."""

from __future__ import annotations

import errno
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft_play.config.schema import Config, ModelConfig
from sft_play.errors import DataError, HardwareError
from sft_play.files import append_json_line, append_text, disk_problem, errno_of, read_json_lines, side_file
from sft_play.launch.resume import restore_on_error
from sft_play.launch.run_folder import explain_disk_errors, has_started, read_events, require_disk_space
from sft_play.launch.runs import summary_of
from sft_play.runs.folder import RunFolder
from sft_play.training.metrics import rows_until
from tests.documents import on_page
from tests.plans import rank_plan, simple_plan


def test_a_disk_that_is_too_small_is_refused_before_the_launch(tmp_path: Path) -> None:
    plan = simple_plan(ranks=(rank_plan(memory_bytes={"trained": 10**18}),))
    with pytest.raises(HardwareError) as refused:
        require_disk_space(plan, Config(model=ModelConfig(name="x")), RunFolder(tmp_path))
    assert on_page("no-space-left", refused.value.message)


def test_a_full_disk_is_reported_with_its_place(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "mine")
    with pytest.raises(HardwareError, match="no space is left on the disk") as refused, explain_disk_errors(run):
        Path("/dev/full").write_bytes(b"x")
    assert (refused.value.exit_code, refused.value.place) == (3, str(run.path))
    assert refused.value.hint == "free some space, then: the same command again"


@pytest.mark.parametrize(
    ("error", "number", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC, "no space is left on the disk"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), errno.EDQUOT, "the disk quota is used up"),
        (
            RuntimeError("I/O error: No space left on device (os error 28)"),
            errno.ENOSPC,
            "no space is left on the disk",
        ),
        (ValueError("shapes differ"), None, "shapes differ"),
    ],
)
def test_only_failed_writes_are_disk_problems(error: Exception, number: int | None, words: str) -> None:
    assert errno_of(error) == number
    assert words in disk_problem(error)


@pytest.fixture
def limited() -> Iterator[None]:
    """Limit files of this process to 64 KiB by the system: writes are short first, then fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_row_is_appended_whole_or_not_at_all(tmp_path: Path, limited: None) -> None:
    path = tmp_path / "metrics.jsonl"
    first = "1" * 40_000 + "\n"
    append_text(path, first, sync=False)
    with pytest.raises(OSError, match="No space left"):
        append_text(path, "2" * 40_000 + "\n", sync=False)  # the system takes 25,535 bytes of it
    assert path.read_text() == first
    append_text(path, "3\n", sync=False)
    assert path.read_text() == first + "3\n"


def test_a_refused_resume_restores_what_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "prepared.json"
    path.write_text("old")
    for change in (lambda: path.write_text("new"), path.unlink):
        with pytest.raises(DataError), restore_on_error(path):
            change()
            raise DataError("no rows")
        assert path.read_text() == "old"
    inode = path.stat().st_ino
    with pytest.raises(DataError), restore_on_error(path):
        raise DataError("no rows")
    assert path.stat().st_ino == inode, "what nobody changed is not written again"


# Files next to the training: torn ones are read as far as they go, and a full disk that refuses them ends no run.


TORN = '{"event": "failed", "reason": "Größe'.encode()[:-2]
"""A line that a crash has cut inside a letter."""


def test_a_run_with_torn_files_is_listed_and_found_again(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.config.write_text("{}")
    run.events.write_bytes(
        b'{"event": "started", "time": 1, "node": 0}\n7\n{"time": 3}\n' + TORN[: TORN.index("ö".encode()) + 1]
    )
    rows = b'{"kind": "train", "step": 1, "loss": 2.0}\n{"kind": "train", "step": 2, "loss": 1.5}\n'
    run.metrics.write_bytes(rows + b'{"step": "x"}\n{"kind": "train", "step": 3, "what": "\xc3')
    assert [event["event"] for event in read_events(run)] == ["started"]
    assert has_started(run)
    summary = summary_of(run)
    assert (summary.state, summary.step, summary.loss) == ("killed", 2, 1.5)
    assert [row["step"] for row in rows_until(run.metrics, 1)] == [1]


def test_a_full_disk_gives_one_warning_until_space_is_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full, room = Path("/dev/full"), tmp_path / "a.jsonl"
    for path, warned in ((full, True), (full, False), (room, False), (full, True)):
        with side_file(path, "the answers"):
            path.write_text("x") if path == full else append_json_line(path, {"step": 1})
        error = capsys.readouterr().err
        assert (
            "warning: /dev/full: the answers could not be written: no space is left on the disk; training continues"
            in error
        ) is warned
    assert read_json_lines(room) == [{"step": 1}]
