"""`make soak`: kill a training at random moments, start it again by the same command, and compare it with an undisturbed one.

The kills come from outside: SIGKILL to real processes of a real run, at moments chosen by wall time or by what the run writes
anyway. Nothing in the product knows of them. What was done is kept, so that a soak continues in chunks.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.keys import variable_name
from sft_play.errors import UserError
from sft_play.files import read_json, read_json_lines, write_json, write_text
from sft_play.launch.process import ended_by_signals
from sft_play.launch.run_folder import choose_name
from sft_play.launch.verdict import LOST
from sft_play.runs.checkpoints import newest_valid, step_of
from sft_play.runs.folder import RunFolder, runs_folder
from sft_play.soak.launches import (
    EVALUATING,
    EVERYTHING,
    LAUNCHER,
    NOTICE_SECONDS,
    PREPARING,
    PUBLISHING,
    SAVING,
    TRAINING,
    Aim,
    Ended,
    Launch,
)
from sft_play.soak.report import (
    Comparison,
    Kill,
    State,
    as_json,
    as_text,
    compare_runs,
    half_written,
    load_state,
)

if TYPE_CHECKING:
    from sft_play.config.call import Call

KILLS, SEED = 20, 1
COMMANDS = {
    "single": ("train",), "ddp": ("train-distributed", "NUM_GPUS=2", "LAUNCH_STRATEGY=ddp"), "fsdp2": ("train-fsdp", "NUM_GPUS=2"),
    **{zero: ("train-deepspeed", "NUM_GPUS=2", f"LAUNCH_STRATEGY={zero}") for zero in ("zero1", "zero2", "zero3")},
}  # fmt: skip
AIMS = {"time": 33, TRAINING: 22, SAVING: 22, EVALUATING: 10, PREPARING: 8, PUBLISHING: 5}
"""Weights: a random moment of the whole launch, most of which is its start; or one after its first step, or inside a phase that is waited for."""
WITHIN = {SAVING: 0.05, EVALUATING: 0.6, PREPARING: 2.0, PUBLISHING: 0.1}
"""How long after a phase began it is killed at the latest, in seconds."""
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

    def save(self) -> None:
        """Keep the state."""
        self.state.save(self.folder / "state.json")

    @property
    def reference(self) -> RunFolder:
        return RunFolder(self.folder / "runs" / "reference")

    @property
    def disturbed(self) -> RunFolder:
        """The run that is under way."""
        return RunFolder(self.folder / "runs" / f"disturbed-{self.state.run:03d}")

    def launch(self, run: RunFolder) -> Launch:
        """Return the next launch of `run`: always the same command, temporary files where they can be counted, no outer make's variables."""
        self.state.launches += 1
        for path in sorted((self.folder / "logs").glob("launch-*.log"))[:-LOGS_KEPT]:
            path.unlink()
        temporary = self.folder / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
        own = {"RUNS_DIR": str(run.path.parent), "TMPDIR": str(temporary)}
        cache = {"SFT_PLAY_CACHE": str(self.folder / "cache")} if self.own_cache else {}
        return Launch(
            words=[*self.words, f"RUN_NAME={run.name}"], environment=kept | own | cache, run=run,
            log=self.folder / "logs" / f"launch-{self.state.launches:04d}.log",
        )  # fmt: skip


def main(call: Call) -> int:
    """Run one chunk of `KILLS` kills and print the table of all chunks; return 1 when anything was not as promised."""
    strategy = call.options.get("STRATEGY", "ddp")
    if strategy not in COMMANDS:
        raise UserError(f"`STRATEGY` is `{strategy}`; expected {', '.join(f'`{name}`' for name in COMMANDS)}")
    kills, seed = call.integer("KILLS"), call.integer("SEED")
    folder = runs_folder().resolve() / choose_name(call.options.get("RUN_NAME", f"soak-{strategy}"), None)
    if (folder / "config.json").exists():
        raise UserError(f"`{folder}` is a run", hint="choose another RUN_NAME for the soak")
    with ended_by_signals():
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
        call.load_config()  # a mistake in it is told before anything starts
    settings: dict[str, Any] = {"strategy": strategy, "seed": seed, "config": config, "overrides": overrides}
    path = folder / "state.json"
    state = load_state(path, settings)
    if not path.is_file():
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"`{folder}` exists and is no soak", hint="choose another RUN_NAME")
        state.save(path)
    source = config or str(write_material(folder, seed))
    words = [*COMMANDS[strategy], f"CONFIG={source}", "LAUNCH_AUTO_RESUME=true", "LAUNCH_BALANCE=off", *overrides]
    return Soak(folder=folder, state=state, words=words, own_cache=config is None)


def ensure_reference(soak: Soak) -> None:
    """Make the undisturbed run, once. Raise `UserError` when it does not end well."""
    run = soak.reference
    if run.training_metrics.is_file():
        return
    tell("the undisturbed run, for comparison")
    shutil.rmtree(run.path, ignore_errors=True)
    shutil.rmtree(soak.folder / "cache", ignore_errors=True)
    ended = soak.launch(run).go()
    if ended.code:
        raise UserError(f"the undisturbed run ended with code {ended.code}: {ended.output[-1500:]}", place=str(run.path))
    learn(soak.state, ended)
    soak.save()


def learn(state: State, ended: Ended) -> None:
    """Keep when steps began and how long a launch took that was not killed; later ones find a full cache, and extensions that are built."""
    for name, seconds in ((TRAINING, ended.seen.get(TRAINING, ended.seconds)), ("end", ended.seconds)):
        state.marks[name] = round(min(state.marks.get(name, seconds), seconds), 2)


