"""The generated script on a real Slurm: munge, slurmctld and two slurmd on this machine, ranks that meet over gloo on
the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import Done, environment, metrics, ragged_rows, run_program
from tests.slurm_lab import SlurmLab, slurm_lab

pytestmark = pytest.mark.broad


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmLab]:
    with slurm_lab() as lab:
        yield lab


class Site:
    """A shared folder with a configuration, seen by the login node and both compute nodes."""

    def __init__(self, slurm: SlurmLab, folder: Path, model: Path, cache: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        self.runs = folder / "runs"
        self.environment = environment(cache, self.runs, {**slurm.variables, "OMP_NUM_THREADS": "1"})
        self.config = folder / "demo.yaml"
        ragged_rows(folder / "rows.jsonl", 24)
        self.config.write_text(
            f"model:\n  name: {model}\n  max_seq_len: 128\ntuning:\n  mode: lora\ndata:\n  train_path:"
            " rows.jsonl\ntrain:\n  global_batch_size: 4\n  max_steps: 120\n  save_steps: 20000\nslurm:\n  time:"
            " '30'\n  cpus_per_gpu: 1\n  warning_seconds: 60\n"
        )

    def make(self, *words: str, command: str = "slurm") -> Done:
        """Type `make slurm SUBMIT=1`, or another command, with these words."""
        submit = () if "SUBMIT=0" in words else ("SUBMIT=1",)
        words = (command, f"CONFIG={self.config}", "HARDWARE=cpu", "NUM_GPUS=1", "JSON=1", *submit, *words)
        return run_program(list(words), self.environment, cwd=self.folder, timeout=240)

    def submit(self, name: str, *words: str) -> str:
        """Return the number of the job."""
        done = self.make(f"RUN_NAME={name}", *words)
        assert done.code == 0, done.err
        return str(done.json["job"])

    def said(self, name: str) -> str:
        return "\n".join(
            path.read_text(errors="replace") for path in sorted((self.runs / name / "slurm").glob("*.out"))
        )

    def events(self, name: str, node: int = 0) -> list[str]:
        happened = map(json.loads, (self.runs / name / "events.jsonl").read_text().splitlines())
        return [event["event"] for event in happened if event["node"] == node]

    def steps(self, name: str) -> list[int]:
        path = self.runs / name / "metrics.jsonl"
        return [row["step"] for row in metrics(self.runs / name)] if path.exists() else []

    def wait(self, name: str, number: str, ready: Callable[[dict[str, str]], bool]) -> None:
        self.slurm.wait(number, ready, logs=self.runs / name / "slurm")

    def wait_for_step(self, name: str, number: str) -> None:
        """Wait until the run has made some steps."""
        self.wait(name, number, lambda _: len(self.steps(name)) >= 3)

    def end(self, name: str, number: str) -> dict[str, str]:
        """Wait until the job has ended for good; return its facts."""
        return self.slurm.end(number, self.runs / name / "slurm")


@pytest.fixture
def site(slurm: SlurmLab, tmp_path: Path, tiny: Path, cache: Path) -> Site:
    return Site(slurm, tmp_path, tiny, cache)


@pytest.mark.parametrize("word", ["SLURM_PARTITION=nowhere", "NUM_NODES=3"])
def test_a_job_that_cannot_start_is_refused_with_sbatchs_message(site: Site, word: str) -> None:
    done = site.make("RUN_NAME=demo", word)
    assert done.code == 2 and "the cluster refuses the job:\n" in done.err and "`sinfo` lists" in done.err, done.err
    assert (site.runs / "demo" / "slurm" / "job.sbatch").is_file()
    assert site.slurm.run("squeue", "-h").stdout == ""


def test_each_task_of_an_array_is_a_run_and_a_permanent_error_ends_it(site: Site) -> None:
    """The folder's name has characters that sbatch and shells interpret; data that go after the submission are an
    error that no retry would fix.
    """
    out = site.folder / "jobs 100%j #1 'x' $(touch made)"
    out.mkdir()
    setup = ["export SFT_TRAIN_SEED=$SLURM_ARRAY_TASK_ID", f"rm -f {site.folder / 'rows.jsonl'}"]
    number = site.submit("sweep", f"OUT={out}", "SLURM_ARRAY=1-2", f"SLURM_SETUP={setup}")
    for task in (1, 2):
        facts = site.slurm.end(f"{number}_{task}", out)
        assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "4:0", "0"), facts
        text = (out / f"slurm-{number}_{task}.out").read_text()
        assert f"run sweep-{task}" in text and "ended with code 4" in text and "rows.jsonl" in text, text
    assert not list(site.folder.rglob("made"))


OF_A_SHELL = {
    "SBATCH_PARTITION": "urgent",
    "SBATCH_TIMELIMIT": "1",
    "SBATCH_MEM_PER_NODE": "1",
    "SBATCH_NO_REQUEUE": "1",
    "SBATCH_ARRAY_INX": "1-2",
    "SBATCH_JOB_NAME": "other",
    "SBATCH_OUTPUT": "/dev/null",
}
OF_A_JOB = {
    "SLURM_JOB_ID": "999",
    "SLURM_MEM_PER_CPU": "100",
    "SLURM_GPUS_PER_TASK": "1",
    "SLURM_TIMELIMIT": "1",
    "SLURM_GPUS": "2",
    "SLURM_MEM_PER_NODE": "2",
    "SLURM_NTASKS": "7",
    "SLURM_RESTART_COUNT": "9",
    "SLURM_JOB_NUM_NODES": "2",
}


def test_variables_of_the_shell_and_of_a_submitting_job_do_not_change_a_job(site: Site) -> None:
    """By `SUBMIT=1` from inside a job, under a shell full of options; and by a hand-typed sbatch in that job."""
    asked = ("TRAIN_MAX_STEPS=2", "SLURM_PARTITION=main", "SLURM_TIME=7", "SLURM_MEMORY=900M")
    site.environment |= OF_A_SHELL | OF_A_JOB
    first = site.submit("first", *asked)
    by_hand = {**site.environment, "PATH": os.environ["PATH"]}
    for name in OF_A_SHELL:
        del by_hand[name]
    assert site.make("RUN_NAME=second", *asked, "SUBMIT=0").code == 0
    script = str(site.runs / "second" / "slurm" / "job.sbatch")
    second = subprocess.run(
        ["sbatch", "--parsable", script], env=by_hand, capture_output=True, text=True, check=True
    ).stdout.strip()
    for name, number in (("first", first), ("second", second)):
        facts = site.end(name, number)
        assert (
            facts.items()
            >= {
                "JobState": "COMPLETED",
                "JobName": name,
                "Partition": "main",
                "TimeLimit": "00:07:00",
                "MinMemoryNode": "900M",
                "Requeue": "1",
            }.items()
        ), f"{facts}\n{site.said(name)}"
        assert site.steps(name) == [1, 2] and "turn 0 on" in site.said(name), site.said(name)


def test_jobs_submitted_at_once_are_different_runs(site: Site) -> None:
    """None has a name: the last of three scripts of one second would replace the others."""
    with ThreadPoolExecutor(3) as pool:
        jobs = list(pool.map(lambda seed: site.make(f"TRAIN_SEED={seed}", "TRAIN_MAX_STEPS=1"), range(3)))
    assert [done.code for done in jobs] == [0, 0, 0], jobs
    facts = [done.json for done in jobs]
    assert len({facts_of_job["run"] for facts_of_job in facts}) == 3
    for seed, submitted in enumerate(facts):
        assert site.end(submitted["run"], str(submitted["job"]))["JobState"] == "COMPLETED", site.said(submitted["run"])
        assert json.loads((site.runs / submitted["run"] / "config.json").read_text())["config"]["train"]["seed"] == seed


@pytest.mark.timeout(900)
@pytest.mark.parametrize("preempted", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_warned_or_preempted_nodes_save_are_requeued_and_continue(site: Site, preempted: bool) -> None:
    setup = "SLURM_SETUP=['shopt -q login_shell', '[[ -n $HOME && -n $USER ]]']"
    number = site.submit("again", "NUM_NODES=2", setup)
    site.config.write_text("model: {name: another}\n")  # frozen: a later edit changes nothing
    site.wait_for_step("again", number)
    if preempted:
        site.slurm.run(
            "sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
        )
    else:
        site.slurm.run("scancel", "--signal=USR1", "--batch", number)
    site.wait("again", number, lambda facts: facts["Restarts"] == "1")
    saved = len(site.steps("again"))
    facts = site.end("again", number)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), f"{facts}\n{site.said('again')}"
    assert site.steps("again") == list(range(1, 121)) and 3 <= saved < 120
    assert all(len(row["rank_tokens"]) == 2 for row in metrics(site.runs / "again"))
    for node in (0, 1):
        assert site.events("again", node) == ["started", "stopped", "resumed", "finished"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_sweep_is_an_array_whose_unfinished_runs_are_submitted_again(site: Site) -> None:
    (site.folder / "rates.yaml").write_text("metric: loss\nkeys:\n  train.learning_rate: [1e-5, 0.05]\n")

    def sweep() -> Done:
        return site.make("SWEEP=rates.yaml", "SLURM=1", command="sweep")

    done, name = sweep(), "demo-rates"
    assert done.code == 0 and "sweep of 2 runs" in done.err, done.err
    number = done.json["job"]
    for task in (1, 2):
        site.wait_for_step(f"{name}-0{task}", f"{number}_{task}")
    done = sweep()
    assert done.code == 2 and f"the sweep `{name}` is in the queue already" in done.err, done.err
    site.slurm.run("scancel", f"{number}_1")
    states = [site.end(name, f"{number}_{task}")["JobState"] for task in (1, 2)]
    assert states == ["CANCELLED", "COMPLETED"], site.said(name)

    number = sweep().json["job"]
    assert "--array=1\n" in (site.runs / name / "slurm" / "job.sbatch").read_text()
    assert site.end(name, f"{number}_1")["JobState"] == "COMPLETED", site.said(name)
    assert site.events(f"{name}-01") == ["started", "stopped", "resumed", "finished"]
    assert site.events(f"{name}-02") == ["started", "finished"]
    done = sweep()
    assert done.code == 0 and [run["values"]["train.learning_rate"] for run in done.json] == ["0.05", "1e-5"], done.err
