"""A run in words: progress, time left, evaluations, what slows it down; and `launch.notify`, which reports how it
ends.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from sft_play.config.metrics import OF_LOSS, higher_is_better, label_of_metric
from sft_play.errors import without_tokens
from sft_play.files import read_object
from sft_play.runs.folder import RunFolder, metric_rows
from sft_play.runs.gate import read_facts
from sft_play.text import Finding, numbered, tell

Row = Mapping[str, Any]
PANEL = "SFT_PLAY_PANEL"
"""Variable of workers whose launcher shows a panel, so that rank 0 prints no lines of progress."""
LATEST, LEAST, LEAST_COMPARED = 20, 3, 8
"""Rows that findings use: at most, at least, and at least to compare ranks."""
SLOW, WAITING, THROTTLED, FULL = 0.2, 0.1, 10.0, 0.95
"""Thresholds of findings: share of speed, share of a step, percent of time, share of the limit."""
RISEN, LEAST_RISE = 1.5, 1.0
"""A loss that is this many times that of the first step, and this many nats above it, has diverged."""
NEVER_USUAL = 0.1
"""A learning rate that is too high for any optimizer, so that a tenth of it may be too."""
NOT_OF_ANSWERS = (*OF_LOSS, "label_tokens", "loss_rows_per_second")


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Return findings about a run that is slower or closer to its memory limit than necessary, or that diverged."""
    train = [row for row in rows if row.get("kind") == "train"]
    return [*(_of(train[1:][-LATEST:]) if len(train) > LEAST else ()), *risen_losses(rows)]


def risen_losses(rows: Sequence[Row]) -> list[Finding]:
    """Return a finding if the loss, or else the held-out loss, is far above that of the beginning."""
    losses, held_out = (
        [row for row in rows if row.get("kind") == kind and row.get(name) is not None]
        for kind, name in (("train", "loss"), ("eval", "eval_loss"))
    )
    rate = max((row.get("learning_rate") or 0.0 for row in losses), default=0.0)
    lower = f"TRAIN_LEARNING_RATE={rate / 10:.2g}, a tenth, or a longer warm-up" if rate else "a lower learning rate"
    if rate >= NEVER_USUAL:
        lower = "TRAIN_LEARNING_RATE=auto, the usual one"
    last = _median([row["loss"] for row in losses[-LEAST:]])
    if last is not None and len(losses) > LEAST and _is_far_above(last, losses[0]["loss"]):
        of_last = f"the median of steps {losses[-LEAST]['step']} to {losses[-1]['step']}"
        begin = f"{losses[0]['loss']:.3f} at step {losses[0]['step']}"
        text = f"the loss rose from {begin} to {last:.3f}, {of_last}, so the training diverged"
        return [_warning("diverged", text, lower)]
    first, last = (held_out[at]["eval_loss"] if len(held_out) > 1 else 0.0 for at in (0, -1))
    if _is_far_above(last, first):
        steps = [row["step"] for row in held_out]
        text = f"the held-out loss rose from {first:.3f} at step {steps[0]} to {last:.3f} at step {steps[-1]}"
        return [_warning("worse", text, f"CHECKPOINT=best may be better; train fewer epochs, or with {lower}")]
    return []


def _is_far_above(loss: float, before: float) -> bool:
    return loss > RISEN * before and loss > before + LEAST_RISE


def _of(rows: Sequence[Row]) -> Iterator[Finding]:
    computing = [
        row for row in rows if all(row.get("rank_tokens_per_second") or ())
    ]  # a rank without rows is idle, not slow
    speeds = _medians(computing, "rank_tokens_per_second") if len(computing) >= LEAST_COMPARED else {}
    seconds = _median([row.get("step_seconds") for row in rows])
    if len(speeds) > 1:
        slowest = min(speeds, key=lambda rank: speeds[rank])
        others = statistics.median(speed for rank, speed in speeds.items() if rank != slowest)
        if others and (less := 1 - speeds[slowest] / others) >= SLOW:
            yield _warning(
                "slow-rank",
                f"rank {slowest} is {less:.0%} slower than the others, which wait for it",
                "look for other programs, heat and a slow link on its machine",
            )
    waits = _medians(rows, "rank_data_seconds")
    if waits and seconds and (share := max(waits.values()) / seconds) >= WAITING:
        who = max(waits, key=lambda rank: waits[rank])
        yield _warning(
            "waiting-for-data", f"rank {who} waits {share:.0%} of each step for data", "TRAIN_DATALOADER_NUM_WORKERS=2"
        )
    for rank, percent in _medians(rows, "rank_throttled").items():
        if percent >= THROTTLED:
            heat = _medians(rows, "rank_temperature").get(rank)
            yield _warning(
                "throttled",
                f"the GPU of rank {rank} is throttled {percent:.0f}% of the time"
                + (f" ({heat:.0f} °C)" if heat else ""),
                "look at its fans and power supply (`nvidia-smi -q -d PERFORMANCE`)",
            )
    limits = _medians(rows, "rank_memory_limit_gib")
    for rank, used in _medians(rows, "rank_memory_gib").items():
        if limits.get(rank) and used / limits[rank] >= FULL:
            yield _warning(
                "memory",
                f"the memory of rank {rank} is within 5% of its limit: {used:.1f} of {limits[rank]:.1f} GiB",
                "a smaller TRAIN_BATCH_SIZE, or `train.gradient_checkpointing`",
            )


