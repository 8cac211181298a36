"""The soak itself: launch, kill at random, launch again by the same command, and compare what comes of it."""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sft_play.errors import UserError
from sft_play.files import read_json
from sft_play.launch.verdict import LOST
from sft_play.runs.checkpoints import newest_valid, step_of
from sft_play.runs.folder import RunFolder
from sft_play.soak.launches import LAUNCH_SECONDS, NOTICE_SECONDS, Aim, Ended, Launch, environment
from sft_play.soak.processes import EVALUATING, LAUNCHER, LOADING, PREPARING, PUBLISHING, SAVING, TRAINING, last_rows
from sft_play.soak.report import Comparison, Kill, State, compare_runs, half_written, read_metrics

AIMS = {"time": 33, TRAINING: 22, SAVING: 22, EVALUATING: 10, PREPARING: 8, PUBLISHING: 5}
"""Weights: a random moment of the whole launch, most of which is its start; or one after its first step, or inside a phase that is waited for."""
WITHIN = {TRAINING: 5.0, SAVING: 0.4, EVALUATING: 1.0, PREPARING: 2.0, PUBLISHING: 0.1}
"""How long after a phase began it is killed at the latest, in seconds, before its true length is known."""
MOST_FAILURES = 3
"""Launches in a row that may fail by themselves before the soak gives up."""
LOGS_KEPT = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Soak:
    """One soak in its folder."""

    folder: Path
    state: State
    words: Sequence[str]
    """The command and what it gets, without `RUN_NAME`."""
    own_cache: bool
    """Whether prepared data may be thrown away before each run, so that there is a preparation to kill."""

    @property
    def reference(self) -> RunFolder:
        return RunFolder(self.folder / "runs" / "reference")

    @property
    def disturbed(self) -> RunFolder:
        """The run that is under way."""
        return RunFolder(self.folder / "runs" / f"disturbed-{self.state.run:03d}")

    def launch(self, run: RunFolder, *more: str) -> Launch:
        """Returns the next launch of `run`: always the same command."""
        self.state.launches += 1
        self._forget_logs()
        return Launch(
            words=[*self.words, f"RUN_NAME={run.name}", *more],
            environment=environment(run.path.parent, self.folder / "cache" if self.own_cache else None, self.folder / "tmp"),
            run=run,
            eval_steps=eval_steps(self.reference),
            log=self.folder / "logs" / f"launch-{self.state.launches:04d}.log",
        )

    def _forget_logs(self) -> None:
        for path in sorted((self.folder / "logs").glob("launch-*.log"))[:-LOGS_KEPT]:
            path.unlink()


def ensure_reference(soak: Soak) -> None:
    """Makes the undisturbed run, once. Raises `UserError` when it does not end well."""
    run = soak.reference
    if run.training_metrics.is_file():
        return
    tell("the undisturbed run, for comparison")
    shutil.rmtree(run.path, ignore_errors=True)
    shutil.rmtree(soak.folder / "cache", ignore_errors=True)
    started = time.monotonic()
    ended = soak.launch(run).to_its_end()
    if ended.code:
        raise UserError(f"the undisturbed run ended with code {ended.code}: {ended.output[-1500:]}", place=str(run.path))
    remember_marks(soak.state, ended, time.monotonic() - started)
    soak.state.marks[f"{EVALUATING} lasts"] = max(
        (row["eval_seconds"] for row in read_metrics(run) if row["kind"] == "eval"), default=0.0
    )
    soak.state.save()


def eval_steps(reference: RunFolder) -> int | None:
    """Returns the steps between evaluations, from the metrics of the undisturbed run; `None` without any or before it."""
    steps = [step for step in _steps(reference, "eval") if step]
    return min(steps) if steps else None


def save_interval(reference: RunFolder) -> int:
    """Returns how many steps lie between two checkpoints, from the resolved configuration and the plan."""
    train = read_json(reference.config)["config"]["train"]
    return int(train["save_steps"] if train["save_strategy"] == "steps" else read_json(reference.plan)["steps_per_epoch"])


def _steps(run: RunFolder, kind: str) -> list[int]:
    return [int(row["step"]) for row in read_metrics(run) if row["kind"] == kind] if run.metrics.is_file() else []


def remember_marks(state: State, ended: Ended, total: float) -> None:
    """Keeps when the phases of an undisturbed launch began and how long they lasted."""
    state.marks |= {name: round(seconds, 2) for name, seconds in ended.seen.items()} | {"end": round(total, 2)}
    state.marks |= {f"{name} lasts": round(ended.lasts[name], 3) for name in WITHIN if name in ended.lasts}


def kill_and_go_on(soak: Soak, kills: int) -> None:
    """Kills `kills` times; whenever a run is complete it is compared, and the next begins. The last one is brought to its end."""
    state, goal, failures = soak.state, len(soak.state.kills) + kills, 0
    while len(state.kills) < goal or not state.run_over:
        if state.run_over:
            begin_run(soak)
        chance = random.Random(f"{state.settings['seed']}-{state.launches}")
        aim = choose_aim(state, chance) if len(state.kills) < goal else None
        started = time.monotonic()
        ended = soak.launch(soak.disturbed).with_kill(aim, chance)
        state.seconds += time.monotonic() - started
        learn(state, ended, time.monotonic() - started)
        if ended.shot:
            failures = 0
            note_kill(soak, ended)
        elif ended.code == 0:
            failures = 0
            finish_run(soak, ended)
        else:
            failures += 1
            how = (
                f"had not ended after {LAUNCH_SECONDS:.0f} s" if ended.code is None else f"ended by itself with code {ended.code}"
            )
            problem(state, f"launch {state.launches} of run {state.run} {how}: {last_error(ended.output)}")
            if failures >= MOST_FAILURES:
                state.save()
                raise UserError(
                    f"{failures} launches in a row failed: {ended.output[-1500:]}", place=str(soak.disturbed.path),
                    hint="the runs, logs and state.json stay there",
                )  # fmt: skip
        state.save()


