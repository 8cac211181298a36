"""`make slurm`: plan, freeze the configuration, write the batch script, and submit it with `SUBMIT=1`.

The script is `slurm.sh` filled with options, variables and the command. `slurm.setup` is the only shell text of the
user; all other values are quoted. What `slurm.sh` does about signals and requeues was tested on Slurm 22.05
(`tests/multinode/test_slurm.py`):

- `--signal=B:USR1@N` only reaches the batch shell; a preemption or `scancel` only sends SIGTERM to the tasks. srun
  forwards USR1, but answers SIGTERM with SIGKILL for its tasks, so it only gets USR1.
- If processes are tracked by cgroup, a task's signal reaches the process that slurmstepd started and not its children,
  so the shell on each node forwards it. A signal that arrives twice is one request to the launcher.
- srun's own exit code is the greatest of its tasks', so a lost peer (75) would hide a permanent error (1 to 5). Each
  node writes its code to a file.
- `--export=NONE` makes Slurm itself run the user's login scripts on the node, and hold the job if they are slow or
  fail. `NIL` (Slurm 23.02) does not, so the script turns itself into a login shell. Older versions take `NIL` as the
  name of a variable that does not exist, which has the same effect as `NONE`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sft_play.config.call import Call
from sft_play.config.data_rules import hint_absent
from sft_play.config.load import own_words, saved_form
from sft_play.config.schedulers import SlurmConfig, quantity, seconds_of
from sft_play.errors import HUB_LOGIN, DataError, HardwareError, UserError, mask
from sft_play.files import text_sha256, typed_path, write_json, write_text
from sft_play.launch.rehearse import Rehearsal, local_paths, rehearse_for_nodes, wants_reasons
from sft_play.launch.resume import refuse_changes, started_run
from sft_play.launch.run_folder import choose_name, has_started, launches, reserve_folder
from sft_play.launch.settings import NO_DEFAULT_FILE, require_ours
from sft_play.plan.architecture import shape_of
from sft_play.plan.hardware import GIB
from sft_play.plan.memory import machine_bytes
from sft_play.plan.plan import COMMANDS, Plan
from sft_play.plan.show import show_plan
from sft_play.runs.folder import RunFolder, cache_folder, runs_folder
from sft_play.runs.gate import check_run
from sft_play.text import duration, list_some, plural, tell

HEADER = "# Rendered by `make slurm`: docs/slurm.md says what it does."
TEMPLATE = Path(__file__).with_name("slurm.sh")
EXPORT = "--export=NIL"
PASSED = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHONPATH|CUDA_HOME|HF_\w+|TRANSFORMERS_\w+|TORCH_HOME|TRITON_CACHE_DIR|XDG_CACHE_HOME"
    r"|OMP_NUM_THREADS|NCCL_(?!TIMEOUT$)\w+|GLOO_\w+|TORCH_(NCCL|FR)_\w+|PYTORCH_(CUDA_)?ALLOC_CONF|AIM_REPO"
    r"|MLFLOW_TRACKING_URI|WANDB_(MODE|PROJECT|ENTITY|DIR)"
    r"|(http|https|no|all|HTTP|HTTPS|NO|ALL)_(proxy|PROXY)"
)
"""Variables of this shell that the job inherits: paths and network settings."""
TOKEN_FILE = "HF_TOKEN_PATH"
"""The only name with `TOKEN` in it whose value is not a secret."""
OPTIONS, OF_JOBS = ("SBATCH_", "SQUEUE_"), re.compile(r"SLURM_(?!(CONF|JWT)$)\w+")
"""Prefixes of variables that sbatch and squeue read options from, and the variables of the job that the command was
typed in.
"""
DESCRIBING = (
    "CONF JOB* NNODES NODE* TASKS_PER_NODE *_ON_NODE ARRAY_* RESTART_COUNT SUBMIT_* *CLUSTER TOPOLOGY_* SPANK_*"
    " CLUSTER_NAME PRIO_PROCESS"
)
"""`SLURM_` variables that describe a job; srun reads all others as options, and a shell's own reach the job even under
`--export=NONE`.
"""
OF_STEPS = {
    "--mem": "MEM_PER_NODE", "--cpu-freq": "CPU_FREQ_REQ",
    **{f"--{name}": name.replace("-", "_").upper() for name in (
        "mem-per-cpu", "mem-per-gpu", "mem-bind", "gpus-per-node", "gpu-bind", "gpu-freq", "hint", "distribution",
        "threads-per-core", "ntasks-per-core", "ntasks-per-socket", "overcommit", "profile", "tres-per-task",
    )},
}  # fmt: skip
"""Options of sbatch -> the variables, without `SLURM_`, by which a job passes them to srun."""
MADE_UNLIKE = re.compile(r"SLURM_ARRAY_|^\s*(source|\.)\s")
"""What a line of `slurm.setup` may make the tasks of an array differ by: the index, or a file that reads it."""
LONGEST_INDEX = 11
"""Letters that a task of an array adds to the run's name, including the hyphen."""
REFUSED_HINT = (
    "`sinfo` lists partitions, times and nodes, `sacctmgr show qos` and `sacctmgr show associations user=$USER` your"
    " limits; SLURM_..., NUM_NODES= and NUM_GPUS= ask for others"
)
LOCAL = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders that each node usually has for itself."""
Tasks = Mapping[int, tuple[str, Sequence[str]]]
"""Index in a sweep's array -> the run's name and the words of this task's command only. Empty without a sweep, where
the index ends the run's name.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchJob:
    """The content of a batch script."""

    run_name: str
    """The run's name; with an array, each task adds its index."""
    nodes: int
    processes: int
    """Ranks on each node."""
    gpus: bool
    """Whether each rank has a GPU; CPU clusters need no request."""
    folder: Path
    """Working folder, visible to all nodes."""
    words: tuple[str, ...]
    """The command on every node and after every requeue: Python, `-m`, ..., `CONFIG=...`."""
    environment: Mapping[str, str]
    """Variables set in addition to those of the user's login on the node."""
    logs: Path
    """Folder of the job's own output, visible to all nodes."""
    slurm: SlurmConfig
    tasks: Tasks = field(default_factory=dict)

    @property
    def cpus(self) -> int:
        """CPU cores of a node's task."""
        return self.slurm.cpus_per_gpu * self.processes


