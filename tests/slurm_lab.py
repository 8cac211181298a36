"""A real Slurm on this machine: munge, slurmctld and two slurmd on the loopback, in a separate folder.

    with slurm_lab() as slurm:
        slurm.run("sinfo", "-N")

Only what this started is ended, by its configuration's name; the folder is removed. Tests skip with the reason where
Slurm is not installed, where they are not root, or where its daemons do not come up here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from sft_play.launch.environment import free_port
from tests.programs import SLURM, need, unavailable

NODES = ("n1", "n2")
GONE = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"})
"""States in which a job stays."""
SETTLED_SECONDS = 5.0
"""After a requeue, until the controller has heard of the last turn's end: once, on a loaded machine, a turn that began
at once ended silently.
"""
CONFIGURATION = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
MinJobAge=3600
SlurmdTimeout=60
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
SchedulerParameters=batch_sched_delay=0,bf_interval=2,sched_interval=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port} CPUs=4 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second_port} CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True, slots=True)
class SlurmLab:
    """The cluster, as a user of its login node has it."""

    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment of programs that talk to it."""
        return {"SLURM_CONF": str(self.folder / "etc" / "slurm.conf"), "PATH": os.environ["PATH"]}

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's programs."""
        return subprocess.run(
            words, env={**os.environ, **self.variables}, capture_output=True, text=True, timeout=240, check=check
        )

    def job(self, number: str) -> dict[str, str]:
        """Return what `scontrol show job` says: `JobState`, `Restarts`, `ExitCode`, ..."""
        description = self.run("scontrol", "show", "job", number, "--oneliner").stdout
        return dict(word.partition("=")[::2] for word in description.split() if "=" in word)

    def logs(self) -> str:
        """Return the ends of the daemons' own logs."""
        files = sorted((self.folder / "log").glob("slurm*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in files)

    def wait(self, number: str, ready: Callable[[dict[str, str]], bool], *, logs: Path) -> dict[str, str]:
        """Wait until a job is in the expected state, and return its facts; release a requeued job from Slurm's two
        minutes.
        """
        deadline, pending = time.monotonic() + 500, 0.0
        while not ready(facts := self.job(number)):
            output = "\n".join(path.read_text(errors="replace") for path in sorted(logs.glob("*.out")))
            assert time.monotonic() < deadline and facts["JobState"] not in GONE, f"{facts}\n{output}\n{self.logs()}"
            if facts["JobState"] == "PENDING" and facts.get("Reason") == "BeginTime":
                pending = pending or time.monotonic()
                if time.monotonic() - pending > SETTLED_SECONDS:
                    self.run("scontrol", "update", f"JobId={number}", "StartTime=now", check=False)
            else:
                pending = 0.0
            time.sleep(0.5)
        return facts

    def end(self, number: str, logs: Path) -> dict[str, str]:
        """Wait until a job has ended for good."""
        return self.wait(number, lambda facts: facts["JobState"] in GONE, logs=logs)


@contextlib.contextmanager
def slurm_lab() -> Iterator[SlurmLab]:
    """Start the cluster, and ends it however the body ends."""
    need(*SLURM)
    if os.geteuid() != 0:
        unavailable("Slurm's daemons need root")
    folder = Path(tempfile.mkdtemp(prefix=f"slurm-lab-{os.getpid()}-", dir="/tmp"))
    try:
        _write(folder)
        lab = SlurmLab(folder)
        _start(lab)
        yield lab
    finally:
        _end(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path) -> None:
    folder.chmod(0o755)
    for name in ("state", "log", "run", "etc", *(f"spool/{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
        (folder / name).chmod(0o755)
    key = folder / "run" / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(
        folder=folder, host=host, controller_port=free_port(), first_port=free_port(), second_port=free_port()
    )
    (folder / "etc" / "slurm.conf").write_text(text.lstrip())
    unified = Path("/sys/fs/cgroup/cgroup.controllers").is_file()
    # Slurm 22.05 refuses a machine that mounts both versions unless it is told which.
    (folder / "etc" / "cgroup.conf").write_text(
        "CgroupPlugin=cgroup/v2\nIgnoreSystemd=yes\n" if unified else "CgroupPlugin=cgroup/v1\n"
    )


def _start(lab: SlurmLab) -> None:
    run = lab.folder / "run"
    munge = [
        "munged",
        f"--key-file={run / 'munge.key'}",
        f"--socket={run / 'munge.sock'}",
        f"--pid-file={run / 'munged.pid'}",
        f"--log-file={lab.folder / 'log' / 'munged.log'}",
        f"--seed-file={run / 'munged.seed'}",
    ]
    configuration = lab.variables["SLURM_CONF"]
    for words in (
        munge,
        ["slurmctld", "-f", configuration],
        *(["slurmd", "-N", node, "-f", configuration] for node in NODES),
    ):
        done = lab.run(*words, check=False)
        if done.returncode:
            unavailable(f"`{words[0]}` does not start here: {(done.stderr or done.stdout).strip()[-500:]}")
    deadline = time.monotonic() + 240
    while True:
        states = lab.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t", check=False).stdout.split()
        if states[1::2] == ["idle"] * len(NODES):
            return
        if time.monotonic() > deadline:
            unavailable(f"Slurm's nodes do not come up here: {' '.join(states)}\n{lab.logs()}")
        time.sleep(0.2)


def _end(folder: Path) -> None:
    """End the daemons and what jobs of this cluster have left: each process of it knows its configuration."""
    family = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("SLURM_CONF") == str(folder / "etc" / "slurm.conf") and process.pid != os.getpid():
                process.terminate()
                family.append(process)
    _, alive = psutil.wait_procs(family, timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=5)
