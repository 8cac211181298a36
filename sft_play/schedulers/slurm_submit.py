"""Hands a script to sbatch: once to look whether the cluster would take it, once in earnest."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from sft_play.config.load import DEFAULT
from sft_play.errors import HardwareError, RetryableError, UserError

PATIENCE_SECONDS = 120.0
"""sbatch itself waits for a busy controller, by default up to 10 s a message."""
PARTITIONS = "`sinfo -s` lists the partitions; then SLURM_PARTITION=NAME"
HINTS: tuple[tuple[str, str | None, str], ...] = (
    (r"qos(max|min|grp)\w|assoc(max|min|grp)\w|accounting/qos policy", None,
     "`sacctmgr show qos` and `sacctmgr show associations user=$USER` list your limits, `squeue --me` what counts against them now; SLURM_TIME, "
     "NUM_NODES and NUM_GPUS ask for less, SLURM_QOS=NAME for another"),
    (r"invalid partition|partition name", "slurm.partition", PARTITIONS),
    (r"time limit|timelimit", "slurm.time", "`sinfo -s` shows the longest time of each partition; then SLURM_TIME="),
    (r"account", "slurm.account",
     "`sacctmgr show associations user=$USER` lists your accounts, and their partitions; then SLURM_ACCOUNT=NAME"),
    (r"qos", "slurm.qos", "`sacctmgr show qos` lists what there is; then SLURM_QOS=NAME"),
    (r"partition", "slurm.partition", PARTITIONS),
    (r"node configuration|more processors|node count|cpu count|gres|gpu|memory|feature|constraint", None,
     "`sinfo -N -o '%N %c %m %G %f'` shows cores, memory, GPUs and features of the nodes; NUM_NODES, NUM_GPUS, SLURM_CPUS_PER_GPU, SLURM_MEMORY "
     "and SLURM_CONSTRAINT ask for less"),
    (r"array", "slurm.array", "`scontrol show config | grep MaxArraySize` is the limit; then SLURM_ARRAY="),
    (r"option|invalid", "slurm.options", "`slurm.options` holds options of your own; this release of Slurm may not know one of them"),
)  # fmt: skip
"""What sbatch says, the one key that it is about, and what to do about it; the first that matches.

Errors of one thing name others: "account/partition combination"."""
UNREACHABLE = re.compile(
    r"unable to contact slurm controller|connection refused|zero bytes were transmitted|timed out|socket", re.IGNORECASE
)


def submit(script: Path, origins: Mapping[str, str]) -> str:
    """Submits a script and returns the job's id. `origins`: where each key of its configuration was written.

    Raises `HardwareError` where there is no sbatch, `RetryableError` where its controller does not answer, `UserError` with sbatch's own
    words where the cluster refuses the job. Nothing is in the queue then.
    """
    program = shutil.which("sbatch")
    if program is None:
        raise HardwareError(
            "there is no `sbatch` here, so nothing was submitted", hint=f"on the cluster's login node: sbatch {script.absolute()}"
        )
    _sbatch(program, ["--test-only"], script, origins)
    answer = _sbatch(program, ["--parsable"], script, origins)
    job = answer.strip().splitlines()[-1].partition(";")[0] if answer.strip() else ""
    if not job.isdigit():
        raise HardwareError(f"sbatch gave no job id but `{answer.strip()}`", hint="`squeue --me` shows what is in the queue")
    return job


def about(words: str) -> tuple[str | None, str]:
    """Returns the key that sbatch's words are about, `None` where it is no one key, and what to do."""
    found = ((key, hint) for pattern, key, hint in HINTS if re.search(pattern, words, re.IGNORECASE))
    return next(found, (None, "the lines above are sbatch's own"))


def _sbatch(program: str, options: list[str], script: Path, origins: Mapping[str, str]) -> str:
    """Returns what sbatch prints. `--export=NONE` again: a variable `SBATCH_EXPORT` would win over the script's line."""
    try:
        done = subprocess.run(
            [program, *options, "--export=NONE", str(script.absolute())],
            capture_output=True, text=True, errors="replace", timeout=PATIENCE_SECONDS, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RetryableError(
            f"sbatch did not answer within {PATIENCE_SECONDS:.0f} s", hint="`scontrol ping` asks the controller"
        ) from None
    if done.returncode == 0:
        return done.stdout
    words = "\n".join(line for line in (done.stderr + done.stdout).splitlines() if line.strip())
    if UNREACHABLE.search(words):
        raise RetryableError(
            f"sbatch cannot reach the cluster:\n{words}", place=str(script), hint="`scontrol ping` asks the controller"
        )
    key, hint = about(words)
    origin = origins.get(key or "", DEFAULT)
    place = str(script) if origin == DEFAULT else origin
    raise UserError(
        f"the cluster refuses the job:\n{words or f'sbatch ended with code {done.returncode}'}", place=place, hint=hint
    )