def main(call: Call, tasks: Tasks | None = None) -> int:
    """Write the script of a run, or of a sweep whose runs are the tasks of `slurm.array`, and return 0."""
    rehearsal = rehearse_for_nodes(call)
    _refuse_unlike(rehearsal)
    submitting = call.flag("SUBMIT")
    if submitting and rehearsal.absent:
        path, by_hand = rehearsal.absent[0], "if only the nodes see it, omit SUBMIT=1 and submit the script"
        raise DataError(f"not submitted: `{path}` is not on this machine", hint=f"{hint_absent(path)}\n      {by_hand}")
    name = choose_name(call.options.get("RUN_NAME"), rehearsal.loaded.path)
    if array := rehearsal.loaded.config.slurm.array:
        if array.startswith("%") and not tasks:
            text, place = f"`slurm.array` is `{array}`, without indices", rehearsal.loaded.origins["slurm.array"]
            raise UserError(text, place=place, hint=f"SLURM_ARRAY=0-3{array}; only `make sweep` knows its own")
        choose_name(name + "-" + "0" * (LONGEST_INDEX - 1), None)  # a task's name must be valid too
    elif run := started_run(name):
        refuse_changes(call, rehearsal.loaded, run)  # here, not hours later in the job
    environment, withheld = _environment(os.environ)
    with contextlib.ExitStack() as stack:
        if "RUN_NAME" not in call.options:
            name = stack.enter_context(reserve_folder(name, unnamed=True)).name
        script = _script(call, name)
        frozen = _frozen(rehearsal, script)
        job = replace(_job(rehearsal, name, script, environment, frozen), tasks=tasks or {})
        _write(rehearsal, {**frozen, script: render(job)})
    for notice in [*rehearsal.options.notices, *_notes(call, rehearsal, script, withheld, tasks)]:
        tell(f"note: {notice}")
    if not call.json:
        print(
            f"{show_plan(rehearsal.plan, why=wants_reasons(call))}\n\n{_show(job, script, next(iter(frozen)))}",
            flush=True,
        )
    number = submit(script) if submitting else None
    if call.json:
        facts = {
            "run": name,
            "script": str(script),
            "config": str(next(iter(frozen))),
            "nodes": job.nodes,
            "processes_per_node": job.processes,
            "gpus": job.gpus,
            "command": list(job.words),
            "job": number,
            "plan": rehearsal.plan.to_json(),
        }
        print(json.dumps(facts, indent=2))
    else:
        print(_next(job, script, number))
    return 0