def begin_run(soak: Soak) -> None:
    """Makes room for another disturbed run."""
    soak.state.run, soak.state.run_kills, soak.state.run_over = soak.state.run + 1, 0, False
    shutil.rmtree(soak.disturbed.path, ignore_errors=True)
    if soak.own_cache:
        for part in ("data", "models"):
            shutil.rmtree(soak.folder / "cache" / part, ignore_errors=True)


def choose_aim(state: State, chance: random.Random) -> Aim:
    """Returns the next moment: anywhere in a launch, anywhere after its first step, or inside a phase."""
    kinds = dict(AIMS)
    if state.run_kills:  # the rows are cached by now, so that the preparation is short
        kinds[PREPARING] //= 2
    kind = chance.choices(list(kinds), list(kinds.values()))[0]
    end = state.marks["end"]
    if kind == "time":
        return Aim(kind=kind, seconds=chance.uniform(0.05, end))
    lasts = state.marks.get(f"{kind} lasts", WITHIN[kind])
    if kind == TRAINING:
        lasts = max(WITHIN[kind], end - state.marks.get(TRAINING, end))  # all steps, with their saves and evaluations
    return Aim(kind=kind, seconds=chance.uniform(0, 0.9 * lasts))


def learn(state: State, ended: Ended, total: float) -> None:
    """Corrects when steps begin, by the launches that came so far: later ones find a full cache, and extensions that are built."""
    if ended.shot is None and ended.code == 0:  # a moment was chosen after its end
        state.marks["end"] = round(min(state.marks["end"], total), 2)
        state.marks[TRAINING] = min(state.marks.get(TRAINING, total), ended.seen.get(TRAINING, total))
    elif TRAINING in ended.seen and LOADING in ended.seen:
        before = state.marks.get(TRAINING, ended.seen[TRAINING])
        state.marks[TRAINING] = round(0.8 * before + 0.2 * ended.seen[TRAINING], 2)


def note_kill(soak: Soak, ended: Ended) -> None:
    """Records a kill and checks what must hold after it."""
    state, run, shot = soak.state, soak.disturbed, ended.shot
    assert shot is not None
    newest, skipped = newest_valid(run)
    kill = Kill(
        number=len(state.kills) + 1,
        run=state.run,
        aim=shot.aim.kind,
        phase=shot.phase,
        target=shot.target,
        seconds=round(shot.seconds, 2),
        step=last_rows(run.metrics)[0],
        checkpoint=step_of(newest) if newest else 0,
        code=ended.code,
        over_seconds=round(ended.over_seconds, 2),
    )
    state.kills.append(kill)
    state.run_kills += 1
    code = "" if kill.code is None else f", code {kill.code}"
    tell(
        f"kill {kill.number}: {kill.target} in {kill.phase}, {kill.seconds:.1f} s after the launch, step {kill.step}, "
        f"checkpoint {kill.checkpoint}; over after {kill.over_seconds:.1f} s{code}"
    )
    where = f"kill {kill.number} ({kill.target} in {kill.phase})"
    if ended.left:
        problem(state, f"{where}: alive {NOTICE_SECONDS:.0f} s later: {ended.left}")
    complete = kill.code == 0 and run.training_metrics.is_file()  # a rank that had done all its work
    if kill.target not in (LAUNCHER, "everything") and kill.code != LOST and not complete:
        problem(state, f"{where}: the launcher returned {kill.code}, not {LOST}: {last_error(ended.output)}")
    if kill.lost > save_interval(soak.reference):
        problem(state, f"{where}: {kill.lost} steps lost, more than the save interval of {save_interval(soak.reference)}")
    for reason in skipped:
        problem(state, f"{where}: a published checkpoint is not whole: {reason}")


def finish_run(soak: Soak, ended: Ended) -> None:
    """Compares a completed run; removes it when it is equal."""
    state, run = soak.state, soak.disturbed
    rows, problems = compare_runs(soak.reference, run)
    if ended.left:
        problems.append(f"alive after the end: {ended.left}")
    if soak.own_cache:
        problems += [f"left over: {path.relative_to(soak.folder)}" for path in half_written(soak.folder / "cache")]
    state.comparisons.append(Comparison(run=state.run, kills=state.run_kills, rows=rows, problems=tuple(problems)))
    state.run_over = True
    tell(f"run {state.run} is complete after {state.run_kills} kills: {'equal' if not problems else 'NOT EQUAL'}, {rows} rows")
    for found in problems:
        tell(f"  {found}")
    if not problems:
        shutil.rmtree(run.path, ignore_errors=True)


def problem(state: State, text: str) -> None:
    """Keeps something that is not as promised."""
    state.problems.append(text)
    tell(f"PROBLEM: {text}")


def last_error(output: str) -> str:
    """Returns the last line that names an error."""
    lines = [line for line in output.splitlines() if "rror" in line]
    return lines[-1][:300] if lines else output[-200:].strip()


def tell(text: str) -> None:
    """Prints progress where it does not disturb `JSON=1`."""
    print(text, file=sys.stderr, flush=True)
