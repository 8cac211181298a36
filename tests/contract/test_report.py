"""`make report` and `make ui`: a run's files as a page in Chromium and behind the server's check."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sft_play.files import write_json
from sft_play.report.page import POINTS, curves_of, record_of
from sft_play.runs.folder import RunFolder
from tests.browser import browser
from tests.conftest import ROOT, Program
from tests.waiting import until

INSIDE = "[...document.querySelectorAll('td, th')].every((one) => one.getBoundingClientRect().right <= innerWidth)"
"""Whether every cell can be seen without scrolling to the side."""
HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"


def made_run(runs: Path, name: str, *, model: str = "a model", rank: int = 16) -> Path:
    """Write the files that a run leaves."""
    folder = runs / name
    evaluation = folder / "eval" / "step-000040"
    ranks = [{"rank": number, "device": "cpu", "memory_bytes": {"frozen": 2**30, "free": 2**30}} for number in (0, 1)]
    plan = {
        "steps": 40,
        "strategy": "ddp",
        "world_size": 2,
        "num_nodes": 1,
        "ranks": ranks,
        "reasons": {"strategy": HOSTILE},
    }
    rows = [{"kind": "train", "step": s, "loss": 3 / s, "rank_tokens": [9, 7], "grad_norm": 1.0} for s in range(1, 41)]
    rows += [
        rows.pop() | {"grad_norm": float("nan")},
        {"kind": "eval", "step": 40, "eval_loss": 1.0, "eval_rougeL": 0.5},
    ]
    events = [
        {"event": "resumed", "time": 2.0, "checkpoint": "step-000020"},
        {"event": "finished", "time": 3.0, "code": 0},
    ]
    figures = {"loss": 1.0, "answers": 1, "rougeL": {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 30}}
    others = figures | {"loss": 2.5, "settings": {"data": "others.jsonl", "rows_trained": "x"}}
    answer = {"row": 0, "prompt": HOSTILE, "reference": "r", "answer": HOSTILE, "scores": {"rougeL": 0.5}}
    contents: dict[Path, list[Any]] = {
        folder / "config.json": [
            {
                "config": {"tuning": {"mode": "lora", "lora": {"r": rank, "alpha": 32}}, "train": {"seed": 1}},
                "origins": {},
            }
        ],
        folder / "plan.json": [plan],
        folder / "prepared.json": [{"model": {"name": model}}],
        folder / "metrics.jsonl": rows,
        folder / "events.jsonl": events,
        evaluation / "scores.json": [figures],
        evaluation / "predictions.jsonl": [answer],
        evaluation.with_name("step-000040-others-1234") / "scores.json": [others],
        evaluation.with_name("step-000040-others-1234") / "predictions.jsonl": [answer],
        folder / "logs" / "rank0.log": [HOSTILE],
    }
    for path, lines in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    made_run(folder, "first", model=HOSTILE)
    return folder


def test_a_report_is_one_page_that_needs_nothing_else(runs: Path, tmp_path: Path, in_process: Program) -> None:
    done = in_process("report", "RUN=first", "JSON=1", runs=runs)
    assert done.code == 0, done.err
    page = Path(done.json["report"])
    text = page.read_text(encoding="utf-8")
    assert page == runs / "first" / "report.html" and len(text) < 3_000_000
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text), "nothing comes from a server"
    with browser(tmp_path / "profile") as shown:
        for width in (390, 1440):
            shown.open(page.as_uri(), width=width)
            shown.wait("document.querySelectorAll('canvas').length >= 4")
            assert shown.value("document.documentElement.scrollWidth") <= width, "nothing is wider than the window"
            assert shown.value(INSIDE), f"a table is cut at {width} pixels"
            assert shown.value("document.title") == "first – SFT-Play", "what a run wrote is text, never HTML"
        words = shown.value("document.body.innerText")
        assert "finished" in words and "0.5000 [0.4000, 0.6000]" in words and HOSTILE in words
        assert "make infer RUN=" in words and "Other rows, at step 40: others.jsonl" in words
        heads = shown.value("[...document.querySelectorAll('h2')].map((one) => one.textContent)")
        assert heads[:3] == ["Scores", "Answers", "Curves"], "what came out of it is above how it went"
        assert "Planned and measured" in heads
        assert "Trained tokens of each rank" in words, "two ranks: their charts are open"
        assert not shown.complaints


def test_the_first_screen_says_whether_the_training_helped(runs: Path, tmp_path: Path, in_process: Program) -> None:
    folder = runs / "first"
    rows = [{"kind": "train", "step": step, "loss": 3.0 / step} for step in range(1, 41)]
    losses = {0: 3.5, 20: 1.25, 40: 1.25}
    rows += [{"kind": "eval", "step": step, "eval_loss": loss} for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(folder / "training_metrics.json", {"best_step": 20, "best_metric": 1.25, "model_step": 20})
    write_json(folder / "model" / "stamp.json", {"step": 20})
    scores = json.loads((folder / "eval/step-000040/scores.json").read_text())
    write_json(folder / "eval/step-000040/scores.json", scores | {"settings": {"rows_trained": 8}})
    write_json(folder / "eval/step-000020/scores.json", scores | {"answers": 0, "loss": 1.25})
    source = {"name": "a.csv", "rows_read": 359, "kept": 322, "duplicates": 15, "cut": 0}
    source |= {"dropped": {"not in the filter": 21, "bad row": 1}}
    prepared = {"model": {"name": "m"}}
    for name, labels in (("train", {"Invoice": 300, "Refund": 22}), ("validation", {"Invoice": 20})):
        write_json(folder / name / "manifest.json", {"sources": [source], "labels": labels})
        prepared[name] = {"path": str(folder / name), "rows": 322, "sources": [{"weight": 0.75}]}
    write_json(folder / "prepared.json", prepared)
    for step in (20, 40):
        write_json(folder / f"checkpoints/step-{step:06d}/manifest.json", {})
    (folder / "checkpoints/best").symlink_to("step-000020")
    page = Path(in_process("report", "RUN=first", "JSON=1", runs=runs).json["report"])
    with browser(tmp_path / "profile") as shown:
        shown.open(page.as_uri())
        shown.wait("document.querySelector('.chart canvas') !== null", 60)
        words = shown.value("document.body.innerText").replace("\t", " ")
        cards = shown.value("[...document.querySelectorAll('.card')].map((one) => one.innerText)")
        assert cards[0].split("\n") == ["held-out loss", "3.5000 → 1.2500", "before → after step 20 (model/)"]
        assert cards[1].split("\n")[:2] == ["ROUGE-L", "0.5000 → 0.5000"] and not any("best" in card for card in cards)
        assert "model/ is step 20 (best eval_loss 1.2500, equal at step 40)" in words
        assert "step 40: 8 of these rows were trained" in words and "model/ = 20" in words
        assert "359 322 21 (not in the filter), 1 (bad row), 15 (duplicate) 0" in words and "0.75" in words
        assert "Invoice 300 20" in words and "Refund 22 0" in words
        assert "Checkpoints: step-000020 (best), step-000040" in words
        assert "[object" not in words
        keys = shown.value("[...document.querySelectorAll('details td:first-child')].map((one) => one.textContent)")
        assert "train.seed" in keys and "train" not in keys
        assert shown.value("document.querySelectorAll('.u-legend .faint').length") == 0, "40 points are not smoothed"
        legend = shown.value("document.querySelector('.u-legend').innerText")
        assert "held out" in legend and not re.search("step|[–:]", legend), "before the pointer is over a point"
        assert not shown.complaints
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if row.get("step") != 0))
    points = record_of(RunFolder(folder))["outcomes"][0]["points"]
    assert points == [[20, 1.25], [40, 1.25]], "the first, the best and the last, each once"


def test_charts_of_a_single_rank_are_folded(runs: Path, tmp_path: Path, in_process: Program) -> None:
    plan = json.loads((runs / "first" / "plan.json").read_text())
    (runs / "first" / "plan.json").write_text(json.dumps({**plan, "world_size": 1, "ranks": plan["ranks"][:1]}))
    page = Path(in_process("report", "RUN=first", "JSON=1", runs=runs).json["report"])
    with browser(tmp_path / "profile") as shown:
        shown.open(page.as_uri())
        shown.wait("document.querySelectorAll('.charts canvas').length == 3")
        shown.value("[...document.querySelectorAll('summary')].find((one) => one.textContent.includes('more')).click()")
        shown.wait("document.querySelectorAll('.charts canvas').length == 4")
        assert shown.value(
            "[...document.querySelectorAll('details .chart canvas')].every((one) => one.clientWidth > 200)"
        )


def test_the_list_is_as_wide_as_the_window_and_names_what_diverged(runs: Path, tmp_path: Path) -> None:
    name = "a-name-of-many-words-as-people-give-them-to-runs"
    figures = {
        "tokens_per_second": 2345.6,
        "step_seconds": 90.0,
        "rank_memory_gib": [70.5],
        "rank_power_watts": [300.0],
    }
    risen = [{"kind": "train", "step": step, "loss": 1.0 + step, **figures} for step in range(1, 41)]
    folder = made_run(runs, name, model="a-model-of-a-long-name-8b-instruct")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in risen))
    config = json.loads((folder / "config.json").read_text())
    config["config"] |= {"data": {"train_path": "orders_train.jsonl"}}
    write_json(folder / "config.json", config)
    with served(runs) as url, browser(tmp_path / "profile") as shown:
        for width in (390, 820, 1240, 1440):
            shown.open("about:blank")
            shown.open(url, width=width)
            shown.wait("document.querySelectorAll('tbody tr').length == 2")
            assert shown.value(INSIDE), f"a column is cut at {width} pixels"
        borders = "[...document.querySelectorAll('td')].every((one) => getComputedStyle(one).borderLeftWidth == '0px')"
        assert shown.value(borders), "no box round a cell"
        badges = "Object.fromEntries([...document.querySelectorAll('.badge')].map((b) => [b.innerText, b.className]))"
        assert shown.value(badges) == {"finished": "badge finished", "finished (diverged)": "badge diverged"}


def test_a_half_written_run_has_a_report(tmp_path: Path, in_process: Program) -> None:
    runs = tmp_path / "runs"
    folder = made_run(runs, "torn")
    for name in ("plan.json", "events.jsonl", "prepared.json", "metrics.jsonl"):
        (folder / name).write_text('{"half')
    assert in_process("report", "RUN=torn", runs=runs).code == 0
    in_process("report", "RUN=none", runs=runs).refused(5, "`none`")


def test_a_spike_stays_in_a_thinned_curve() -> None:
    rows = [{"kind": "train", "step": step, "loss": 50.0 if step == 7_777 else 1.0} for step in range(20_000)]
    curve = curves_of(rows)["train"]
    assert len(curve["step"]) <= POINTS and (curve["step"][0], curve["step"][-1], max(curve["loss"])) == (
        0,
        19_999,
        50.0,
    )


@contextmanager
def served(runs: Path, *words: str, **variables: str) -> Iterator[str]:
    """Run `make ui` and yield its address."""
    env = {**os.environ, "RUNS_DIR": str(runs), "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", "sft_play", "ui", "PORT=18600", "JSON=1", *words]
    with subprocess.Popen(command, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()  # SIGINT is ignored in a job that a script started with `&`


def asked(url: str, **headers: str) -> tuple[int, str]:
    answers: list[tuple[int, str]] = []

    def answered() -> bool:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=240) as answer:
                answers.append((answer.status, answer.read().decode()))
        except urllib.error.HTTPError as error:
            answers.append((error.code, ""))
        except urllib.error.URLError:
            return False
        return True

    until(answered)
    return answers[0]


def test_the_page_is_live_and_compares(runs: Path, tmp_path: Path) -> None:
    made_run(runs, "second", rank=8)
    with served(runs) as url, browser(tmp_path / "profile") as shown:
        assert {run["name"] for run in json.loads(asked(f"{url}api/runs")[1])} == {"first", "second"}
        shown.open(url)
        shown.wait("document.querySelectorAll('tbody tr').length == 2")
        shown.value("document.querySelector('a[href=\"#run=first\"]').click()")
        shown.wait("document.querySelectorAll('canvas').length >= 4")
        with (runs / "first" / "metrics.jsonl").open("a") as stream:
            stream.write('\n{"kind": "train", "step": 41, "loss": 0.0123}\n')
        shown.wait("document.body.innerText.includes('0.0123')")
        shown.open(f"{url}#compare=first,second")
        shown.wait("document.body.innerText.includes('neither a final model nor a checkpoint')")
        assert "held-out loss\t1.0000, step 40\t1.0000, step 40" in shown.value("document.body.innerText")
        assert shown.value("[...document.querySelectorAll('td')].some((one) => one.textContent == 'tuning.lora.r')"), (
            "one key a line"
        )
        paired = "difference({mean: -0.0312, low: -0.06, high: 0.01, verdict: 'no difference', n: 30})"
        assert shown.value(paired) == "−0.0312 [−0.0600, +0.0100] no difference, n = 30"
        assert "hint: " in shown.value("document.body.innerText"), "what to type, as in a terminal"
        assert asked(f"{url}api/run/..%2F..%2Fetc")[0] == asked(f"{url}api/run/nobody")[0] == 404
        assert asked(f"{url}api/runs", Host="evil.example")[0] == 403, "another site's name for this machine"
        assert not shown.complaints


def test_other_clients_need_the_token(runs: Path, in_process: Program) -> None:
    assert in_process("ui", "HOST=0.0.0.0", runs=runs).code == 2
    token = "a-token-of-many-letters"
    with served(runs, "HOST=0.0.0.0", SFT_PLAY_SERVE_TOKEN=token) as url:
        assert asked(f"{url}api/runs")[0] == 401
        right, wrong = (
            base64.b64encode(f"me:{password}".encode()).decode() for password in (token, "wrong-but-long-enough")
        )
        # `Basic` is how a browser sends what it asked for.
        for authorization, status in (
            (f"Bearer {token}", 200),
            (f"Basic {right}", 200),
            (f"Basic {wrong}", 401),
            (f"Basic {token}", 401),
        ):
            assert asked(f"{url}api/runs", Authorization=authorization)[0] == status


def million_rows(runs: Path) -> tuple[float, Any]:
    """Return the seconds until the curves of a million rows arrived, and the curves."""
    path = runs / "first" / "metrics.jsonl"
    row = '{{"kind": "train", "step": {}, "loss": 2.5, "rank_loss": [2.0, 2.0]}}\n'
    with path.open("w") as stream:
        for start in range(0, 1_000_000, 10_000):
            stream.write("".join(row.format(step) for step in range(start, start + 10_000)))
            stream.write(f'{{"kind": "eval", "step": {start}, "eval_loss": 2.5}}\n')
    with served(runs) as url:
        asked(url)
        begun = time.monotonic()
        curves = json.loads(asked(f"{url}api/run/first")[1])["curves"]
        return time.monotonic() - begun, curves


def test_scoring_is_offered_where_rows_are_held_out(runs: Path) -> None:
    run = RunFolder(runs / "first")
    assert "eval" not in record_of(run)["use"]
    run.prepared.write_text(json.dumps({"model": {"name": "a"}, "validation": {"path": "x", "rows": 3}}))
    assert record_of(run)["use"]["eval"].startswith("make eval RUN=")


def test_the_time_left_goes_by_the_steps_that_were_made(runs: Path) -> None:
    """Not by the forecast, as in the terminal."""
    rows = [{"kind": "train", "step": step, "loss": 1.0, "step_seconds": 2.0} for step in range(1, 11)]
    (runs / "first" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert record_of(RunFolder(runs / "first"))["seconds_left"] == 60.0


def test_the_curves_of_a_million_rows_are_downsampled(runs: Path) -> None:
    _, curves = million_rows(runs)
    assert curves["train"]["step"][-1] == 999_999
    assert len(curves["eval"]["step"]) == 100, "every evaluation is there"


@pytest.mark.quiet
def test_a_report_of_a_million_rows_is_served_within_two_seconds(runs: Path) -> None:
    assert million_rows(runs)[0] < 2