def render(job: BatchJob) -> str:
    """Return the text of the script."""
    quoted, array = shlex.quote, bool(job.slurm.array)
    # The SLURM_JOB_ID of one task is the array's own number, which alone would mean all tasks.
    number = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if array else '"$SLURM_JOB_ID"'
    parts = {
        "@DESCRIBING@": [" | ".join(f"SLURM_{name}" for name in visible_variables(job))],
        "@ENVIRONMENT@": [
            *(f"export {name}={quoted(value)}" for name, value in sorted(job.environment.items())),
            f"cd -- {quoted(str(job.folder))} || exit 3",
        ],
        "@SETUP@": job.slurm.setup,
        "@JOB@": [
            f"words=() run_name={quoted(job.run_name)}"
            + ('-"$SLURM_ARRAY_TASK_ID"' if array and not job.tasks else ""),
            *_cases(job.tasks),
            f"job_id={number}",
            f'log={quoted(str(job.logs) + "/slurm-")}"$job_id"',
            f"most_requeues={job.slurm.max_requeues} cpus={job.cpus}",
            f'command=({shlex.join(job.words)} "${{words[@]}}" RUN_NAME="$run_name" LAUNCH_AUTO_RESUME=true)',
        ],
    }
    body = re.sub("@[A-Z]+@", lambda mark: "\n".join(parts[mark[0]]), TEMPLATE.read_text(encoding="utf-8"))
    return "\n".join(["#!/bin/bash", HEADER, *(f"#SBATCH {line}" for line in options(job)), "", body])


def visible_variables(job: BatchJob) -> list[str]:
    """Return the names, without `SLURM_`, of the job's variables that srun may see: its description and its own
    options.
    """
    own = [line.partition("=")[0] for line in options(job)]
    return [*DESCRIBING.split(), *(OF_STEPS[name] for name in own if name in OF_STEPS)]


def _cases(tasks: Tasks) -> list[str]:
    """Return the shell lines that select the run of each task of a sweep."""
    lines = [
        f"  {index}) run_name={shlex.quote(name)} words=({shlex.join(words)}) ;;"
        for index, (name, words) in tasks.items()
    ]
    return ["case $SLURM_ARRAY_TASK_ID in", *lines, "esac"] if tasks else []


def options(job: BatchJob) -> list[str]:
    """Return the options of the `#SBATCH` lines."""
    slurm = job.slurm
    output = str(job.logs).replace("%", "%%") + f"/slurm-{'%A_%a' if slurm.array else '%j'}.out"
    values: dict[str, str | int | None] = {
        "--job-name": job.run_name,
        "--nodes": job.nodes,
        "--ntasks-per-node": 1,
        "--gpus-per-node": f"{slurm.gpu_type + ':' if slurm.gpu_type else ''}{job.processes}" if job.gpus else None,
        "--cpus-per-task": job.cpus,
        "--mem": slurm.memory,
        "--time": slurm.time,
        "--partition": slurm.partition,
        "--account": slurm.account,
        "--qos": slurm.qos,
        "--constraint": slurm.constraint,
        "--array": slurm.array,
        "--signal": f"B:USR1@{slurm.warning_seconds}",
        "--requeue": "",
        "--open-mode": "append",
        "--output": output,
        **{name: value for name, _, value in (option.partition("=") for option in slurm.options)},
    }
    return [
        f"{name}={_for_sbatch(str(value))}" if value != "" else name
        for name, value in values.items()
        if value is not None
    ] + [EXPORT]


