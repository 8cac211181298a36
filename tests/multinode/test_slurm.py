"""The generated script on a real Slurm: munge, slurmctld and two slurmd on this machine, ranks that meet over gloo on the CPU."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Done, metrics, ragged_rows, run_program
from tests.slurm_lab import SlurmLab, slurm_lab

STEPS = 400
"""More than are made before the first stop comes."""


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
        self.environment = slurm.environment(cache, self.runs)
        self.config = folder / "demo.yaml"
        ragged_rows(folder / "rows.jsonl", 24)
        self.config.write_text(
            f"model:\n  name: {model}\n  max_seq_len: 128\ntuning:\n  mode: lora\ndata:\n  train_path: rows.jsonl\n"
            f"train:\n  global_batch_size: 4\n  max_steps: {STEPS}\n  save_steps: {STEPS}\nslurm:\n  time: '30'\n  cpus_per_gpu: 1\n"
            "  warning_seconds: 60\n"
        )

    def make(self, *words: str) -> Done:
        """Types `make slurm` with these words."""
        return run_program(
            ["slurm", f"CONFIG={self.config}", "HARDWARE=cpu", "NUM_GPUS=1", *words],
            self.environment,
            cwd=self.folder,
            timeout=120,
        )

    def submit(self, name: str, *words: str) -> str:
        """Returns the number of the job."""
        done = self.make(f"RUN_NAME={name}", "SUBMIT=1", "JSON=1", *words)
        assert done.code == 0, done.err
        number = done.json["job"]
        assert isinstance(number, str) and number.isdigit()
        return number

    def said(self, name: str) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted((self.runs / name / "slurm").glob("*.out")))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.runs / name / "events.jsonl").read_text().splitlines()]

    def steps(self, name: str) -> list[int]:
        path = self.runs / name / "metrics.jsonl"
        return [row["step"] for row in metrics(self.runs / name)] if path.exists() else []

    def wait_for_step(self, name: str, number: str, step: int) -> None:
        """Waits until the run has made a step."""

        def made(facts: dict[str, str]) -> bool:
            return max(self.steps(name), default=0) >= step

        self.slurm.wait(number, made, seconds=300, logs=self.runs / name / "slurm")


@pytest.fixture
def site(slurm: SlurmLab, tmp_path: Path, tiny: Path, cache: Path) -> Site:
    return Site(slurm, tmp_path, tiny, cache)


def test_a_partition_that_does_not_exist_is_told_in_sbatchs_words(site: Site) -> None:
    done = site.make("RUN_NAME=demo", "SUBMIT=1", "NUM_NODES=2", "SLURM_PARTITION=nowhere")
    assert done.code == 2, done.err
    assert "error: SLURM_PARTITION=nowhere: the cluster refuses the job:" in done.err
    assert "invalid partition" in done.err.lower()
    assert "hint: `sinfo -s` lists the partitions" in done.err
    assert (site.runs / "demo" / "slurm" / "job.sbatch").is_file()
    assert site.slurm.run("squeue", "-h").stdout == ""


def test_more_than_the_nodes_have_is_told_before_it_waits_for_ever(site: Site) -> None:
    done = site.make("RUN_NAME=demo", "SUBMIT=1", "NUM_NODES=3")
    assert done.code == 2, done.err
    assert "hint: `sinfo -N -o" in done.err
    assert site.slurm.run("squeue", "-h").stdout == ""


def test_each_task_of_an_array_is_a_run_and_a_permanent_error_ends_it(site: Site) -> None:
    """In a folder whose name holds what sbatch and shells read in their own way; the data are missing, which no second turn would mend."""
    (site.folder / "rows.jsonl").unlink()
    out = site.folder / "jobs 100%j #1 'x' $(touch made)"
    out.mkdir()
    number = site.submit("sweep", f"OUT={out}", "SLURM_ARRAY=1-2", "SLURM_SETUP=['export SFT_TRAIN_SEED=$SLURM_ARRAY_TASK_ID']")
    for task in (1, 2):
        facts = site.slurm.ended(f"{number}_{task}", seconds=90, logs=out)
        assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "4:0", "0"), facts
        text = (out / f"slurm-{number}_{task}.out").read_text()
        assert f"run sweep-{task}" in text and "ended with code 4" in text, text
        assert "rows.jsonl" in text
    assert not list(site.folder.rglob("made"))
    assert not list(out.glob("slurm-*.??????"))


def test_a_warned_job_saves_is_queued_again_and_goes_on(site: Site) -> None:
    number = site.submit("again", "SLURM_SETUP=['shopt -q login_shell', '[[ -n $HOME && -n $USER ]]']", "TRAIN_MAX_STEPS=120")
    site.wait_for_step("again", number, 3)
    site.slurm.run("scancel", "--signal=USR1", "--batch", number)
    logs = site.runs / "again" / "slurm"
    site.slurm.wait(number, lambda facts: facts["Restarts"] == "1", seconds=120, logs=logs)
    saved = len(site.steps("again"))
    facts = site.slurm.ended(number, seconds=500, logs=logs)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), f"{facts}\n{site.said('again')}"
    assert site.steps("again") == list(range(1, 121)) and 3 <= saved < 120
    assert [event["event"] for event in site.events("again")] == ["started", "stopped", "resumed", "finished"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_sweep_is_an_array_whose_unfinished_runs_are_submitted_again(site: Site) -> None:
    (site.folder / "rates.yaml").write_text("metric: loss\nkeys:\n  train.learning_rate: [1e-5, 0.05]\n")

    def sweep() -> Done:
        words = [
            "sweep",
            f"CONFIG={site.config}",
            "SWEEP=rates.yaml",
            "SLURM=1",
            "HARDWARE=cpu",
            "NUM_GPUS=1",
            "TRAIN_MAX_STEPS=120",
        ]
        return run_program([*words, "SUBMIT=1", "JSON=1"], site.environment, cwd=site.folder, timeout=120)

    done, logs = sweep(), site.runs / "demo-rates" / "slurm"
    assert done.code == 0 and "sweep of 2 runs" in done.err, done.err
    number = done.json["job"]
    for task in (1, 2):
        site.wait_for_step(f"demo-rates-0{task}", f"{number}_{task}", 3)
    done = sweep()
    assert done.code == 2 and "the sweep `demo-rates` is in the queue already" in done.err, done.err
    site.slurm.run("scancel", f"{number}_1")
    states = [site.slurm.ended(f"{number}_{task}", seconds=240, logs=logs)["JobState"] for task in (1, 2)]
    assert states == ["CANCELLED", "COMPLETED"], site.said("demo-rates")

    number = sweep().json["job"]
    assert "--array=1\n" in (logs / "job.sbatch").read_text()
    assert site.slurm.ended(f"{number}_1", seconds=240, logs=logs)["JobState"] == "COMPLETED", site.said("demo-rates")
    assert [event["event"] for event in site.events("demo-rates-01")] == ["started", "stopped", "resumed", "finished"]
    assert [event["event"] for event in site.events("demo-rates-02")] == ["started", "finished"]
    done = sweep()
    assert done.code == 0 and sorted(one["run"] for one in done.json) == ["demo-rates-01", "demo-rates-02"], done.err
    assert [one["values"]["train.learning_rate"] for one in done.json] == ["0.05", "1e-5"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_of_two_nodes_goes_on_with_one(site: Site) -> None:
    """As after the loss of a node for good: the same `make slurm` with `NUM_NODES=1`, the global batch as before."""
    logs = site.runs / "fewer" / "slurm"
    number = site.submit("fewer", "NUM_NODES=2", "SLURM_MAX_REQUEUES=0", "TRAIN_MAX_STEPS=60")
    site.wait_for_step("fewer", number, 3)
    site.slurm.run("scancel", "--signal=USR1", "--batch", number)
    site.slurm.ended(number, seconds=120, logs=logs)
    saved = len(site.steps("fewer"))
    number = site.submit("fewer", "NUM_NODES=1", "TRAIN_MAX_STEPS=60")
    facts = site.slurm.ended(number, seconds=500, logs=logs)
    assert facts["JobState"] == "COMPLETED", f"{facts}\n{site.said('fewer')}"
    rows = metrics(site.runs / "fewer")
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert [len(row["rank_tokens"]) for row in rows] == [2] * saved + [1] * (60 - saved)
    assert "ran on 2 nodes, and continues with 1" in site.said("fewer")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_two_nodes_are_preempted_warned_queued_again_and_finish(site: Site) -> None:
    """Turn 0 is preempted by an urgent job, turn 1 gets the early warning, turn 2 makes the rest."""
    number = site.submit("demo", "NUM_NODES=2")
    site.config.write_text("model: {name: another}\n")  # frozen: a later edit changes nothing
    site.wait_for_step("demo", number, 3)
    urgent = site.slurm.run(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    ).stdout.strip()
    site.slurm.ended(urgent, seconds=240)
    first = len(site.steps("demo"))
    site.wait_for_step("demo", number, first + 3)
    site.slurm.run("scancel", "--signal=USR1", "--batch", number)
    site.slurm.wait(number, lambda facts: facts["Restarts"] == "2", seconds=180, logs=site.runs / "demo" / "slurm")
    second = len(site.steps("demo"))
    facts = site.slurm.ended(number, seconds=700, logs=site.runs / "demo" / "slurm")
    said = site.said("demo")
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("COMPLETED", "0:0", "2"), (
        f"{facts}\n{said}\n{site.slurm.logs()}"
    )
    assert site.steps("demo") == list(range(1, STEPS + 1))
    assert 3 <= first < second < STEPS
    for node in (0, 1):
        happened = [(event["event"], event.get("code")) for event in site.events("demo") if event["node"] == node]
        assert [name for name, _ in happened][1::2] == ["stopped", "stopped", "finished"], happened
        assert [code for _, code in happened][1::2] == [143, 143, 0]
    resumed = [event["checkpoint"] for event in site.events("demo") if event["event"] == "resumed" and event["node"] == 0]
    assert resumed == [f"step-{first:06d}", f"step-{second:06d}"]
    assert "requeued, to continue from the last checkpoint" in said, said  # Slurm itself may have requeued the preempted turn
    assert all(len(row["rank_tokens"]) == 2 for row in metrics(site.runs / "demo"))
    assert (site.runs / "demo" / "model").is_dir()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_job_whose_time_is_over_and_a_cancelled_one_stay_ended_and_the_script_goes_on(site: Site) -> None:
    number = site.submit("last", "NUM_NODES=2", "SLURM_MAX_REQUEUES=0", "TRAIN_MAX_STEPS=20000")
    site.wait_for_step("last", number, 2)
    hours, minutes, seconds = map(int, site.slurm.job(number)["RunTime"].split(":"))
    site.slurm.run("scontrol", "update", f"JobId={number}", f"TimeLimit={hours * 60 + minutes + 2 + (seconds > 30)}")
    facts = site.slurm.ended(
        number, seconds=240, logs=site.runs / "last" / "slurm"
    )  # Slurm's own warning, 60 s before its time is over
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "143:0", "0")
    assert "slurm.max_requeues" in site.said("last")
    saved = len(site.steps("last"))
    script = str(site.runs / "last" / "slurm" / "job.sbatch")
    number = site.slurm.run("sbatch", "--parsable", script).stdout.strip()
    site.wait_for_step("last", number, saved + 2)
    site.slurm.run("scancel", number)
    facts = site.slurm.ended(number, seconds=180, logs=site.runs / "last" / "slurm")
    assert facts["JobState"] == "CANCELLED"
    deadline = time.monotonic() + 60
    while "is left as it is" not in (said := site.said("last")):
        assert time.monotonic() < deadline, said
        time.sleep(0.5)
    assert site.slurm.job(number)["JobState"] == "CANCELLED"
    steps = site.steps("last")
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > saved
    assert (site.runs / "last" / "checkpoints" / f"step-{len(steps):06d}").is_dir()  # saved before it left
