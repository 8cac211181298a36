"""`make runs`, `make stop` and `make logs`; summaries of runs for other commands, and the launchers that hold locks."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sft_play.config.call import Call
from sft_play.config.metrics import higher_is_better, label_of_metric
from sft_play.config.yaml_files import scalar_text
from sft_play.errors import HardwareError, UserError, safe_text, typed_here
from sft_play.files import lock, open_plain
from sft_play.launch.node import is_alive
from sft_play.launch.run_folder import FINAL_EVENTS, RECOVERED, RESTARTED, STARTS, find_named_run, read_events
from sft_play.launch.verdict import CAUSE_VARIABLE, describe_stop
from sft_play.plan.show import parse_price
from sft_play.runs.folder import RunFolder, metric_rows, metrics_of, read_scores, runs_folder
from sft_play.runs.gate import all_runs, check_run, read_facts
from sft_play.runs.progress import energy_kwh, risen_losses
from sft_play.runs.stamp import MADE
from sft_play.text import duration, energy, figure, gib, table, tell

LOCK = re.compile(r"\.launcher-node(\d+)\.lock")
STOP_SECONDS = 3600.0
"""How long `make stop` waits; a launcher leaves within 25 s unless writing a checkpoint takes longer."""


def holders(run: RunFolder) -> dict[int, psutil.Process | None]:
    """Return node rank -> the launcher that trains a run there now, in order; `None` for one on another machine
    (network disk) or of another user.
    """
    locks = {
        int(name[1]): path for path in run.path.glob(".launcher-node*.lock") if (name := LOCK.fullmatch(path.name))
    }
    return {rank: _owner(path) for rank, path in sorted(locks.items()) if _is_locked(path)}


def _is_locked(path: Path) -> bool:
    try:
        descriptor = lock(path, shared=True)
    except OSError:  # on a disk without file locks, only a launcher of this machine can be detected
        return _owner(path) is not None
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def _owner(path: Path) -> psutil.Process | None:
    """Return the process named in a lock, if it has that file open: its id may have been reused."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        with open_plain(path) as lock:
            process = psutil.Process(int(lock.read(20)))
        if any(path.samefile(file.path) for file in process.open_files() if Path(file.path).name == path.name):
            return process
    return None


def stop(call: Call) -> int:
    """Ask the run's launcher on this machine to save and leave, wait for it, and report what is saved."""
    run = find_named_run(call)
    launchers = holders(run)
    if not launchers:
        raise UserError(f"nothing trains `{run.name}` now", hint="`make runs` shows which runs are under way")
    mine = {rank: process for rank, process in launchers.items() if process}
    if not mine:
        raise HardwareError(
            f"the launcher of `{run.name}` runs on another machine, or under another user",
            hint="type `make stop` there; the stop of one machine stops all; `scancel JOBID` stops a Slurm job",
        )
    node_rank, first = next(iter(mine.items()))
    follow_up = typed_here(f"make resume RUN={run.typed} continues it")
    if job := _slurm_job(first):
        follow_up = (
            f"after a stop the batch script of Slurm job {job} takes another turn, as often as `slurm.max_requeues`"
            f" allows; `scancel {job}` ends it for good"
        )
    begun = time.time()
    with contextlib.suppress(psutil.NoSuchProcess):
        # The kernel's start times have a limited resolution.
        begun = first.create_time() - 0.5
    for launcher in mine.values():
        tell(f"asking process {launcher.pid} to stop `{run.name}`")
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher.send_signal(signal.SIGTERM)
            launcher.send_signal(signal.SIGCONT)  # after Ctrl-Z it receives signals only when it continues
    deadline = time.monotonic() + STOP_SECONDS
    while remaining := [launcher.pid for launcher in mine.values() if is_alive(launcher)]:  # a zombie has left
        if time.monotonic() > deadline:
            raise HardwareError(
                f"process {remaining[0]} has not left within {STOP_SECONDS:.0f} s", hint=f"kill -KILL {remaining[0]}"
            )
        time.sleep(0.1)
    return _report_end(call, run, ending(run, node_rank, begun), follow_up)