def _warning(name: str, text: str, remedy: str) -> Finding:
    return Finding(id=name, severity="warning", text=text, remedy=remedy)


def _median(values: Sequence[Any]) -> float | None:
    numbers = [value for value in values if isinstance(value, int | float)]
    return statistics.median(numbers) if numbers else None


def _medians(rows: Sequence[Row], name: str) -> dict[int, float]:
    """Return rank -> the median of a reading, for ranks that have it."""
    lists = [row[name] for row in rows if isinstance(row.get(name), list)]
    ranks = range(max(map(len, lists), default=0))
    medians = {rank: _median([values[rank] for values in lists if rank < len(values)]) for rank in ranks}
    return {rank: value for rank, value in medians.items() if value is not None}


def energy_kwh(rows: Sequence[Row], seconds: float | None) -> float | None:
    """Return the energy of all ranks' GPUs in `seconds` by the readings of these rows; `None` if the driver reports no
    power.
    """
    lists = [row.get("rank_power_watts") or [None] for row in rows]
    watts = [sum(powers) for powers in lists if all(isinstance(value, int | float) for value in powers)]
    return statistics.fmean(watts) * seconds / 3.6e6 if watts and seconds else None


def seconds_left(rows: Sequence[Row], steps: int | None) -> float | None:
    """Return the time for the remaining steps, without evaluating and saving; `None` before a second row of steps.

    The first row includes the start-up.
    """
    train = [row for row in rows if row.get("kind") == "train"]
    pace = _median([row.get("step_seconds") for row in train[1:][-50:]])
    return pace * (steps - train[-1]["step"]) if pace is not None and steps else None


