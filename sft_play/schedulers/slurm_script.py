"""The batch script as text. Pure: no file is read or written, and the same job gives the same script.

Of the user only `slurm.setup` is given to a shell. All other values stand between quotes, and what holds a control character is refused.
What the script does about signals and turns was tried on Slurm 22.05 (`tests/multinode/test_slurm.py`):

- `--signal=B:USR1@N` reaches the batch shell alone; a preemption or `scancel` sends SIGTERM to the tasks alone. srun hands USR1 on, but
  answers SIGTERM with SIGKILL for its tasks, so only USR1 is sent to it.
- Where processes are tracked by cgroup, a task's signal reaches the process that slurmstepd started and not its children: the shell
  on each node hands it on. A signal that arrives twice is one request to the launcher.
- srun's own exit code is the greatest of its tasks': a permanent error (1 to 5) would hide behind a lost peer (75). Each node writes its own down.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sft_play.config.schema import SlurmConfig
from sft_play.errors import UserError

HEADER = "# Rendered by `make slurm`: docs/slurm.md says what it does."
FIRST_PORT, PORTS = 20_000, 10_000
"""Ports below those that Linux gives to outgoing connections (from 32768 on)."""
MOST_TRIED = 1000
"""Ports that are tried where others have the first ones."""
LEAST_SAFE = "\"'\\#"
"""Characters that sbatch reads in its own way in a `#SBATCH` line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchJob:
    """All that a script is made of."""

    run_name: str
    """The run's name; with an array, each task adds its index."""
    nodes: int
    processes: int
    """Ranks on each node."""
    gpus: bool
    """Whether each rank has a GPU; on CPU clusters none is asked for."""
    folder: Path
    """Working folder, seen by all nodes."""
    words: tuple[str, ...]
    """The command, the same on every node and in every turn: Python, `-m`, ..., `CONFIG=...`."""
    environment: Mapping[str, str]
    """Variables that are set, beside those of the user's login on the node."""
    logs: Path
    """Folder of the job's own output, seen by all nodes."""
    slurm: SlurmConfig