def _slurm_job(launcher: psutil.Process) -> str | None:
    """Return the Slurm job whose batch script (by `make slurm`) started a launcher; `None` for other launchers."""
    with contextlib.suppress(psutil.Error, OSError):
        variables = launcher.environ()
        return variables.get("SLURM_JOB_ID") if CAUSE_VARIABLE in variables else None
    return None


def ending(run: RunFolder, node_rank: int, begun: float) -> dict[str, Any]:
    """Return the final event of a launcher that began at `begun` (seconds since 1970).

    The event is `removed` if the launcher removed the run folder, `unknown` if it could not record its end.
    """
    if not run.path.is_dir():
        return {"event": "removed", "code": 143}
    own = [event for event in read_events(run, node_rank) if event.get("time", 0.0) >= begun]
    if own:
        return own[-1] if own[-1]["event"] in FINAL_EVENTS else {"event": "unknown", "code": HardwareError.exit_code}
    return {"event": "stopped", "code": 143, "note": "its workers had not started; nothing was trained in this launch"}


def _report_end(call: Call, run: RunFolder, last: Mapping[str, Any], follow_up: str) -> int:
    name, event = run.name, last["event"]
    text = {
        "removed": f"`{name}` was stopped before its workers started; nothing was trained, and its folder is removed",
        "stopped": f"{describe_stop(last) if 'signal' in last else 'stopped; ' + last.get('note', '')}\n{follow_up}",
        "finished": f"`{name}` was finished before it could be stopped",
        "failed": f"{last.get('error') or 'error: it failed'}\n\n`{name}` failed while it was asked to stop",
    }.get(
        event,
        f"error: the launcher of `{name}` has left and could not write how it ended\n\nhint: see what it printed, and"
        f" {run.logs}",
    )
    bad = event in ("failed", "unknown")
    if call.json:
        print(json.dumps({"run": str(run.path), **last}))
    else:
        print(text, file=sys.stderr if bad else sys.stdout)
    return int(last.get("code", 1)) if bad else 0


def logs(call: Call) -> int:
    """Print the log of a rank, and with `FOLLOW` also new lines while the run continues; return 0."""
    run, rank, follow = find_named_run(call), call.integer("RANK") or 0, call.flag("FOLLOW")
    path = run.rank_log(rank)
    if not path.is_file():
        ranks = sorted(
            int(log.stem.removeprefix("rank")) for log in run.logs.glob("rank*.log") if log.stem[4:].isdecimal()
        )
        there = (
            f"there are those of ranks {', '.join(map(str, ranks))}" if ranks else "its workers have not started yet"
        )
        raise UserError(f"`{run.name}` has no log of rank {rank}", hint=there)
    if call.json:
        print(
            json.dumps(
                {
                    "run": str(run.path),
                    "rank": rank,
                    "path": str(path),
                    "text": open_plain(path).read().decode("utf-8", "replace"),
                }
            )
        )
        return 0
    with io.TextIOWrapper(open_plain(path), encoding="utf-8", errors="replace") as stream:
        while True:
            running = follow and bool(holders(run))  # checked before reading, so that the last lines are not missed
            while text := stream.read(65536):
                sys.stdout.write(text)
                sys.stdout.flush()
            if not running:
                return 0
            time.sleep(0.5)


