"""`make soak`: kill a training at random moments, start it again by the same command, and compare it with an undisturbed one.

The kills come from outside: SIGKILL to real processes of a real run, at moments chosen by wall time or by the phase that rank 0 writes
anyway. Nothing in the product knows of them. What was done is kept, so that a soak continues in chunks.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from sft_play.config.keys import variable_name
from sft_play.config.reader import record_of
from sft_play.errors import UserError
from sft_play.files import read_json, read_json_lines, read_object, write_json, write_text
from sft_play.launch.process import end_by_signals
from sft_play.launch.run_folder import choose_name
from sft_play.launch.verdict import LOST
from sft_play.runs.checkpoints import newest_valid, step_of
from sft_play.runs.folder import RunFolder, runs_folder
from sft_play.text import markdown_table, tell

if TYPE_CHECKING:
    from sft_play.config.call import Call

KILLS, SEED = 20, 1
COMMANDS = {
    "single": ("train",), "ddp": ("train-distributed", "NUM_GPUS=2", "LAUNCH_STRATEGY=ddp"), "fsdp2": ("train-fsdp", "NUM_GPUS=2"),
    **{zero: ("train-deepspeed", "NUM_GPUS=2", f"LAUNCH_STRATEGY={zero}") for zero in ("zero1", "zero2", "zero3")},
}  # fmt: skip
STARTING, TRAINING, SAVING = "starting", "training", "saving"
PHASES = (STARTING, "loading", TRAINING, "evaluating", SAVING, "leaving")
"""What rank 0 writes to `phase.json`, in the order of a run; before it does, `starting`."""
LAUNCHER, AGENT, EVERYTHING = "launcher", "agent", "everything"
AIMS = {"time": 40, TRAINING: 25, SAVING: 25, "evaluating": 10}
"""Weights: a random moment of the whole launch, most of which is its start; or one after its first step, or inside a phase that is waited for."""
WITHIN = {SAVING: 0.05, "evaluating": 0.6}
"""How long after a phase began it is killed at the latest, in seconds."""
TARGETS = {"rank": 45, LAUNCHER: 25, AGENT: 15, EVERYTHING: 15}
"""Weights of what is killed, where it lives."""
MARK = "SOAK_LAUNCH"
"""Variable with the id of a launch, which all of its processes inherit."""
LOOK_SECONDS, WAIT_SECONDS = 0.25, 0.002
"""How often new processes are looked for, and how often the phase is read."""
NOTICE_SECONDS = 30.0
"""Within which everything of a launch must have ended after a kill (contract row B9)."""
LAUNCH_SECONDS = 900.0
"""No launch of a soak may take longer than this."""
MOST_FAILURES = 3
"""Launches in a row that may fail by themselves before the soak gives up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One kill -9 and what came of it."""

    aim: str
    """`time` (a random moment), or the phase that was waited for."""
    phase: str
    """What the run was doing as the signal was sent."""
    target: str
    """`launcher`, `agent`, `rank 0`, ..., or `everything`."""
    seconds: float
    """After the launch began."""
    number: int = 0
    run: int = 0
    """Number of the disturbed run, from 1."""
    step: int = 0
    """Last step in `metrics.jsonl`."""
    checkpoint: int = 0
    """Step of the newest valid checkpoint afterwards; 0 without one."""
    code: int | None = None
    """The launcher's exit code; `None` where it was killed itself."""
    over_seconds: float = 0.0
    """From the kill until no process of the launch was left."""

    @property
    def lost(self) -> int:
        """Steps that are trained again."""
        return max(0, self.step - self.checkpoint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A disturbed run that was completed, compared with the undisturbed one."""

    run: int
    kills: int
    rows: int
    """Rows of `metrics.jsonl` that were compared."""
    problems: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return not self.problems


@dataclass(kw_only=True, slots=True)
class State:
    """The whole soak. `save` after every change."""

    settings: dict[str, Any]
    """What every chunk must share: strategy, seed, configuration, overrides."""
    kills: list[Kill] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Everything that was not as promised, with the number of its kill."""
    launches: int = 0
    run: int = 0
    """Number of the disturbed run that is under way or was the last."""
    marks: dict[str, Any] = field(default_factory=dict)
    """Seconds from a launch until each phase began, from undisturbed starts: for choosing moments."""
    seconds: float = 0.0
    """Time that all chunks took."""

    @property
    def run_over(self) -> bool:
        """Whether that run has been compared."""
        return len(self.comparisons) == self.run

    def problem(self, text: str) -> None:
        """Keep something that is not as promised."""
        self.problems.append(text)
        tell(f"PROBLEM: {text}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a launch ended."""

    code: int | None
    """The launcher's exit code; `None` where it was killed itself, or had not ended after `LAUNCH_SECONDS`."""
    kill: Kill | None
    """`None` where the launch ended before its moment came."""
    training: float
    """When the first step began, in seconds after the launch; its end where there was none."""
    seconds: float
    """Of the whole launch."""
    over_seconds: float
    left: Sequence[str]
    """Processes that lived on too long, in words."""
    output: str
    """The end of what the launcher said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Soak:
    """One soak in its folder."""

    folder: Path
    state: State
    words: Sequence[str]
    """The command and what it gets, without `RUN_NAME`."""
    cache: dict[str, str]
    """Variables of a cache of its own, which is thrown away before each run, so that there is a preparation to kill."""

    @property
    def reference(self) -> RunFolder:
        return RunFolder(self.folder / "runs" / "reference")

    @property
    def disturbed(self) -> RunFolder:
        """The run that is under way."""
        return RunFolder(self.folder / "runs" / f"disturbed-{self.state.run:03d}")

    def save(self) -> None:
        write_json(self.folder / "state.json", asdict(self.state))

    def clear(self, run: RunFolder) -> None:
        """Remove a run and what was prepared for the one before it."""
        for path in (run.path, *map(Path, self.cache.values())):
            shutil.rmtree(path, ignore_errors=True)

    def launch(self, run: RunFolder, aim: str | None, chance: random.Random) -> Ended:
        """Start `run` by the same command as always, kill it at a moment of `aim`, and wait until nothing is left."""
        self.state.launches += 1
        run.phase.unlink(missing_ok=True)  # an earlier launch's
        mark, log = f"{os.getpid()}-{self.state.launches}", self.folder / "launch.log"
        inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "sft_play", *self.words, f"RUN_NAME={run.name}"], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env=inherited | self.cache | {"RUNS_DIR": str(run.path.parent), MARK: mark}, start_new_session=True,
            )  # fmt: skip
        began = time.monotonic()
        try:
            shot, training = _watch(process, mark, run, self._moment(aim, chance), aim, chance)
            over = time.monotonic()
            while (left := processes_of(mark)) and time.monotonic() - over < (NOTICE_SECONDS if shot else 0):
                time.sleep(0.1)
            code = None if left or (shot and shot.target in (LAUNCHER, EVERYTHING)) else process.wait(NOTICE_SECONDS)
        finally:
            send_sigkill(processes_of(mark))
            process.wait(30)
        seconds = time.monotonic() - began
        return Ended(
            code=code, kill=shot, training=training or seconds, seconds=seconds, over_seconds=time.monotonic() - over,
            left=[f"{role_of(one, process.pid)} {one.pid}" for one in left],
            output=log.read_text(encoding="utf-8", errors="replace")[-3000:],
        )  # fmt: skip

    def _moment(self, aim: str | None, chance: random.Random) -> float:
        """Return the seconds after the launch, or after the phase of `aim` began."""
        marks = self.state.marks
        if aim is None or aim == "time":
            return chance.uniform(0.05, marks.get("end", 1.0))
        return chance.uniform(0, WITHIN.get(aim, 0.9 * (marks["end"] - marks[TRAINING])))

    def learn(self, ended: Ended) -> None:
        """Keep when steps began and how long a launch took that was not killed; later ones find a full cache, and extensions that are built."""
        for name, seconds in ((TRAINING, ended.training), ("end", ended.seconds)):
            self.state.marks[name] = round(min(self.state.marks.get(name, seconds), seconds), 2)


def _watch(
    process: subprocess.Popen[bytes], mark: str, run: RunFolder, moment: float, aim: str | None, chance: random.Random
) -> tuple[Kill | None, float | None]:
    """Wait for the moment and kill, or for the end; return what was killed, and when the first step began."""
    began = time.monotonic()
    looked, now, training, since = 0.0, 0.0, None, 0.0 if aim == "time" else None
    family: list[psutil.Process] = []
    while process.poll() is None and now < LAUNCH_SECONDS:
        now = time.monotonic() - began
        if now - looked > LOOK_SECONDS:
            looked, family = now, processes_of(mark)
        phase = phase_of(run)
        if phase == TRAINING and training is None:
            training = now
        if since is None and phase == aim:
            since = now
        if aim and since is not None and now >= since + moment:
            roles = {one: role_of(one, process.pid) for one in family}
            if target := choose_target(list(roles.values()), chance):
                send_sigkill([one for one, role in roles.items() if target in (role, EVERYTHING)])
                return Kill(aim=aim, phase=phase, target=target, seconds=round(time.monotonic() - began, 2)), training
        time.sleep(WAIT_SECONDS)
    return None, training


def phase_of(run: RunFolder) -> str:
    """Return what rank 0 wrote last; a checkpoint may be written by a thread while training continues."""
    phase = str(read_object(run.phase).get("phase", STARTING))
    return SAVING if phase != STARTING and any(run.checkpoints.glob(".step-*.partial")) else phase


def processes_of(mark: str) -> list[psutil.Process]:
    """Return every living process of a launch, whatever parent or session it has, in the order in which they were started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def role_of(process: psutil.Process, launcher: int) -> str:
    """Return what a process is in its launch, from its command line and rank."""
    with contextlib.suppress(psutil.Error, OSError):
        line = process.cmdline()
        if process.pid == launcher:
            return LAUNCHER
        if "accelerate.commands.launch" in line:
            return AGENT
        parent = process.parent()
        if "sft_play.train" in line and (
            parent is None or "sft_play.train" not in parent.cmdline() or role_of(parent, launcher) == AGENT
        ):
            return f"rank {process.environ().get('RANK', '0')}"
    return "helper"


def choose_target(roles: Sequence[str], chance: random.Random) -> str | None:
    """Return what is killed, of what lives; `None` where the launcher does not."""
    ranks = sorted(role for role in roles if role.startswith("rank "))
    possible = [*ranks, *(role for role in (LAUNCHER, AGENT) if role in roles), EVERYTHING]
    weights = [TARGETS["rank"] / len(ranks) if role in ranks else TARGETS[role] for role in possible]
    return chance.choices(possible, weights)[0] if LAUNCHER in roles else None


def send_sigkill(processes: Sequence[psutil.Process]) -> None:
    """Send SIGKILL to processes, the first of them first."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def main(call: Call) -> int:
    """Run one chunk of `KILLS` kills and print the table of all chunks; return 1 when anything was not as promised."""
    strategy = call.options.get("STRATEGY", "ddp")
    if strategy not in COMMANDS:
        raise UserError(f"`STRATEGY` is `{strategy}`; expected {', '.join(f'`{name}`' for name in COMMANDS)}")
    kills, seed = call.integer("KILLS"), call.integer("SEED")
    folder = runs_folder().resolve() / choose_name(call.options.get("RUN_NAME", f"soak-{strategy}"), None)
    with end_by_signals():
        soak = prepare_soak(call, folder, strategy, SEED if seed is None else seed)
        tell(f"soak {folder}: {len(soak.state.kills)} kills so far")
        ensure_reference(soak)
        kill_and_continue(soak, KILLS if kills is None else kills)
    state = soak.state
    if "OUT" in call.options:
        write_text(Path(call.options["OUT"]), as_text(state) + "\n")
    print(json.dumps(as_json(state), indent=2) if call.json else as_text(state))
    return 0 if all(one.equal for one in state.comparisons) and not state.problems else 1


def prepare_soak(call: Call, folder: Path, strategy: str, seed: int) -> Soak:
    """Return the soak in `folder`, new or to be continued. Raise `UserError`."""
    overrides = [f"{variable_name(one.key)}={one.text}" for one in call.overrides]
    config = call.options.get("CONFIG")
    if config:
        call.load_config()  # a mistake in it is reported before anything starts
    path, settings = folder / "state.json", {"strategy": strategy, "seed": seed, "config": config, "overrides": overrides}
    other = "choose another RUN_NAME, or remove that folder"
    if path.is_file():
        try:
            state = record_of(read_json(path), State)
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"the soak's state cannot be read: {error}", place=str(path), hint=other) from error
        differ = sorted(name for name in settings if settings[name] != state.settings.get(name))
        if differ:
            said = ", ".join(f"`{name}` was `{state.settings.get(name)}` and is `{settings[name]}`" for name in differ)
            raise UserError(f"another soak's results are there: {said}", place=str(folder), hint=other)
    elif folder.exists() and any(folder.iterdir()):
        raise UserError(f"`{folder}` exists and is no soak", hint=other)
    else:
        state = State(settings=settings)
        write_json(path, asdict(state))
    source = config or str(write_material(folder, seed))
    words = [*COMMANDS[strategy], f"CONFIG={source}", "LAUNCH_AUTO_RESUME=true", "LAUNCH_BALANCE=off", *overrides]
    return Soak(folder=folder, state=state, words=words, cache={} if config else {"SFT_PLAY_CACHE": str(folder / "cache")})


def ensure_reference(soak: Soak) -> None:
    """Make the undisturbed run, once. Raise `UserError` when it does not end well."""
    run = soak.reference
    if run.training_metrics.is_file():
        return
    tell("the undisturbed run, for comparison")
    soak.clear(run)
    ended = soak.launch(run, None, random.Random(0))
    if ended.code:
        raise UserError(f"the undisturbed run ended with code {ended.code}: {ended.output[-1500:]}", place=str(run.path))
    soak.learn(ended)
    soak.save()


def kill_and_continue(soak: Soak, kills: int) -> None:
    """Kill `kills` times; whenever a run is complete it is compared, and the next begins. The last one is brought to its end."""
    state, goal, failures = soak.state, len(soak.state.kills) + kills, 0
    while len(state.kills) < goal or not state.run_over:
        if state.run_over:
            state.run += 1
            soak.clear(soak.disturbed)
        chance = random.Random(f"{state.settings['seed']}-{state.launches}")
        aim = chance.choices(list(AIMS), list(AIMS.values()))[0] if len(state.kills) < goal else None
        ended = soak.launch(soak.disturbed, aim, chance)
        state.seconds += ended.seconds
        failures = 0 if ended.kill or ended.code == 0 else failures + 1
        if ended.kill:
            note_kill(soak, ended, ended.kill)
        elif ended.code == 0:
            soak.learn(ended)
            finish_run(soak, ended)
        else:
            state.problem(f"launch {state.launches} of run {state.run} ended with code {ended.code}: {last_error(ended.output)}")
        soak.save()
        if failures >= MOST_FAILURES:
            place = str(soak.disturbed.path)
            raise UserError(f"{failures} launches in a row failed: {ended.output[-1500:]}", place=place)


def note_kill(soak: Soak, ended: Ended, kill: Kill) -> None:
    """Record a kill and check what must hold after it."""
    state, run = soak.state, soak.disturbed
    newest, skipped = newest_valid(run)
    kill = replace(
        kill, number=len(state.kills) + 1, run=state.run, code=ended.code, over_seconds=round(ended.over_seconds, 2),
        step=max((row["step"] for row in read_json_lines(run.metrics) if row["kind"] == "train"), default=0),
        checkpoint=step_of(newest) if newest else 0,
    )  # fmt: skip
    state.kills.append(kill)
    where = f"kill {kill.number} ({kill.target} in {kill.phase})"
    tell(
        f"{where}: {kill.seconds:.1f} s after the launch, step {kill.step}, checkpoint {kill.checkpoint}; over after {kill.over_seconds:.1f} s"
    )
    if ended.left:
        state.problem(f"{where}: alive {NOTICE_SECONDS:.0f} s later: {', '.join(ended.left)}")
    complete = kill.code == 0 and run.training_metrics.is_file()  # a rank that had done all its work
    if kill.target not in (LAUNCHER, EVERYTHING) and kill.code != LOST and not complete:
        state.problem(f"{where}: the launcher returned {kill.code}, not {LOST}: {last_error(ended.output)}")
    train = read_json(soak.reference.config)["config"]["train"]
    by_steps = train["save_strategy"] == "steps"
    interval = int(train["save_steps"] if by_steps else read_json(soak.reference.plan)["steps_per_epoch"])
    if kill.lost > interval:
        state.problem(f"{where}: {kill.lost} steps lost, more than the save interval of {interval}")
    for reason in skipped:
        state.problem(f"{where}: a published checkpoint is incomplete: {reason}")


def finish_run(soak: Soak, ended: Ended) -> None:
    """Compare a completed run; remove it when it is equal."""
    state, run = soak.state, soak.disturbed
    expected, kills = read_json_lines(soak.reference.metrics), sum(kill.run == state.run for kill in state.kills)
    problems = [*differing_rows(expected, read_json_lines(run.metrics)), *leftovers(run)][:MOST_SHOWN]
    problems += [f"alive after the end: {one}" for one in ended.left]
    state.comparisons.append(Comparison(run=state.run, kills=kills, rows=len(expected), problems=tuple(problems)))
    tell(f"run {state.run} is complete after {kills} kills: {'NOT EQUAL' if problems else 'equal'}, {len(expected)} rows")
    if not problems:
        shutil.rmtree(run.path, ignore_errors=True)


def last_error(output: str) -> str:
    """Return the last line that names an error."""
    return next((line[:300] for line in reversed(output.splitlines()) if "rror" in line), output[-200:].strip())


# What a soak trains: the user's configuration, or a tiny model from scratch with made-up rows, ready within seconds.


ROWS = {"train": 400, "val": 12}
SAVE_STEPS, EVAL_STEPS, STEPS = 5, 8, 60
"""A save every 5 steps and an evaluation with answers every 8, so that they fall on one step (40) and mostly on different ones."""
WORDS = ("the river", "a clock", "my neighbour", "turns", "waits for", "carries", "and", "an old ship", "the house", "leaves")


def write_material(folder: Path, seed: int) -> Path:
    """Write rows and a configuration into `folder`; return the configuration's file. Dropout is on, so that random states count."""
    chance = random.Random(seed)

    def say(most: int) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(3, most)))

    for name, count in ROWS.items():
        rows = [{"prompt": f"{name}-{number}: {say(6)}", "completion": say(11)} for number in range(count)]
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(one) + "\n" for one in rows))
    path = folder / "soak.yaml"  # JSON is YAML
    write_json(path, {
        "model": {
            "init": "random", "tokenizer": "train", "vocab_size": 320, "hidden_size": 64, "attention_heads": 4, "layers": 2,
            "max_seq_len": 128,
        },
        "tuning": {"mode": "full"},
        "data": {"chat_template": "chatml", **{f"{name}_path": str(folder / f"{name}.jsonl") for name in ROWS}},
        "train": {
            "global_batch_size": 8, "batch_size": 2, "max_steps": STEPS, "learning_rate": 2e-3, "save_steps": SAVE_STEPS,
            "save_total_limit": 2, "eval_strategy": "steps", "eval_steps": EVAL_STEPS, "predict_with_generate": True,
            "generation_max_new_tokens": 12,
        },
    })  # fmt: skip
    return path