def clock(seconds: float) -> str:
    """Return `1:05`, or `2:01:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def line_of(rows: Sequence[Row], steps: int | None) -> str:
    """Return the last row, of steps or an evaluation, as a line of progress."""
    row = rows[-1]
    step = f"step {row['step']}{f'/{steps}' if steps else ''}: "
    if row.get("kind") == "eval":
        return step + evaluation_line(row)
    remaining = seconds_left(rows, steps)
    speed = f", {row['tokens_per_second']:,.0f} tokens/s" if row.get("tokens_per_second") else ""
    return f"{step}loss {row['loss'] if row.get('loss') is not None else float('nan'):.4f}{speed}" + (
        f", {clock(remaining)} left" if remaining is not None else ""
    )


def evaluation_line(logs: Row) -> str:
    """Return an evaluation as a line: loss, loss per source, scores of answers, number of answers."""
    parts = [f"held-out loss {logs['eval_loss']:.4f}"]
    parts += [
        f"{name.removeprefix('eval_loss/')} {value:.4f}"
        for name, value in logs.items()
        if name.startswith("eval_loss/")
    ]
    scores = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
    if "answers" in scores:
        parts += [f"{label_of_metric(name)} {value:.3f}" for name, value in answer_scores(logs).items()]
        if scores["answers"] < scores["answers_asked"]:
            parts.append(f"scored {scores['answers']} of {scores['answers_asked']}")
    return ", ".join(parts)


def answer_scores(row: Row) -> dict[str, Any]:
    """Return the scores of answers in a row of an evaluation: metric -> value."""
    scores = {name.removeprefix("eval_"): value for name, value in row.items() if name.startswith("eval_")}
    names = list(scores)[: list(scores).index("answers")] if "answers" in scores else []  # they precede their number
    return {name: scores[name] for name in names if name.partition("/")[0] not in NOT_OF_ANSWERS}


def describe_model(run: RunFolder) -> str | None:
    """Return which step `model/` is and why: `step 3 (best eval_loss 3.1710)`; `None` if there is none."""
    step, facts = read_object(run.model / "stamp.json").get("step"), read_facts(run.training_metrics)
    best, value = facts.get("best_step"), facts.get("best_metric")
    if type(step) is not int:
        return None
    if best is None or value is None or facts.get("model_step") != step:
        return f"step {step}"
    metric = str(read_facts(run.config).get("config", {}).get("train", {}).get("metric_for_best_model") or "loss")
    name = f"eval_{metric.removeprefix('eval_')}"
    if best != step:
        return f"step {step}, the last; the best {name}, {value:.4f}, was at step {best}"
    rows = [row for row in metric_rows(run.metrics) if row.get(name) is not None]
    equal = [row["step"] for row in rows if row[name] == value and row["step"] > best]
    before = next((row[name] for row in rows if row["step"] == 0), value)
    worse = higher_is_better(name) is not None and before != value and (before > value) == higher_is_better(name)
    return (
        f"step {step} (best {name} {value:.4f}"
        + (f", equal at {numbered('step', equal)}" if equal else "")
        + (f", but {before:.4f} before training)" if worse else ")")
    )


# `launch.notify`: a webhook or a command that receives a run's events and its end. It never delays or ends a run.


SECONDS = 5.0
"""Time limit of a webhook or a command."""
LONGEST = 2000
"""Most letters of a text, which chat services limit."""
VARIABLE = re.compile(r"\$(\w*NOTIFY\w*)")
WEBHOOK = re.compile(r"https?://\S+")

_under_way = list[threading.Thread]()


def notify(target: str | None, run: RunFolder, event: str, text: str) -> None:
    """Send `{"run", "event", "text", "content"}` as JSON in a thread, to a URL or to the stdin of the command in a
    variable `$NAME`.

    Slack shows `text` and Discord `content`. Tokens are masked.
    """
    if not target:
        return
    text = without_tokens(text)[:LONGEST]
    body = json.dumps({"run": run.name, "event": event, "text": text, "content": text})
    thread = threading.Thread(target=_send, args=(target, body), name="notify", daemon=True)
    thread.start()
    _under_way.append(thread)


def wait_until_sent() -> None:
    """Wait until all is sent or given up, at most a little longer than `SECONDS`."""
    until = time.monotonic() + SECONDS + 1
    while _under_way:
        thread = _under_way.pop()
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():  # a response that arrives byte by byte
            _not_sent(f"no answer within {SECONDS + 1:.0f} s")


def end_text(run: RunFolder, event: str, message: str) -> str:
    """Describe how a run ended in one or two lines."""
    subject = f"{run.name} {event}"
    if event == "finished":
        facts = read_facts(run.training_metrics)
        names = {"steps": "steps", "final_loss": "loss", "eval_loss": "held-out loss", "eval_rougeL": "ROUGE-L"}
        parts = [
            f"{label} {facts[name]:.4g}" for name, label in names.items() if isinstance(facts.get(name), int | float)
        ]
        return f"{subject}: {', '.join(parts)}" if parts else subject
    return f"{subject}: {message}" if message else subject


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows no redirect to another host or from HTTPS to HTTP."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        same = after.hostname == before.hostname and after.scheme in (before.scheme, "https")
        return super().redirect_request(req, fp, code, msg, headers, newurl) if same else None


def _send(target: str, body: str) -> None:
    try:
        variable = VARIABLE.fullmatch(target)
        target = os.environ[variable[1]] if variable else target
        if WEBHOOK.fullmatch(target):
            request = urllib.request.Request(
                target, body.encode(), {"Content-Type": "application/json", "User-Agent": "sft-play"}
            )
            urllib.request.build_opener(_SameHost).open(request, timeout=SECONDS).close()
        elif variable:  # only from a variable: a command in a run's folder is never run
            _run(target, body)
        else:
            raise ValueError
    except (OSError, ValueError, KeyError, HTTPException, subprocess.SubprocessError) as problem:
        # The address may be a secret, so it is not shown.
        code = getattr(problem, "code", None) or getattr(problem, "returncode", None)
        why = code or getattr(getattr(problem, "reason", None), "strerror", None)
        silent = isinstance(problem, TimeoutError | subprocess.TimeoutExpired)
        _not_sent(
            f"no answer within {SECONDS:g} s" if silent else f"{type(problem).__name__}{f' {why}' if why else ''}"
        )


def _not_sent(why: str) -> None:
    tell(f"warning: `launch.notify` was not sent: {why}")


def _run(command: str, body: str) -> None:
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=nowhere,
        stderr=nowhere,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            process.communicate(body, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