def render(job: BatchJob) -> str:
    """Returns the script, its last line ended. Raises `UserError` for a value that holds a control character."""
    for name, text in _values(job):
        if any(ord(letter) < 32 or 127 <= ord(letter) < 160 or "\ud800" <= letter <= "\udfff" for letter in text):
            raise UserError(f"{name} holds a control character, which a batch script cannot take: `{ascii(text)[1:-1]}`")
    if "\\" in str(job.logs):
        raise UserError(
            f"the path of the output holds a backslash, and sbatch would then put no job id into its name: `{job.logs}`",
            hint="choose another OUT=",
        )
    parts = [
        "#!/bin/bash\n" + HEADER,
        "\n".join(f"#SBATCH {line}" for line in options(job)),
        _environment(job),
        _setup(job.slurm),
        _places(job),
        _FUNCTIONS,
        _command(job),
        _LAUNCH.replace("@CPUS@", str(cpus(job))),
        _AFTERWARDS,
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def cpus(job: BatchJob) -> int:
    """Returns the CPU cores of a node's task."""
    return job.slurm.cpus_per_gpu * job.processes


def options(job: BatchJob) -> list[str]:
    """Returns the options for sbatch, one each, as they stand in `#SBATCH` lines."""
    slurm = job.slurm
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    given: list[tuple[str, str | int | None]] = [
        ("job-name", job.run_name),
        ("nodes", job.nodes),
        ("ntasks-per-node", 1),
        ("gpus-per-node", f"{kind}{job.processes}" if job.gpus else None),
        ("cpus-per-task", cpus(job)),
        ("mem", slurm.memory),
        ("time", slurm.time),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("constraint", slurm.constraint),
        ("array", slurm.array),
        ("signal", f"B:USR1@{slurm.warning_seconds}"),
        ("open-mode", "append"),
        ("export", "NONE"),
        ("output", f"{_pattern(job.logs)}/slurm-{'%A_%a' if slurm.array else '%j'}.out"),
    ]
    lines = [f"--{name}={_for_sbatch(str(value))}" for name, value in given if value is not None]
    lines.insert(lines.index("--open-mode=append"), "--requeue")
    for option in slurm.options:
        name, equals, value = option.partition("=")
        lines.append(f"{name}={_for_sbatch(value)}" if equals else name)
    return lines


def _values(job: BatchJob) -> list[tuple[str, str]]:
    """Returns every value that becomes a part of the script, and what to call it; the keys of `slurm` have rules of their own."""
    return [
        ("`RUN_NAME`", job.run_name),
        ("the path of the working folder", str(job.folder)),
        ("the path of the output", str(job.logs)),
        *(("a word of the command", word) for word in job.words),
        *((f"the environment variable `{name}`", value) for name, value in job.environment.items()),
    ]


def _pattern(path: Path) -> str:
    """Returns a path in which sbatch finds no `%j`; doubling the sign says so."""
    return str(path).replace("%", "%%")


def _for_sbatch(value: str) -> str:
    """Returns a value as sbatch reads it in a script: between quotes where it holds a blank or a quote."""
    if not any(letter.isspace() or letter in LEAST_SAFE for letter in value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _environment(job: BatchJob) -> str:
    lines = [
        "stopped=",
        "trap 'stopped=1' USR1 TERM",
        "# The configuration is frozen in the file below: variables of the shell that submitted this have no say any more.",
        'for name in "${!SFT_@}"; do unset "$name"; done',
    ]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(job.environment.items())]
    return "\n".join([*lines, f"cd -- {shlex.quote(str(job.folder))} || exit 3"])


_BEFORE_SETUP = r"""
# shellcheck disable=SC2317 # called by the trap below
setup_failed() {
  local text
  if ((${#BASH_SOURCE[@]} > 2)); then return; fi # what a sourced file does inside is its own business
  text=$(sed -n "$2p" "$0" 2>/dev/null)
  printf '[%s] slurm job %s: slurm.setup failed with code %s in line %s of this script: %s\n' \
    "$(date '+%F %T')" "$SLURM_JOB_ID" "$1" "$2" "${text:-$3}"
  echo "nothing was started; '|| true' after a command lets it fail"
  exit 3
}
trap 'setup_failed "$?" "$LINENO" "$BASH_COMMAND"' ERR # as under 'set -e'
# slurm.setup
"""
_AFTER_SETUP = "trap - ERR\nset +e"


def _setup(slurm: SlurmConfig) -> str:
    return "\n".join([_BEFORE_SETUP.strip("\n"), *slurm.setup, _AFTER_SETUP]) if slurm.setup else ""


def _places(job: BatchJob) -> str:
    name, number = shlex.quote(job.run_name), '"$SLURM_JOB_ID"'
    note = []
    if job.slurm.array:
        name, number = f'{shlex.quote(job.run_name + "-")}"$SLURM_ARRAY_TASK_ID"', '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
        note = ["# One task's SLURM_JOB_ID is the array's own number, and that alone means all of its tasks."]
    return "\n".join([
        "set -u",
        f"run_name={name}",
        *note,
        f"job_id={number}",
        f"log={shlex.quote(str(job.logs) + '/slurm-')}\"$job_id\"",
        f"most_requeues={job.slurm.max_requeues}",
        "turn=${SLURM_RESTART_COUNT:-0}",
    ])  # fmt: skip


_FUNCTIONS = r"""
say() { printf '[%s] slurm job %s: %s\n' "$(date '+%F %T')" "$job_id" "$1"; }

# Runs a command and returns its exit code; a signal that asks for a stop is handed on to it as $1.
handing_on() {
  local as=$1 code heard
  shift
  child=
  trap 'heard=1; stopped=1; [[ -n $child ]] && kill -s "$as" "$child" 2>/dev/null' USR1 TERM
  if [[ -n ${stopped:-} ]]; then return 143; fi
  "$@" &
  child=$!
  if [[ -n ${stopped:-} ]]; then kill -s "$as" "$child" 2>/dev/null; fi # it came before there was a child
  while :; do
    heard=
    wait "$child"
    code=$?
    if [[ -z $heard ]]; then break; fi # else it was the signal that ended the waiting
  done
  child=
  return "$code"
}

# What one node does: the command that a person would type there. Node 0 speaks in the job's output, others in a file beside it.
# shellcheck disable=SC2317 # called on the nodes, by its text
on_node() {
  local log=$1 codes=$2 code
  shift 2
  if [[ $SLURM_NODEID != 0 ]]; then exec >>"$log.node$SLURM_NODEID.out" 2>&1; fi
  if [[ $SLURM_NNODES != 1 ]]; then set -- "$@" NODE_RANK="$SLURM_NODEID"; fi
  export SFT_PLAY_CAUSE_FILE="$codes/$SLURM_NODEID.cause"
  handing_on TERM "$@"
  code=$?
  printf '%s\n' "$code" >"$codes/$SLURM_NODEID"
  return "$code"
}

# The job's exit code from those of the nodes: a permanent error before a lost peer, that before a stop on request.
verdict() {
  local srun_code=$1 node code found=
  for ((node = 0; node < SLURM_NNODES; node++)); do
    code=
    [[ -s $codes/$node ]] && read -r code <"$codes/$node"
    case $code in
      [1-5]) printf '%s' "$code"; return ;;
      75) found=75 ;;
      143) found=${found:-143} ;;
    esac
  done
  if [[ -z $found && $srun_code == 138 ]]; then found=143; fi # srun itself took the warning (128 + SIGUSR1), before it had tasks
  printf '%s' "${found:-$srun_code}"
}
"""


_ADDRESS = r"""
# A node's address as Slurm knows it: names of nodes do not resolve everywhere.
address_of() {
  local facts
  facts=$(scontrol show node "$1" --oneliner)
  if [[ $facts =~ NodeAddr=([^[:space:]]+) ]]; then printf '%s' "${BASH_REMATCH[1]}"; else printf '%s' "$1"; fi
}

# Whether a program has the port on this node, which is node 0: in any state but TIME_WAIT (06).
port_is_taken() {
  local hex
  printf -v hex "%04X" "$1"
  grep -Eqs "^ *[0-9]+: [0-9A-F]+:$hex [0-9A-F]+:[0-9A-F]+ 0[^6]" /proc/net/tcp /proc/net/tcp6
}
"""


def _command(job: BatchJob) -> str:
    several = job.nodes > 1
    lines = ["command=(", f"  {shlex.join(job.words)}", '  RUN_NAME="$run_name"', "  LAUNCH_AUTO_RESUME=true"]
    if several:
        lines += ['  NUM_NODES="$SLURM_NNODES"', '  MASTER_ADDR="$(address_of "$first")"', '  MASTER_PORT="$port"']
    before = [
        _ADDRESS.strip("\n"),
        'read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "# Each task of an array is a job with a number of its own, so no two of them begin with one port.",
        f"for ((tried = 0; tried < {MOST_TRIED}; tried++)); do",
        f"  port=$(({FIRST_PORT} + (SLURM_JOB_ID + tried) % {PORTS}))",
        '  if ! port_is_taken "$port"; then break; fi',
        "done",
        "# Who does not know it does not join. srun hands it on with the environment: it stands in no file and on no command line.",
        "export MASTER_KEY=${MASTER_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}",
    ]
    return "\n".join([*(before if several else []), *lines, ")"])


_LAUNCH = r"""
say "turn $turn on $SLURM_JOB_NODELIST, run $run_name"
rm -rf -- "$log".??????/ # of a turn of this job that was killed
codes=$(mktemp -d "$log.XXXXXX") || exit 3
# `--wait=0`: no node's end ends another that still saves; `--kill-on-bad-exit=0` likewise. The launchers themselves stop when a peer is lost.
handing_on USR1 srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task=@CPUS@ --export=ALL \
  --kill-on-bad-exit=0 --wait=0 --mpi=none --unbuffered \
  bash -c "$(declare -f handing_on on_node); on_node \"\$@\"" node "$log" "$codes" "${command[@]}"
code=$(verdict $?)
cause=
grep -qsx out_of_memory "$codes"/*.cause && cause=memory
rm -rf -- "$codes"
"""

_AFTERWARDS = r"""
if [[ $code != 75 && $code != 143 ]]; then
  say "ended with code $code"
  exit "$code"
fi
state=
[[ $(scontrol show job "$job_id" --oneliner) =~ JobState=([A-Z_]+) ]] && state=${BASH_REMATCH[1]}
if [[ $state != RUNNING ]]; then
  say "ended with code $code; the job is ${state:-unknown} already, so it is left as it is" # cancelled, or queued again by Slurm itself
elif [[ $code == 75 && $cause == memory ]]; then
  say "ended with code 75 because memory ran out, as it would again in another turn; the output of the node where it did says what to change"
elif ((turn >= most_requeues)); then
  say "ended with code $code after $turn requeues, the most that slurm.max_requeues allows; 'sbatch' of this script goes on with the run"
elif scontrol requeue "$job_id"; then
  say "ended with code $code; queued again, to go on from the last checkpoint"
else
  say "ended with code $code, and the job could not be queued again; 'sbatch' of this script goes on with the run"
fi
exit "$code"
"""