SWEEP = "sweep"
"""The origin of a value that a sweep gave, before its file."""
HOW_RUN = ("launch.auto_resume",)
"""Keys that change nothing that a run learns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Facts of a run from its files; `None` for what is damaged or missing."""

    name: str
    state: str
    """`preparing`, `running`, `finished`, `stopped`, `failed`, `killed` (its launcher is gone), `never started`,
    `scored` (a model that was not trained here).
    """
    code: int | None = None
    """Exit code of its last launch, if that has ended."""
    node_rank: int = 0
    """The node that the folder belongs to; steps and scores are recorded only on node 0."""
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    """Loss of the last step in `metrics.jsonl`, in nats."""
    best: float | None = None
    """Best value among its evaluations, of `train.metric_for_best_model`."""
    metric: str | None = None
    also: str | None = None
    """The first of `eval.metrics` that it has, where `metric` is the loss."""
    risen: str | None = None
    """How its loss rose far above that of the first step (`diverged`), or else its held-out loss (`worse`)."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Best value of each score of its evaluations, such as `eval_loss` or `eval_rougeL`."""
    model: str | None = None
    method: str | None = None
    swept: str | None = None
    """The values that a sweep gave it: `learning_rate=0.0001, r=8`."""
    data: str | None = None
    strategy: str | None = None
    processes: int | None = None
    tokens_per_second: float | None = None
    """Mean speed of the optimizer steps."""
    peak_memory_bytes: int | None = None
    seconds: float | None = None
    """Time of its launches from start to end, with loading, evaluation and saving."""
    energy_kwh: float | None = None
    """Energy of the GPUs as measured by the driver."""
    cost: float | None = None
    """Cost of all machines at `PRICE_PER_HOUR`."""
    age_seconds: float | None = None
    """Time since its last change."""
    problem: str | None = None
    """Why it cannot be read; then no other fact is known."""

    def cells(self) -> dict[str, Any]:
        """Return column -> value, with a column for each score."""
        cells = asdict(self)
        return {**cells, "best_of": self.best_of, **cells.pop("scores")}

    @property
    def best_of(self) -> str | None:
        """The best values with their names: `1.9835 loss, 0.7500 accuracy`."""
        names = [name for name in (self.metric, self.also) if name]
        return ", ".join(f"{self.scores[f'eval_{name}']:.4f} {label_of_metric(name)}" for name in names) or None


