"""A slowed rank is named in the terminal's panel, in `make watch`, on the page and in the report."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sft_play.launch.panel import Follower, panel
from sft_play.report.page import record_of
from sft_play.runs.folder import RunFolder
from sft_play.runs.progress import findings
from tests.launcher import Launcher
from tests.quota import slowed, worker_of
from tests.waiting import until

SLOW = re.compile(r"rank 1 is [6-9]\d% slower than the others")
"""A rank with a twentieth of a core; on a busy machine any rank may be a little slower for a while."""


class Terminal:
    """A pseudo-terminal, and all that was written to it."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.openpty()
        self.text = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self.ours, 65536):
                self.text += data.decode(errors="replace")

    def wait(self, there: Callable[[], object], process: subprocess.Popen[Any]) -> None:
        until(there, process=process, seconds=240, pause=0.1, explanation=lambda: self.text[-4000:])


@contextlib.contextmanager
def on_a_terminal(launcher: Launcher, *words: str) -> Iterator[tuple[Terminal, subprocess.Popen[str]]]:
    terminal = Terminal()
    command = [sys.executable, "-m", "sft_play", *words]
    shown = {"stdin": subprocess.DEVNULL, "stdout": terminal.theirs, "stderr": terminal.theirs, "text": True}
    process = subprocess.Popen(
        command,
        env=launcher.environment | {"TERM": "xterm", "COLUMNS": "120", "LINES": "50"},
        cwd=launcher.folder,
        **shown,
    )  # type: ignore[call-overload]
    try:
        yield terminal, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(240)


@pytest.mark.broad
def test_a_slowed_rank_is_named_live_on_the_page_and_in_the_report(tmp_path: Path, tiny: Path) -> None:
    launcher = Launcher(tmp_path, tiny)
    words = (
        "train-distributed",
        f"CONFIG={launcher.config}",
        "NUM_GPUS=2",
        "RUN_NAME=live",
        "TRAIN_MAX_STEPS=2000",
        "TRAIN_SAVE_STEPS=500",
        "LAUNCH_BALANCE=off",
        "TRAIN_GLOBAL_BATCH_SIZE=8",
    )
    with on_a_terminal(launcher, *words) as (terminal, process):
        run = RunFolder(launcher.runs / "live")
        terminal.wait(lambda: "live: training" in terminal.text, process)
        before = terminal.text[: terminal.text.index("live: ")]
        assert before.count("\n") <= 20, "a run begins in few lines"
        assert re.search(r"preparing train.*rows", before), "a bar, which goes when the work is done"
        assert "make watch RUN=live" in before and "make stop RUN=live" in before
        with slowed(worker_of(process.pid, 1), 0.05):
            terminal.wait(lambda: SLOW.search(terminal.text), process)
            assert re.search(r"rank 1\x1b.*GiB", terminal.text) and "tokens/s" in terminal.text
            assert "step 1/2000" not in terminal.text, "the panel says it"
            terminal.wait(lambda: SLOW.search(str(record_of(run)["findings"])), process)  # what the page shows
            watched = launcher.start("watch", "RUN=live")
            stopped = launcher("stop", "RUN=live")
            assert stopped.code == 0, stopped.err
        code, output = watched.end(within=240)
        assert code == 0 and SLOW.search(output) and output.endswith("`live`: stopped\n"), output
        process.wait(240)
    with on_a_terminal(launcher, "eval", "RUN=live", f"DATA={launcher.folder / 'rows.jsonl'}") as (other, process):
        assert process.wait(240) == 0, other.text
        assert re.search(r"held-out loss.*of \d+ rows", other.text) and re.search(
            r"answering.*of \d+ answers", other.text
        )
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert SLOW.search(page) and '"state":"stopped"' in page.replace(" ", "")
    assert "report: " in terminal.text
    row = [json.loads(line) for line in run.metrics.read_text().splitlines()][-2]
    parts = [row[f"rank_{name}_seconds"] for name in ("data", "forward", "backward", "communication", "optimizer")]
    assert all(sum(seconds) <= 1.2 * row["step_seconds"] for seconds in zip(*parts, strict=True))
    assert row["rank_communication_seconds"][0] > row["rank_communication_seconds"][1], "rank 0 waits for rank 1"
    assert all(
        len(row[f"rank_{name}"]) == 2 for name in ("memory_gib", "memory_limit_gib", "memory_plan_gib", "cpu_percent")
    )


