"""`make slurm`: plans, freezes the configuration, writes the batch script, and with `SUBMIT=1` gives it to sbatch."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sft_play.config.call import FALSE, TRUE, Call
from sft_play.config.load import save_config
from sft_play.config.names import mask
from sft_play.errors import HUB_LOGIN, HardwareError, UserError
from sft_play.files import typed_path, write_json, write_text
from sft_play.launch.rehearse import Ahead, planned_ahead
from sft_play.launch.resume import OF_REPLICAS
from sft_play.launch.run_folder import choose_name, first_launch, has_started
from sft_play.launch.settings import NO_DEFAULT_FILE
from sft_play.plan.batch import count
from sft_play.plan.fit import DoesNotFitError
from sft_play.plan.show import misfit_json, show_misfit, show_plan
from sft_play.runs.folder import RunFolder, cache_folder, runs_folder
from sft_play.schedulers.slurm_script import HEADER, BatchJob, cpus, render
from sft_play.schedulers.slurm_submit import submit

PASSED = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHONPATH|CUDA_HOME|HF_\w+|TRANSFORMERS_\w+|TORCH_HOME|TRITON_CACHE_DIR|XDG_CACHE_HOME|OMP_NUM_THREADS"
    r"|NCCL_(?!TIMEOUT$)\w+|GLOO_\w+|TORCH_(NCCL|FR)_\w+|PYTORCH_(CUDA_)?ALLOC_CONF|AIM_REPO|MLFLOW_TRACKING_URI|WANDB_(MODE|PROJECT|ENTITY|DIR)"
    r"|(http|https|no|all|HTTP|HTTPS|NO|ALL)_(proxy|PROXY)"
)
"""Variables of this shell that the job gets too: where things are, and how the network is used."""
TOKEN_FILE = "HF_TOKEN_PATH"
"""The one name with `TOKEN` in it whose value is no secret."""
LONGEST_INDEX = 11
"""Letters that a task of an array adds to the run's name, its hyphen included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """What is written, side by side."""

    script: Path
    config: Path
    deepspeed: Path


def main(call: Call) -> int:
    """Writes the script and returns 0; what does not fit is shown part by part before the error."""
    try:
        ahead = planned_ahead(call)
    except DoesNotFitError as error:
        print(json.dumps(misfit_json(error), indent=2) if call.json else show_misfit(error) + "\n", flush=True)
        raise
    _refuse_unlike(ahead)
    wanted = _wanted(call)
    name = _name(call, ahead)
    files = _files(call, name)
    job, withheld = job_of(call, ahead, name, files)
    text = render(job)
    _write(ahead, files, text)
    for notice in [*ahead.options.notices, *_notes(call, ahead, name, withheld)]:
        print(f"note: {notice}", file=sys.stderr)
    if not call.json:
        print(f"{show_plan(ahead.plan)}\n\n{_show(job, files)}", flush=True)
    number = submit(files.script, ahead.loaded.origins) if wanted else None
    if call.json:
        print(json.dumps(_facts(ahead, job, files, number), indent=2))
    else:
        print(_next(job, files, number))
    return 0


def job_of(call: Call, ahead: Ahead, name: str, files: Files) -> tuple[BatchJob, list[str]]:
    """Returns the job, and the names of variables that were left out of it because their values look like secrets."""
    words = [
        sys.executable,
        "-m",
        "sft_play",
        _target(ahead, name),
        f"CONFIG={files.config}",
        f"NUM_GPUS={ahead.processes}",
        NO_DEFAULT_FILE,
    ]
    if call.options.get("DEEPSPEED_CONFIG"):
        words.append(f"DEEPSPEED_CONFIG={files.deepspeed}")
    environment, withheld = _environment(os.environ)
    job = BatchJob(
        run_name=name,
        nodes=ahead.plan.num_nodes,
        processes=ahead.processes,
        gpus=ahead.plan.device == "cuda",
        folder=Path.cwd(),
        words=tuple(words),
        environment=environment,
        logs=files.script.parent,
        slurm=ahead.loaded.config.slurm,
    )
    return job, withheld