UNREADABLE = (UserError, OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors that damaged or foreign files can cause."""


def reason(error: BaseException) -> str:
    """Return in a line why a run cannot be read."""
    text = f"{error.place}: {error.message}" if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return safe_text(text.partition("\n")[0])


def list_run(run: RunFolder, price: float | None = None) -> Summary:
    """Return the summary of a run for a list; for a run that cannot be read, a summary that says why."""
    try:
        return summary_of(check_run(run), price)
    except UNREADABLE as error:
        return Summary(name=run.name, state="unreadable", problem=reason(error))


def summary_of(run: RunFolder, price: float | None = None) -> Summary:
    """Return the summary of a run; `price` is that of a machine-hour."""
    node_rank, state = node_of(run), state_of(run)
    events = read_events(run, node_rank)
    plan, final = read_facts(run.plan), read_facts(run.training_metrics)
    saved = read_facts(run.config)
    config, origins = saved.get("config", {}), saved.get("origins", {})
    of_sweep = {key for key, origin in origins.items() if str(origin).startswith(f"{SWEEP} ")} - {*HOW_RUN}
    swept = ((key, value) for key, value in flat_keys(config) if key in of_sweep)
    model, typed = read_facts(run.prepared).get("model", {}), config.get("model", {}).get("name")
    # A base that preparation made is in the cache, under a name that says nothing.
    model = (typed if model.get("source") == MADE else None) or model.get("name") or typed or ""
    rows = metric_rows(run.metrics)
    train = [row for row in rows if row.get("kind") == "train"] or [{}]
    if final.get("steps", 0) < train[-1].get("step", 0):
        final = {}  # of the part before a resume
    evaluations = [*(row for row in rows if row.get("kind") == "eval"), *_scored_later(run)]
    scores = _best_scores(evaluations, config.get("train", {}))
    metric = str(config.get("train", {}).get("metric_for_best_model") or "loss").removeprefix("eval_")
    scored = (name for name in config.get("eval", {}).get("metrics", ()) if f"eval_{name}" in scores)
    age = age_of(run)
    trained, tokens = _trained_so_far(train)
    of_steps = final.get("training_seconds") or trained or None
    until = time.time() - (0.0 if state in ("running", "preparing") else age)
    # Of a launch that was killed and resumed, the events may not say how long it lasted, but its steps do.
    seconds = max(_wall_seconds(events, until), of_steps or 0.0) or None
    # What was trained last, after a resume, may have needed less.
    peak = max((peak for row in train for peak in row.get("rank_memory_gib") or () if peak), default=0.0)
    return Summary(
        name=run.name,
        state=state,
        code=events[-1].get("code") if state in FINAL_EVENTS else None,
        node_rank=node_rank,
        step=int(train[-1].get("step", 0)),
        steps=plan.get("steps"),
        loss=train[-1].get("loss"),
        best=scores.get(f"eval_{metric}"),
        metric=metric if f"eval_{metric}" in scores else None,
        also=next(scored, None) if metric == "loss" else None,
        risen=next((finding.id for finding in risen_losses(rows)), None),
        scores=scores,
        model=short_path(str(model)) or None,
        method=config.get("tuning", {}).get("mode"),
        swept=", ".join(f"{key.rpartition('.')[2]}={scalar_text(value)}" for key, value in swept) or None,
        data=_data(config.get("data", {})),
        strategy=next(
            (name for name in ("pipeline", "tensor", "sequence") if _splits(plan, name)), plan.get("strategy")
        ),
        processes=plan.get("world_size"),
        tokens_per_second=final.get("tokens_per_second") or (tokens / trained if trained else None),
        peak_memory_bytes=max(final.get("peak_memory_bytes") or 0, int(peak * 2**30)) or None,
        seconds=seconds,
        energy_kwh=energy_kwh(train, of_steps),
        cost=price * plan.get("num_nodes", 1) * seconds / 3600 if price is not None and seconds else None,
        age_seconds=age,
    )


def flat_keys(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key with its value; a list of sections gives keys such as `data.sources[0].path`."""
    if isinstance(value, dict) and (value or name in ("", "train")):
        for key, inner in value.items():
            yield from flat_keys(inner, name if (name, key) == ("train", "extra") else f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for number, inner in enumerate(value):
            yield from flat_keys(inner, f"{name}[{number}]")
    else:
        yield name, value


def state_of(run: RunFolder) -> str:
    """Return `Summary.state` from the run's events and locks."""
    events, launchers = read_events(run, node_of(run)), holders(run)
    last = str(events[-1]["event"]) if events else ""
    if last in FINAL_EVENTS and any(launcher and launcher.pid == os.getpid() for launcher in launchers.values()):
        return last  # the run's own launcher asks, for the final report
    if launchers:
        return "running" if last and last not in FINAL_EVENTS else "preparing"
    if not last:
        return "scored" if any(run.path.glob("eval/*/")) else "never started"
    return last if last in FINAL_EVENTS else "killed"


def age_of(run: RunFolder) -> float:
    """Return the seconds since a run's last change."""
    touched = [path.stat().st_mtime for path in (run.config, run.events, run.metrics) if path.is_file()]
    return max(0.0, time.time() - max(touched)) if touched else 0.0


def node_of(run: RunFolder) -> int:
    """Return the lowest node that uses this folder: 0, except on another machine of several without a shared folder."""
    return min({event["node"] for event in read_events(run)} or holders(run), default=0)


def _scored_later(run: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield what `make eval` scored on the run's own rows, as rows of `metrics.jsonl`."""
    for folder in run.path.glob("eval/step-*"):
        if (step := folder.name.removeprefix("step-")).isdecimal() and (scores := read_scores(folder)):
            yield {"step": int(step), **{f"eval_{name}": value["mean"] for name, value in metrics_of(scores).items()}}


def _best_scores(evaluations: list[dict[str, Any]], train: Mapping[str, Any]) -> dict[str, float]:
    """Return each score's best value from the first step on; step 0 has the weights that training began with.

    The section `train` says which is better of the one metric that is not ours.
    """
    scores: dict[str, float] = {}
    extra, own = train.get("extra"), str(train.get("metric_for_best_model")).removeprefix("eval_")
    greater = extra.get("greater_is_better") if isinstance(extra, dict) else None
    for row in (row for row in evaluations if row.get("step") != 0):
        for name, value in row.items():
            bare = name.removeprefix("eval_")
            higher = greater if bare == own and higher_is_better(bare) is None else higher_is_better(bare)
            if isinstance(value, (int, float)) and isinstance(higher, bool):
                best = max if higher else min
                scores[name] = best(scores.get(name, value), value)
    return scores


def _splits(plan: Mapping[str, Any], way: str) -> bool:
    """Return whether a plan splits each model or row over ranks in this way."""
    return bool(plan.get("stages")) if way == "pipeline" else (plan.get(f"{way}_parallel") or 1) > 1


def _wall_seconds(events: Sequence[Mapping[str, Any]], until: float) -> float:
    """Return the time of a run's launches by its events, with restarts in them; the last lasts to its end, or to
    `until`.
    """
    timed = [*(event for event in events if "time" in event), {"event": "", "time": until}]
    seconds: float = sum(
        max(0.0, after["time"] - before["time"])
        for before, after in itertools.pairwise(timed)
        if before["event"] not in FINAL_EVENTS
        and (after["event"] not in STARTS or before["event"] in (RECOVERED, RESTARTED))
    )
    return seconds


def _trained_so_far(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the seconds and tokens of the optimizer steps in a run's metrics."""
    seconds = tokens = 0.0
    for before, row in itertools.pairwise([{}, *rows]):
        steps = max(0, row.get("step", 0) - before.get("step", 0)) if row.get("tokens_per_second") else 0
        seconds += (spent := steps * (row.get("step_seconds") or 0.0))
        tokens += spent * (row.get("tokens_per_second") or 0.0)
    return seconds, tokens


def _data(section: Mapping[str, Any]) -> str | None:
    sources = section.get("sources") or ([{"path": section["train_path"]}] if section.get("train_path") else [])
    names = [
        str(source.get("name") or Path(str(source.get("path"))).name) for source in sources if isinstance(source, dict)
    ]
    return ", ".join(names) or None


def short_path(text: str) -> str:
    """Return a text without the paths of the working and the home folder, since a report may be passed on."""
    return text.replace(f"{Path.cwd()}/", "").replace(str(Path.home()), "~")


def main(call: Call) -> int:
    """Print the runs, the newest first; return 0."""
    price = parse_price(call.options.get("PRICE_PER_HOUR"))
    runs = sorted(
        (list_run(run, price) for run in all_runs()), key=lambda summary: (summary.age_seconds or 0.0, summary.name)
    )
    if call.json:
        print(json.dumps([summary.cells() for summary in runs]))
    elif not runs:
        print(f"no runs in `{runs_folder()}`")
    else:
        lines = [_format_row(summary) for summary in runs]
        used = [name for name in lines[0] if any(line[name] != "-" for line in lines)]
        print(*table([used, *([line[name] for name in used] for line in lines)]), sep="\n")
        for summary in runs:
            if summary.problem:
                tell(f"note: {summary.name}: {summary.problem}")
    return 0


def _short_model(name: str) -> str:
    """Return the last part of a model's name, with the run's for a model that a run made: `tickets/merged`."""
    *before, last = name.rstrip("/").split("/")
    return "/".join([*before[-1:], last]) if last in ("merged", "model") else last


def _format_row(run: Summary) -> dict[str, str]:
    def cell(value: float | None) -> str:
        return figure(value) if value is not None else "-"

    return {
        "run": run.name,
        "state": f"{run.state} ({run.code})" if run.code and run.state == "failed" else run.state,
        "step": (
            f"on node 0; this is node {run.node_rank}"
            if run.node_rank
            else f"{run.step}/{run.steps}"
            if run.steps
            else str(run.step)
        ),
        "loss": "-" if run.loss is None else f"{run.loss:.4f}{f' ({run.risen})' if run.risen else ''}",
        "best": run.best_of or "-",
        "model": _short_model(run.model or "-"),
        "method": run.method or "-",
        "swept": run.swept or "-",
        "data": (run.data or "-")[:30],
        "tokens/s": cell(run.tokens_per_second),
        "memory": gib(run.peak_memory_bytes) if run.peak_memory_bytes else "-",
        "time": duration(run.seconds) if run.seconds is not None else "-",
        "energy": energy(run.energy_kwh) if run.energy_kwh is not None else "-",
        "cost": cell(run.cost),
        "age": duration(run.age_seconds) if run.age_seconds is not None else "-",
    }