def _for_sbatch(value: str) -> str:
    """Return a value as sbatch reads it in a script: quoted if it contains a space, a quote, a backslash or `#`."""
    if not any(letter.isspace() or letter in "\"'\\#" for letter in value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def submit(script: Path) -> str:
    """Submit a script and return the job's id.

    Raise `HardwareError` without sbatch, and `UserError` with sbatch's message if the job is refused; nothing is queued
    then.
    """
    program = shutil.which("sbatch")
    if program is None:
        text = "there is no `sbatch` here, so nothing was submitted"
        raise HardwareError(text, hint=f"on the cluster's login node: sbatch {script.absolute()}")
    _sbatch(program, "--test-only", script)  # a job that can never run would wait forever
    answer = _sbatch(program, "--parsable", script).strip()
    return answer.rpartition("\n")[2].partition(";")[0]


def overriding(environ: Mapping[str, str]) -> list[str]:
    """Return the shell's variables that Slurm's programs read as options, which override those of a script.

    Inside a job `SLURM_` variables are ignored, since most of them describe that job.
    """
    inside = "SLURM_JOB_ID" in environ
    return sorted(name for name in _read_by_slurm(environ) if not (inside and OF_JOBS.fullmatch(name)))


def _read_by_slurm(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that Slurm's programs read as options, those of an outer job included."""
    return [name for name in environ if name.startswith(OPTIONS) or OF_JOBS.fullmatch(name)]


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of Slurm without the options in this shell's variables."""
    ours = {name: text for name, text in os.environ.items() if name not in _read_by_slurm(os.environ)}
    return subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False, env=ours
    )


def _sbatch(program: str, option: str, script: Path) -> str:
    """Run sbatch and return its output."""
    done = _run(program, option, str(script.absolute()))
    if done.returncode == 0:
        return done.stdout
    words = "\n".join(line for line in (done.stderr + done.stdout).splitlines() if line.strip())
    if shutil.which("squeue") and _run("squeue", "--me", "--noheader").returncode:
        raise HardwareError(
            f"Slurm is not set up here, or its controller does not answer:\n{words}",
            place=str(script),
            hint=f"`scontrol ping` asks it again; on the cluster's login node: sbatch {script.absolute()}",
        )
    text = f"the cluster refuses the job:\n{words or f'sbatch ended with code {done.returncode}'}"
    raise UserError(text, place=str(script), hint=REFUSED_HINT)


def is_queued(name: str) -> bool:
    """Return whether a job of this user and name waits or runs; if `squeue` fails, `submit` will report why."""
    with contextlib.suppress(OSError):
        return bool(_run("squeue", "--me", "--noheader", f"--name={name}").stdout.strip())
    return False


def first_index(array: str) -> int:
    """Return the first index of `slurm.array`, such as 3 of `3-7%2`."""
    return int(re.split("[-,:%]", array)[0])


def _refuse_unlike(rehearsal: Rehearsal) -> None:
    """Raise `UserError` for different GPUs: a batch job requests the same GPUs on each of its nodes."""
    plan, gpu_type = rehearsal.plan, rehearsal.loaded.config.slurm.gpu_type
    kinds = list(dict.fromkeys(rank.device_name for rank in plan.ranks))
    if plan.device == "cuda" and len(kinds) > 1 and (plan.num_nodes > 1 or gpu_type):
        raise UserError(
            f"the plan has different GPUs (`{'`, `'.join(kinds)}`), but a batch job asks for the same on every node",
            hint=(
                "plan for equal nodes, such as HARDWARE=4xA100 NUM_NODES=2; `slurm.gpu_type` or `slurm.constraint` then"
                " asks the cluster for them"
            ),
        )


def _job(
    rehearsal: Rehearsal, name: str, script: Path, environment: Mapping[str, str], frozen: Mapping[Path, Any]
) -> BatchJob:
    words = [sys.executable, "-m", "sft_play", _target(rehearsal, name)]
    words += [f"{option}={path}" for option, path in zip(("CONFIG", "DEEPSPEED_CONFIG"), frozen, strict=False)]
    words += [f"NUM_GPUS={rehearsal.processes}", NO_DEFAULT_FILE, *own_words(rehearsal.loaded)]
    hardware, slurm = rehearsal.hardware, rehearsal.loaded.config.slurm
    if (hardware.kind == "cpu" or not hardware.described) and not rehearsal.loaded.typed("slurm.cpus_per_gpu"):
        there = max(1, hardware.cpu_threads // rehearsal.processes)
        slurm = replace(slurm, cpus_per_gpu=min(slurm.cpus_per_gpu, there))
    return BatchJob(
        run_name=name,
        nodes=rehearsal.plan.num_nodes,
        processes=rehearsal.processes,
        gpus=rehearsal.plan.device == "cuda",
        folder=Path.cwd(),
        words=tuple(words),
        environment=environment,
        logs=script.parent,
        slurm=slurm,
    )


def _target(rehearsal: Rehearsal, name: str) -> str:
    """Return the command that the nodes run, which can continue the run if it has started already."""
    array = rehearsal.loaded.config.slurm.array
    run = RunFolder(runs_folder() / (f"{name}-{first_index(array)}" if array else name))
    command = launches(run)[0]["launch"]["command"] if has_started(run) else None
    if command in ("zero", "fsdp2"):
        return COMMANDS[command]
    return "train-distributed" if command and rehearsal.plan.sharded else rehearsal.target


def _script(call: Call, name: str) -> Path:
    """Return the script's path, in the run's folder or as `OUT` says. Raise `UserError` if another file is there."""
    out = call.options.get("OUT")
    script = check_run(RunFolder(runs_folder() / name), writes=not out).path / "slurm" / "job.sbatch"
    if out:
        script = typed_path(out)
        if script.is_dir() or out.endswith("/"):
            script = script / f"{name}.sbatch"
    script = script.absolute()
    require_ours(script, HEADER, "slurm")
    return script


def _frozen(rehearsal: Rehearsal, script: Path) -> dict[Path, Mapping[str, Any]]:
    """Return path -> content of the configuration and, if there is one, the DeepSpeed JSON.

    They are named by their content, so that a job of an earlier script, which reads them when it starts, keeps its own.
    """
    contents = {"config": saved_form(rehearsal.loaded)}
    if rehearsal.options.deepspeed:
        contents["deepspeed"] = dict(rehearsal.options.deepspeed.settings)
    digests = {what: text_sha256(json.dumps(content)) for what, content in contents.items()}
    return {
        script.with_name(f"{script.stem}.{what}-{digests[what][:8]}.json"): content
        for what, content in contents.items()
    }


def _environment(ambient: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that the script sets, and the names of those omitted because they look like secrets."""
    passed = {name: value for name, value in ambient.items() if PASSED.fullmatch(name) and value}
    withheld = sorted(name for name, value in passed.items() if name != TOKEN_FILE and mask(name, value) != value)
    variables = {name: value for name, value in passed.items() if name not in withheld}
    binaries = str(Path(sys.executable).parent)
    paths = variables.get("PATH", os.defpath).split(":")
    variables["PATH"] = ":".join(paths if binaries in paths else [binaries, *paths])
    # Relative entries mean this folder; the job starts in it too, but its parts may change folders.
    if "PYTHONPATH" in variables:
        entries = [str(Path(part).absolute()) for part in variables["PYTHONPATH"].split(":") if part]
        variables["PYTHONPATH"] = ":".join(entries)
    return (
        variables
        | {
            "RUNS_DIR": str(runs_folder().absolute()),
            "SFT_PLAY_CACHE": str(cache_folder().absolute()),
        },
        withheld,
    )


def _write(rehearsal: Rehearsal, files: Mapping[Path, Mapping[str, Any] | str]) -> None:
    """Write configuration, DeepSpeed JSON and, last, the script, so that an existing script is complete. Raise
    `UserError`.
    """
    # The only shell text that is not ours; it may have an unclosed quote or block.
    setup = "\n".join(rehearsal.loaded.config.slurm.setup) + "\n"
    done = subprocess.run(["bash", "-n"], input=setup, capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = done.stderr.strip().partition("\n")[0]
        raise UserError(f"`slurm.setup` is not valid shell text: {complaint}", hint="each entry is one line")
    try:
        for path, content in files.items():
            write_text(path, content) if isinstance(content, str) else write_json(path, dict(content))
    except OSError as error:
        raise HardwareError(
            f"`{path}` cannot be written: {error.strerror}",
            hint="OUT= takes a folder or a path on the disk that all nodes share",
        ) from error


def _notes(call: Call, rehearsal: Rehearsal, script: Path, withheld: list[str], tasks: Tasks | None) -> list[str]:
    notes = []
    if not call.options.get("HARDWARE"):
        what = (
            "HARDWARE=4xH100 describes the cluster's nodes"
            if rehearsal.plan.device == "cpu"
            else "HARDWARE= describes others"
        )
        notes.append(f"planned for nodes like this machine; {what}")
    config = rehearsal.loaded.config
    memory = config.slurm.memory
    need = machine_bytes(config, shape_of(config.model), rehearsal.plan, rehearsal.processes)
    if memory and need > (quantity(f"{memory}i") or 0):
        notes.append(
            f"the plan needs {need / GIB:.1f} GiB of a node's memory, and slurm.memory is {memory}: raise it, or Slurm"
            " ends the job"
        )
    notes += _note_of_time(config.slurm, rehearsal.plan)
    notes += _note_of_disks([Path.cwd(), runs_folder(), cache_folder(), script, *map(typed_path, local_paths(config))])
    if config.slurm.array and not tasks and not any(MADE_UNLIKE.search(line) for line in config.slurm.setup):
        notes.append(
            "the tasks of `slurm.array` train the same, each for itself: a line of `slurm.setup` such as"
            " `export SFT_TRAIN_SEED=$SLURM_ARRAY_TASK_ID` makes them differ"
        )
    if theirs := overriding(os.environ):
        notes.append(
            f"{', '.join(theirs)} of this shell would win over the script's options: the job is to be submitted without"
        )
    if withheld:
        notes.append(
            f"{', '.join(withheld)} looks like a secret and is not written into the script; set it in a file that"
            " `slurm.setup` reads"
        )
    if os.environ.get("HF_TOKEN"):
        notes.append(
            f"HF_TOKEN is not written into the script: {HUB_LOGIN} keeps it in your home, where the job finds it"
        )
    return notes


def _note_of_disks(needed: Sequence[Path]) -> list[str]:
    """Return a note about the paths that probably only this machine has, if there are any."""
    tops = [Path(top).resolve() for top in (*LOCAL, os.environ.get("TMPDIR")) if top]
    unshared = {path.absolute() for path in needed if any(path.resolve().is_relative_to(top) for top in tops)}
    if not unshared:
        return []
    listed = list_some(sorted(str(path) for path in unshared if unshared.isdisjoint(path.parents)), 4)
    return [f"nodes may not see {listed}: `/tmp` and the like are usually a separate disk of each node"]


def _note_of_time(slurm: SlurmConfig, plan: Plan) -> list[str]:
    """Return how many turns a run needs by its forecast, if one is not enough."""
    limit, needed = seconds_of(slurm.time) or 0, plan.total_seconds or 0.0
    if needed <= limit:
        return []
    turns = math.ceil(needed / (limit - slurm.warning_seconds))
    enough = turns - 1 <= slurm.max_requeues
    requeues = f"`slurm.max_requeues` is {slurm.max_requeues}, which is {'enough' if enough else 'too few'}"
    return [
        f"the forecast is {duration(needed)} without loading, evaluation and saving, and `slurm.time` {slurm.time} is"
        f" {duration(limit)}: at least {plural(turns, 'turn')}, each from the last one's checkpoint; {requeues}"
    ]


def _show(job: BatchJob, script: Path, config: Path) -> str:
    ranks = f"{job.processes} GPU{'s' if job.processes > 1 else ''}" if job.gpus else plural(job.processes, "process")
    limit = duration(seconds_of(job.slurm.time) or 0)
    nodes = f"{plural(job.nodes, 'node')}, {ranks} each, {plural(job.cpus, 'core')} each, at most {limit}"
    named = f"{plural(len(job.tasks), 'run')} of the sweep" if job.tasks else f"runs {job.run_name}-INDEX"
    tasks = f", tasks {job.slurm.array}: {named}" if job.slurm.array else ""
    return (
        f"slurm: {nodes}{tasks}\n  script   {script}\n  config   {config} (frozen: later edits"
        " elsewhere change nothing)"
    )


def _next(job: BatchJob, script: Path, number: str | None) -> str:
    if number is None:
        without = "".join(f"-u {name} " for name in overriding(os.environ))
        return f"  submit   {f'env {without}' if without else ''}sbatch {shlex.quote(str(script))}"
    task = f"{number}_{first_index(job.slurm.array)}" if job.slurm.array else number
    return (
        f"\nsubmitted: job {number}\n  state    squeue --job {number}\n  output   tail -F"
        f" {shlex.quote(f'{job.logs}/slurm-{task}.out')}\n  cancel   scancel {number}   (saves first)\n  save and take"
        f" another turn: scancel --signal=USR1 --batch {task}"
    )