def rows(count: int = 10, **lists: Any) -> list[dict[str, Any]]:
    return [{"kind": "train", "step": step + 1, "loss": 2.0, "step_seconds": 1.0, **lists} for step in range(count)]


@pytest.mark.parametrize(
    ("lists", "named"),
    [
        ({"rank_tokens_per_second": [100.0, 0.0, 85.0]}, None),
        (
            {"rank_memory_gib": [7.7, 1.0], "rank_memory_limit_gib": [8.0, 8.0]},
            "the memory of rank 0 is within 5% of its limit",
        ),
        ({"rank_data_seconds": [0.01, 0.3]}, "rank 1 waits 30% of each step for data"),
        (
            {"rank_throttled": [0.0, 40.0], "rank_temperature": [60.0, 91.0]},
            "the GPU of rank 1 is throttled 40% of the time (91 °C)",
        ),
    ],
)
def test_causes_of_a_slow_run_are_explained(lists: dict[str, Any], named: str | None) -> None:
    texts = [finding.text for finding in findings(rows(**lists))]
    assert len(texts) == (named is not None) and (named is None or texts[0].startswith(named))
    assert findings(rows(2, **lists)) == [], "too few steps to tell"


@pytest.mark.parametrize(
    ("losses", "held_out", "named"),
    [
        (
            [2.0, 9.0, 11.0, 10.5, 10.8],
            [],
            "the loss rose from 2.000 at step 0 to 10.800, the median of steps 2 to 4, so the training diverged",
        ),
        ([2.0, 1.0, 0.5, 0.2], [2.0, 1.5, 4.25], "the held-out loss rose from 2.000 at step 0 to 4.250 at step 2"),
        ([0.1, 0.9, 0.5, 0.8], [2.0, 2.9], None),
        ([2.0, None, 2.5, 2.8], [], None),
    ],
)
def test_a_loss_far_above_its_start_is_a_finding(
    losses: list[float | None], held_out: list[float], named: str | None
) -> None:
    train = [{"kind": "train", "step": step, "loss": loss, "learning_rate": 0.05} for step, loss in enumerate(losses)]
    rows = [*train, *({"kind": "eval", "step": step, "eval_loss": loss} for step, loss in enumerate(held_out))]
    texts = {finding.text: finding.remedy for finding in findings(rows)}
    assert list(texts) == [named] * (named is not None)
    assert all("TRAIN_LEARNING_RATE=0.005" in remedy for remedy in texts.values())
    high = [row | {"learning_rate": 5.0} for row in rows]
    assert all("TRAIN_LEARNING_RATE=auto" in finding.remedy for finding in findings(high))


def test_the_panel_shows_empty_and_torn_runs(tmp_path: Path) -> None:
    """A folder without any file, and torn rows."""
    run, rich = RunFolder(tmp_path), pytest.importorskip("rich.console")
    follower = Follower(run.metrics)

    def text() -> str:
        console = rich.Console(width=100, record=True, file=(tmp_path / "console").open("w"))
        console.print(panel(run, follower.look(), "running"))
        return str(console.export_text())

    assert "loading" in text()
    run.metrics.write_text('{"kind": "train", "step": 7, "loss": null, "rank_memory_gib": [null]}\n{"kind"')
    assert "7/?" in text()
    with run.metrics.open("a") as stream:
        stream.write(': "eval", "step": 7, "eval_loss": 1.5}\n')
    assert "step 7: held-out loss 1.5000" in text()