# What came of it: the comparison with the undisturbed run, metrics to the bit and each step once; a table, JSON.


TIMES = re.compile(r"seconds|per_second|memory|_gib|mfu|percent|mb_s|utilisation|temperature|watts|throttled")
"""Names of figures that a clock or the machine decides."""
MOST_SHOWN = 9


def differing_rows(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """Return the differences between two runs' rows; JSON keeps every bit of a float."""
    problems = []
    for kind in ("train", "eval"):
        before, after = ([row for row in rows if row["kind"] == kind] for rows in (expected, found))
        steps = [row["step"] for row in before], [row["step"] for row in after]
        if steps[0] != steps[1]:
            problems.append(f"{kind} rows: steps {steps[1]} instead of {steps[0]}")
        by_step = {row["step"]: row for row in after}
        problems += [
            f"{kind} rows: step {row['step']}: `{name}` {by_step[row['step']].get(name)} instead of {value}"
            for row in before
            if row["step"] in by_step
            for name, value in row.items()
            if by_step[row["step"]].get(name) != value and not TIMES.search(name)
        ]
    return problems


def leftovers(run: RunFolder) -> list[str]:
    """Return what a completed run should not hold: half-written or temporary files, checkpoints that are not complete."""
    hidden = [path.relative_to(run.path) for path in sorted(run.path.rglob(".*")) if path.suffix != ".lock"]
    newest, skipped = newest_valid(run)
    problems = [*(f"left over: {path}" for path in hidden), *skipped]
    if newest is None or run.last.resolve() != newest.resolve():
        problems.append(f"`last` is {run.last.resolve().name}, not the newest valid checkpoint {newest.name if newest else ''}")
    return problems


def as_json(state: State) -> dict[str, Any]:
    """Return what `JSON=1` prints: the totals of all chunks, and every kill."""
    unequal = [one for one in state.comparisons if not one.equal]
    return {
        "settings": dict(state.settings),
        "kills": len(state.kills),
        "inside_a_save": sum(kill.phase == SAVING for kill in state.kills),
        "by_phase": dict(Counter(kill.phase for kill in state.kills)),
        "by_target": dict(Counter(kill.target for kill in state.kills)),
        "launches": state.launches,
        "runs": len(state.comparisons),
        "equal": len(state.comparisons) - len(unequal),
        "unequal": [asdict(one) for one in unequal],
        "problems": list(state.problems),
        "steps_lost": spread([kill.lost for kill in state.kills]),
        "over_seconds": spread([kill.over_seconds for kill in state.kills]),
        "seconds": round(state.seconds, 1),
        "every_kill": [asdict(kill) for kill in state.kills],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean and maximum."""
    return {"mean": round(sum(values) / len(values), 2) if values else 0.0, "max": max(values, default=0)}


def as_text(state: State) -> str:
    """Return the table of kills by phase, and the totals below it, as Markdown."""
    rows = [["phase", "kills", "steps lost, mean (max)"]]
    for phase in (*PHASES, "all"):
        if found := [kill for kill in state.kills if phase in (kill.phase, "all")]:
            lost = spread([kill.lost for kill in found])
            rows.append([phase, str(len(found)), f"{lost['mean']:.1f} ({lost['max']:.0f})"])
    result = as_json(state)
    over, seed = result["over_seconds"], " ".join([str(state.settings["seed"]), *state.settings["overrides"]])
    lines = [*markdown_table(rows), ""]
    lines.append(
        f"`{state.settings['strategy']}`, seed {seed}: {len(state.kills)} kills, {result['inside_a_save']} of them inside a save; "
        f"{state.launches} launches in {state.seconds / 60:.0f} min; all processes gone after {over['mean']:.1f} s (at most {over['max']:.1f} s)."
    )
    equal, rows_compared = result["equal"], state.comparisons[0].rows if state.comparisons else 0
    lines.append(
        f"{equal} of {result['runs']} disturbed runs equal the undisturbed one to the bit ({rows_compared} rows each, every step once); "
        f"{len(state.problems)} other problems."
    )
    lines += [f"- run {one['run']}: {text}" for one in result["unequal"] for text in one["problems"]]
    lines += [f"- {text}" for text in state.problems]
    return "\n".join(lines)