def kill_and_continue(soak: Soak, kills: int) -> None:
    """Kill `kills` times; whenever a run is complete it is compared, and the next begins. The last one is brought to its end."""
    state, goal, failures = soak.state, len(soak.state.kills) + kills, 0
    while len(state.kills) < goal or not state.run_over:
        if state.run_over:
            state.run, state.run_kills, state.run_over = state.run + 1, 0, False
            for path in (soak.disturbed.path, *(soak.folder / "cache" / part for part in ("data", "models") if soak.own_cache)):
                shutil.rmtree(path, ignore_errors=True)
        chance = random.Random(f"{state.settings['seed']}-{state.launches}")
        aim = choose_aim(state, chance) if len(state.kills) < goal else None
        ended = soak.launch(soak.disturbed).go(aim, chance)
        state.seconds += ended.seconds
        failures = 0 if ended.shot or ended.code == 0 else failures + 1
        if ended.shot:
            note_kill(soak, ended)
        elif ended.code == 0:
            learn(state, ended)
            finish_run(soak, ended)
        else:
            how = "had not ended in time" if ended.code is None else f"ended by itself with code {ended.code}"
            problem(state, f"launch {state.launches} of run {state.run} {how}: {last_error(ended.output)}")
        soak.save()
        if failures >= MOST_FAILURES:
            raise UserError(
                f"{failures} launches in a row failed: {ended.output[-1500:]}", place=str(soak.disturbed.path),
                hint="the runs, logs and state.json stay there",
            )  # fmt: skip


def choose_aim(state: State, chance: random.Random) -> Aim:
    """Return the next moment: anywhere in a launch, anywhere after its first step, or inside a phase."""
    kinds = AIMS | ({PREPARING: AIMS[PREPARING] // 2} if state.run_kills else {})  # the rows are cached by then
    kind = chance.choices(list(kinds), list(kinds.values()))[0]
    end = state.marks["end"]
    if kind == "time":
        return Aim(kind=kind, seconds=chance.uniform(0.05, end))
    return Aim(kind=kind, seconds=chance.uniform(0, WITHIN.get(kind, 0.9 * (end - state.marks[TRAINING]))))


def note_kill(soak: Soak, ended: Ended) -> None:
    """Record a kill and check what must hold after it."""
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
        step=max((row["step"] for row in read_json_lines(run.metrics) if row["kind"] == "train"), default=0),
        checkpoint=step_of(newest) if newest else 0,
        code=ended.code,
        over_seconds=round(ended.over_seconds, 2),
    )
    state.kills.append(kill)
    state.run_kills += 1
    where = f"kill {kill.number} ({kill.target} in {kill.phase})"
    tell(
        f"{where}: {kill.seconds:.1f} s after the launch, step {kill.step}, checkpoint {kill.checkpoint}; over after "
        f"{kill.over_seconds:.1f} s{'' if kill.code is None else f', code {kill.code}'}"
    )
    if ended.left:
        problem(state, f"{where}: alive {NOTICE_SECONDS:.0f} s later: {ended.left}")
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
    """Keep something that is not as promised."""
    state.problems.append(text)
    tell(f"PROBLEM: {text}")


def last_error(output: str) -> str:
    """Return the last line that names an error."""
    lines = [line for line in output.splitlines() if "rror" in line]
    return lines[-1][:300] if lines else output[-200:].strip()


def tell(text: str) -> None:
    """Print progress where it does not disturb `JSON=1`."""
    print(text, file=sys.stderr, flush=True)


# What a soak trains: the user's configuration, or a tiny model from scratch with made-up rows, ready within seconds.


ROWS = {"train": 400, "validation": 12}
SAVE_STEPS, EVAL_STEPS, STEPS = 5, 8, 60
"""A save every 5 steps and an evaluation with answers every 8, so that they fall on one step (40) and mostly on different ones."""
SUBJECTS = (
    "the river",
    "a clock",
    "my neighbour",
    "the north wind",
    "an old ship",
    "the second house",
    "a small bell",
    "the road",
)
VERBS = ("turns", "waits for", "carries", "remembers", "leaves", "follows", "measures", "calls")


def write_material(folder: Path, seed: int) -> Path:
    """Write rows and a configuration into `folder`; return the configuration's file. Dropout is on, so that random states count."""
    chance = random.Random(seed)

    def sentences(most: int) -> list[str]:
        words = (SUBJECTS, VERBS, SUBJECTS)
        return [" ".join(map(chance.choice, words)) for _ in range(chance.randint(1, most))]

    def row(name: str) -> dict[str, Any]:
        question, answer = f"{name}: {', '.join(sentences(2))}", " and ".join(sentences(3))
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    for name, count in ROWS.items():
        rows = [row(f"{name}-{number}") for number in range(count)]
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(one) + "\n" for one in rows))
    path = folder / "soak.yaml"  # JSON is YAML
    write_json(path, {
        "model": {
            "init": "random", "vocab_size": 320, "hidden_size": 64, "attention_heads": 4, "layers": 2, "max_seq_len": 128,
            "tokenizer": "train",
        },
        "tuning": {"mode": "full"},
        "data": {
            "train_path": str(folder / "train.jsonl"), "val_path": str(folder / "validation.jsonl"), "chat_template": "chatml",
        },
        "train": {
            "global_batch_size": 8, "batch_size": 2, "max_steps": STEPS, "learning_rate": 2e-3, "save_steps": SAVE_STEPS,
            "save_total_limit": 2, "eval_strategy": "steps", "eval_steps": EVAL_STEPS, "predict_with_generate": True,
            "generation_max_new_tokens": 12,
        },
    })  # fmt: skip
    return path
