"""Files beside the training: torn ones are read as far as they go, and a full disk that takes none of them ends no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.files import append_json_line, read_json_lines, side_file
from sft_play.launch.run_folder import has_started, read_events
from sft_play.launch.runs import summary_of
from sft_play.runs.folder import RunFolder
from sft_play.training.metrics import rows_until

TORN = '{"event": "failed", "reason": "Größe'.encode()[:-2]
"""A line that a crash has cut inside a letter."""


def test_a_run_with_torn_files_is_listed_and_found_again(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.config.write_text("{}")
    run.events.write_bytes(b'{"event": "started", "time": 1, "node": 0}\n7\n{"time": 3}\n' + TORN[: TORN.index("ö".encode()) + 1])
    rows = b'{"kind": "train", "step": 1, "loss": 2.0}\n{"kind": "train", "step": 2, "loss": 1.5}\n'
    run.metrics.write_bytes(rows + b'{"step": "x"}\n{"kind": "train", "step": 3, "what": "\xc3')
    assert [event["event"] for event in read_events(run)] == ["started"]
    assert has_started(run)
    found = summary_of(run)
    assert (found.state, found.step, found.loss) == ("killed", 2, 1.5)
    assert [row["step"] for row in rows_until(run.metrics, 9)] == [1, 2]
    assert [row["step"] for row in rows_until(run.metrics, 1)] == [1]


def test_a_full_disk_gives_one_warning_until_there_is_room_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full, room = Path("/dev/full"), tmp_path / "a.jsonl"
    for path, warned in ((full, True), (full, False), (room, False), (full, True)):
        with side_file(path, "the answers"):
            append_json_line(path, {"step": 1})
        said = capsys.readouterr().err
        assert (
            "warning: /dev/full: the answers could not be written: no space is left on the disk; training continues" in said
        ) is warned
    assert read_json_lines(room) == [{"step": 1}]
