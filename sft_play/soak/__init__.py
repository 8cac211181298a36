"""`make soak`: kill a training at random moments, start it again by the same command, and compare it with an undisturbed one.

The kills come from outside: SIGKILL to real processes of a real run, at moments chosen by wall time or by the phase that rank 0 writes
anyway. Nothing in the product knows of them. What was done is kept, so that a soak continues in chunks.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from sft_play.config.keys import variable_name
from sft_play.errors import UserError
from sft_play.files import read_json, read_json_lines, read_object, write_json, write_text
from sft_play.launch.process import end_by_signals
from sft_play.launch.run_folder import choose_name
from sft_play.launch.verdict import LOST
from sft_play.runs.checkpoints import newest_valid, step_of
from sft_play.runs.folder import RunFolder, runs_folder
from sft_play.soak.report import EVERYTHING, SAVING, STARTING, Comparison, Kill, State, as_json, as_text, compare_runs, load_state

if TYPE_CHECKING:
    from sft_play.config.call import Call

KILLS, SEED = 20, 1
COMMANDS = {
    "single": ("train",), "ddp": ("train-distributed", "NUM_GPUS=2", "LAUNCH_STRATEGY=ddp"), "fsdp2": ("train-fsdp", "NUM_GPUS=2"),
    **{zero: ("train-deepspeed", "NUM_GPUS=2", f"LAUNCH_STRATEGY={zero}") for zero in ("zero1", "zero2", "zero3")},
}  # fmt: skip
TRAINING, LAUNCHER, AGENT = "training", "launcher", "agent"
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

    def clear(self, run: RunFolder) -> None:
        """Remove a run and what was prepared for the one before it."""
        for path in (run.path, *map(Path, self.cache.values())):
            shutil.rmtree(path, ignore_errors=True)

    def launch(self, run: RunFolder, aim: str | None, chance: random.Random) -> Ended:
        """Start `run` by the same command as always, kill it at a moment of `aim`, and wait until nothing is left."""
        self.state.launches += 1
        run.phase.unlink(missing_ok=True)  # an earlier launch's
        mark, log = uuid.uuid4().hex, self.folder / "launch.log"
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
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


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
    path = folder / "state.json"
    state = load_state(path, {"strategy": strategy, "seed": seed, "config": config, "overrides": overrides})
    if not path.is_file():
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"`{folder}` exists and is no soak", hint="choose another RUN_NAME")
        state.save(path)
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
    soak.state.save(soak.folder / "state.json")


def kill_and_continue(soak: Soak, kills: int) -> None:
    """Kill `kills` times; whenever a run is complete it is compared, and the next begins. The last one is brought to its end."""
    state, goal, failures = soak.state, len(soak.state.kills) + kills, 0
    while len(state.kills) < goal or not state.run_over:
        if state.run_over:
            state.run, state.run_kills, state.run_over = state.run + 1, 0, False
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
            problem(state, f"launch {state.launches} of run {state.run} ended with code {ended.code}: {last_error(ended.output)}")
        soak.state.save(soak.folder / "state.json")
        if failures >= MOST_FAILURES:
            raise UserError(
                f"{failures} launches in a row failed: {ended.output[-1500:]}", place=str(soak.disturbed.path), hint="the runs stay there",
            )  # fmt: skip


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
    state.run_kills += 1
    where = f"kill {kill.number} ({kill.target} in {kill.phase})"
    tell(
        f"{where}: {kill.seconds:.1f} s after the launch, step {kill.step}, checkpoint {kill.checkpoint}; over after {kill.over_seconds:.1f} s"
    )
    if ended.left:
        problem(state, f"{where}: alive {NOTICE_SECONDS:.0f} s later: {', '.join(ended.left)}")
    complete = kill.code == 0 and run.training_metrics.is_file()  # a rank that had done all its work
    if kill.target not in (LAUNCHER, EVERYTHING) and kill.code != LOST and not complete:
        problem(state, f"{where}: the launcher returned {kill.code}, not {LOST}: {last_error(ended.output)}")
    train = read_json(soak.reference.config)["config"]["train"]
    by_steps = train["save_strategy"] == "steps"
    interval = int(train["save_steps"] if by_steps else read_json(soak.reference.plan)["steps_per_epoch"])
    if kill.lost > interval:
        problem(state, f"{where}: {kill.lost} steps lost, more than the save interval of {interval}")
    for reason in skipped:
        problem(state, f"{where}: a published checkpoint is incomplete: {reason}")


def finish_run(soak: Soak, ended: Ended) -> None:
    """Compare a completed run; remove it when it is equal."""
    state, run = soak.state, soak.disturbed
    rows, problems = compare_runs(soak.reference, run)
    problems += [f"alive after the end: {one}" for one in ended.left]
    state.comparisons.append(Comparison(run=state.run, kills=state.run_kills, rows=rows, problems=tuple(problems)))
    state.run_over = True
    tell(f"run {state.run} is complete after {state.run_kills} kills: {'equal' if not problems else 'NOT EQUAL'}, {rows} rows")
    if not problems:
        shutil.rmtree(run.path, ignore_errors=True)


def problem(state: State, text: str) -> None:
    """Keep something that is not as promised."""
    state.problems.append(text)
    tell(f"PROBLEM: {text}")


def last_error(output: str) -> str:
    """Return the last line that names an error."""
    return next((line[:300] for line in reversed(output.splitlines()) if "rror" in line), output[-200:].strip())


def tell(text: str) -> None:
    """Print progress where it does not disturb `JSON=1`."""
    print(text, file=sys.stderr, flush=True)


# What a soak trains: the user's configuration, or a tiny model from scratch with made-up rows, ready within seconds.


ROWS = {"train": 400, "val": 12}
SAVE_STEPS, EVAL_STEPS, STEPS = 5, 8, 60
"""A save every 5 steps and an evaluation with answers every 8, so that they fall on one step (40) and mostly on different ones."""
WORDS = (
    "the river",
    "a clock",
    "my neighbour",
    "turns",
    "waits for",
    "carries",
    "and",
    "an old ship",
    "the second house",
    "leaves",
)


def write_material(folder: Path, seed: int) -> Path:
    """Write rows and a configuration into `folder`; return the configuration's file. Dropout is on, so that random states count."""
    chance = random.Random(seed)

    def say(most: int) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(3, most)))

    for name, count in ROWS.items():
        rows: list[dict[str, Any]] = [
            {"messages": [{"role": "user", "content": f"{name}-{number}: {say(6)}"}, {"role": "assistant", "content": say(11)}]}
            for number in range(count)
        ]
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
