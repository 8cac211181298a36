"""The progress of a run and what is watched beside it: lines and time left, cards, collectives, a worker's end."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerState

from sft_play.training import faults, metrics
from sft_play.training.metrics import Sampler
from tests.conftest import ROOT
from tests.waiting import until


def train(
    monkeypatch: pytest.MonkeyPatch, log: io.StringIO, console: io.StringIO | None, *, panel: bool = False
) -> metrics.Progress:
    """Goes on from step 500 of 1000: a minute of start-up with the first step, then steps of 0.125 s."""
    now = 1000.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    shown = metrics.Progress(console, log, panel=panel)
    state, nothing = TrainerState(global_step=500, max_steps=1000), {"args": None, "control": None}
    shown.on_train_begin(state=state, **nothing)
    for step in range(501, 701):
        seconds = 60 if step == 501 else 0.125
        now += seconds
        state.global_step = step
        logs: dict[str, Any] = {"rank_loss": 1.0, "loss": 1.0, "tokens_per_second": 9.0, "step_seconds": seconds}
        shown.on_log(state=state, logs=logs, **nothing)
    return shown


def test_time_left_after_a_resume_leaves_the_start_out(monkeypatch: pytest.MonkeyPatch) -> None:
    console = io.StringIO()
    train(monkeypatch, io.StringIO(), console)
    first, second, *_ = console.getvalue().splitlines()
    assert first == "step 501/1000: loss 1.0000, 9 tokens/s"
    assert second == "step 581/1000: loss 1.0000, 9 tokens/s, 0:52 left"


@pytest.mark.parametrize(("console", "panel"), [(None, False), (io.StringIO(), False), (io.StringIO(), True)])
def test_the_log_has_the_lines_whatever_the_console_is(
    console: io.StringIO | None, panel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = io.StringIO()
    shown = train(monkeypatch, log, console, panel=panel)
    shown.on_log(args=None, control=None, state=TrainerState(global_step=700, max_steps=1000), logs={"eval_loss": 0.5})
    lines = log.getvalue().splitlines()
    assert lines[0] == "step 501/1000: loss 1.0000, 9 tokens/s"
    assert lines[-1] == "step 700/1000: held-out loss 0.5000" and len(lines) == len(set(lines))
    if console is not None:
        assert console.getvalue().splitlines() == (lines[-1:] if panel else lines)


def test_a_card_is_sampled_and_what_fails_is_asked_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Nvml(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no {name}")

    card, reasons = SimpleNamespace(number=1, handle=0, card=0), iter([0x4, 0x40])
    nvml = Nvml(
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=50),
        nvmlDeviceGetPowerUsage=lambda _: 250_000,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: next(reasons),
    )
    sampler = Sampler(1)
    for _ in range(2):
        sampler.look(nvml, card)
    assert sampler.take() == {"utilisation": 50.0, "power_watts": 250.0, "throttled": 50.0}, "a power cap is no fault"
    assert sampler.take() == {}
    assert capsys.readouterr().err.count("is read no more") == 2


def test_operations_are_counted_over_all_groups_and_kept_as_json(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch import distributed

    before = faults.collectives_begun() or 0
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        other = distributed.new_group([0])
        for group in (None, None, other):
            distributed.all_reduce(torch.ones(4), group=group)
        assert faults.collectives_begun() == before + 3
        faults.keep_trace(tmp_path / "trace.json")
    finally:
        distributed.destroy_process_group()
    kept = json.loads((tmp_path / "trace.json").read_text())
    assert "gloo:all_reduce" in json.dumps(kept["entries"])


BEGIN = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sft_play.training.faults import end
folder = Path(sys.argv[1])
def work(name, seconds):
    time.sleep(seconds)
    (folder / name).touch()
atexit.register(lambda: (folder / "exit-functions").touch())
pool = ThreadPoolExecutor(1)
pool.submit(int)
(folder / "ready").touch()
"""


@pytest.mark.parametrize(
    ("thread", "found"),
    [
        ("threading.Thread(target=work, args=('sent', 0.5)).start()", {"sent", "exit-functions"}),
        ("pool.submit(work, 'sent', 0.5)", {"sent", "exit-functions"}),
        ("threading.Thread(target=work, args=('late', 600)).start()", {"exit-functions"}),
    ],
)
def test_threads_get_some_seconds_and_exit_functions_their_turn(tmp_path: Path, thread: str, found: set[str]) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"{BEGIN}{thread}\nend(0)", str(tmp_path)], cwd=ROOT)
    try:
        until(lambda: (tmp_path / "ready").exists() or child.poll() is not None, seconds=120)
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()
        child.wait(timeout=10)
    assert {path.name for path in tmp_path.iterdir()} - {"ready"} == found