def _refuse_unlike(ahead: Ahead) -> None:
    """Raises `UserError` for GPUs that differ: a batch job asks for so many of one kind on each of its nodes."""
    plan, gpu_type = ahead.plan, ahead.loaded.config.slurm.gpu_type
    kinds = list(dict.fromkeys(rank.device_name for rank in plan.ranks))
    if plan.device == "cuda" and len(kinds) > 1 and (plan.num_nodes > 1 or gpu_type):
        raise UserError(
            f"the plan is for unlike GPUs (`{'`, `'.join(kinds)}`), and a batch job asks for the same on every node",
            hint="plan for like nodes, such as HARDWARE=4xA100 NUM_NODES=2; `slurm.gpu_type` or `slurm.constraint` then asks the cluster for them",
        )


def _target(ahead: Ahead, name: str) -> str:
    """Returns the command that the nodes run: where the run has started already, one that goes on with it."""
    array = ahead.loaded.config.slurm.array
    run = RunFolder(runs_folder() / (f"{name}-{first_index(array)}" if array else name))
    if not has_started(run):
        return ahead.target
    begun = first_launch(run)["command"]
    if begun not in OF_REPLICAS:
        return "train-fsdp" if begun == "fsdp2" else "train-deepspeed"
    return ahead.target if ahead.plan.strategy in ("single", "ddp") else "train-distributed"


def first_index(array: str) -> int:
    """Returns the first task of `slurm.array`, such as 3 of `3-7%2`."""
    return int(re.split("[-,:%]", array)[0])


def _wanted(call: Call) -> bool:
    text = call.options.get("SUBMIT", "").lower()
    if text not in TRUE | FALSE:
        raise UserError(f"`SUBMIT` is `{call.options['SUBMIT']}`; expected `1` or `0`")
    return text in TRUE


def _name(call: Call, ahead: Ahead) -> str:
    """Returns the run's name, decided here: the job finds its run again by it in every turn."""
    name = choose_name(call.options.get("RUN_NAME"), ahead.loaded.path)
    if ahead.loaded.config.slurm.array:
        choose_name(name + "-" + "0" * (LONGEST_INDEX - 1), None)  # a task's own name must be one too
    return name


def _files(call: Call, name: str) -> Files:
    """Returns where everything is written: in the run's folder, or as `OUT` says: a folder, or the script's own path."""
    out = call.options.get("OUT")
    script = RunFolder(runs_folder() / name).path / "slurm" / "job.sbatch"
    if out:
        script = typed_path(out)
        if script.is_dir() or out.endswith("/"):
            script = script / f"{name}.sbatch"
    script = script.absolute()
    _require_ours(script)
    return Files(
        script=script,
        config=script.with_name(f"{script.stem}.config.json"),
        deepspeed=script.with_name(f"{script.stem}.deepspeed.json"),
    )


def _require_ours(script: Path) -> None:
    """Raises `UserError` where another file stands at the script's place."""
    try:
        beginning = script.read_text(encoding="utf-8", errors="replace")[:200]
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"`{script}` cannot be written: {error.strerror}", hint="choose another OUT=") from None
    if HEADER not in beginning:
        raise UserError(f"`{script}` exists, and is no script of `make slurm`", hint="choose another OUT=, or remove it")


def _environment(ambient: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Returns the variables that the script sets, and the names of those that are left out because they look like secrets."""
    passed = {name: value for name, value in ambient.items() if PASSED.fullmatch(name) and value}
    withheld = sorted(name for name, value in passed.items() if name != TOKEN_FILE and mask(name, value) != value)
    kept = {name: value for name, value in passed.items() if name not in withheld}
    binaries = str(Path(sys.executable).parent)
    paths = kept.get("PATH", os.defpath).split(":")
    kept["PATH"] = ":".join(paths if binaries in paths else [binaries, *paths])
    if "PYTHONPATH" in kept:  # entries are this folder's, and the job begins in it too, but its parts may change folders
        kept["PYTHONPATH"] = ":".join(str(Path(part).absolute()) for part in kept["PYTHONPATH"].split(":") if part)
    kept["RUNS_DIR"] = str(runs_folder().absolute())
    kept["SFT_PLAY_CACHE"] = str(cache_folder().absolute())
    return kept, withheld


def _write(ahead: Ahead, files: Files, text: str) -> None:
    """Writes configuration, DeepSpeed JSON and script; the script last, so that one that is there is whole. Raises `UserError`."""
    _check_shell(ahead.loaded.config.slurm.setup)
    try:
        save_config(ahead.loaded, files.config)
        if ahead.options.deepspeed:
            write_json(files.deepspeed, dict(ahead.options.deepspeed.settings))
        write_text(files.script, text)
    except OSError as error:
        raise HardwareError(
            f"`{files.script}` cannot be written: {error.strerror}",
            hint="OUT= takes a folder or a path on the disk that all nodes share",
        ) from error


def _check_shell(setup: list[str]) -> None:
    """Raises `UserError` where `slurm.setup`, the only shell text that is not ours, leaves a quote or a block open."""
    bash = shutil.which("bash")
    if bash is None:
        return
    done = subprocess.run(
        [bash, "-n"], input="\n".join(setup) + "\n", capture_output=True, text=True, errors="replace", timeout=60, check=False
    )
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise UserError(
            f"`slurm.setup` is no shell text: {words[0] if words else 'bash refuses it'}", hint="each entry is a line of its own"
        )


def _notes(call: Call, ahead: Ahead, name: str, withheld: list[str]) -> list[str]:
    notes = []
    if not call.options.get("HARDWARE"):
        what = "HARDWARE=4xH100 describes the cluster's nodes" if ahead.plan.device == "cpu" else "HARDWARE= describes others"
        notes.append(f"planned for nodes like this machine; {what}")
    if withheld:
        notes.append(
            f"{', '.join(withheld)} looks like a secret and is not written into the script; set it in a file that `slurm.setup` reads"
        )
    if os.environ.get("HF_TOKEN"):
        notes.append(f"HF_TOKEN is not written into the script: {HUB_LOGIN} keeps it in your home, where the job finds it")
    if has_started(RunFolder(runs_folder() / name)):
        notes.append(f"the run `{name}` has started already: the job goes on with it, if the configuration is the same")
    return notes


def _show(job: BatchJob, files: Files) -> str:
    ranks = f"{job.processes} GPU{'s' if job.processes > 1 else ''}" if job.gpus else count(job.processes, "process")
    nodes = f"{count(job.nodes, 'node')}, {ranks} each, {count(cpus(job), 'core')} each, {job.slurm.time}"
    tasks = f", tasks {job.slurm.array}: runs {job.run_name}-INDEX" if job.slurm.array else ""
    return f"slurm: {nodes}{tasks}\n  script   {files.script}\n  config   {files.config} (frozen: later edits elsewhere change nothing)"


def _next(job: BatchJob, files: Files, number: str | None) -> str:
    if number is None:
        return f"  submit   sbatch {shlex.quote(str(files.script))}"
    task = f"{number}_{first_index(job.slurm.array)}" if job.slurm.array else number
    return (
        f"\nsubmitted: job {number}\n  state    squeue --job {number}\n  output   tail -F {shlex.quote(f'{job.logs}/slurm-{task}.out')}\n"
        f"  cancel   scancel {number}   (saves first)\n  save and take another turn: scancel --signal=USR1 --batch {task}"
    )


def _facts(ahead: Ahead, job: BatchJob, files: Files, number: str | None) -> dict[str, object]:
    return {
        "run": job.run_name,
        "script": str(files.script),
        "config": str(files.config),
        "nodes": job.nodes,
        "processes_per_node": job.processes,
        "gpus": job.gpus,
        "command": list(job.words),
        "job": number,
        "plan": ahead.plan.to_json(),
    }
