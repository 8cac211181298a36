"""Further ways of a batch script: one task of an array, memory that ran out, a port that is taken, setup lines that fail, what a kill left.

By the stand-ins for Slurm's programs of `test_slurm_script.py`.
"""

from __future__ import annotations

import os
import shlex
import socket
from pathlib import Path

import pytest

from sft_play.config.schema import SlurmConfig
from sft_play.errors import UserError
from sft_play.launch import verdict
from sft_play.launch.run_folder import record_event
from sft_play.launch.verdict import Outcome
from sft_play.runs.folder import RunFolder
from sft_play.schedulers.slurm import first_index
from sft_play.schedulers.slurm_submit import about, submit
from tests.conftest import Program
from tests.unit.test_slurm_script import Bench, batch_job, config_file


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_one_task_of_an_array_is_queued_again_alone(bench: Bench) -> None:
    """One task has the array's own number as its job id, and that alone names all tasks."""
    job = batch_job(bench.folder, slurm=SlurmConfig(array="0-3"))
    done = bench.run((143, 143), job, SLURM_ARRAY_JOB_ID="1234567", SLURM_ARRAY_TASK_ID="3")
    assert done.code == 143, done.out
    assert "requeue 1234567_3" in done.asked and "show job 1234567_3 --oneliner" in done.asked, done.asked
    assert not any(asked.split()[-1] == "1234567" for asked in done.asked), done.asked
    assert "slurm job 1234567_3: turn 0" in done.out


@pytest.mark.parametrize(("cause", "requeued"), [("out_of_memory", False), ("peer", True), ("killed", True)])
def test_memory_that_ran_out_takes_no_other_turn(bench: Bench, cause: str, requeued: bool) -> None:
    (bench.folder / "cause-0").write_text("peer\n")
    (bench.folder / "cause-1").write_text(f"{cause}\n")
    done = bench.run((75, 75))
    assert (done.code, done.requeued) == (75, requeued), done.out
    assert ("because memory ran out" in done.out) is not requeued
    assert not list((bench.folder / "runs" / "demo" / "slurm").glob("*.??????")), "codes are left behind"


def test_a_launcher_tells_its_cause_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, path = Outcome(code=75, cause="out_of_memory"), tmp_path / "0.cause"
    monkeypatch.delenv(verdict.CAUSE_VARIABLE, raising=False)
    verdict.tell_cause(lost)
    monkeypatch.setenv(verdict.CAUSE_VARIABLE, str(path))
    verdict.tell_cause(Outcome(code=0))
    assert not path.exists()
    verdict.tell_cause(lost)
    assert path.read_text() == "out_of_memory\n"
    monkeypatch.setenv(verdict.CAUSE_VARIABLE, str(path / "below" / "a-file"))
    verdict.tell_cause(lost)  # raises nothing


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1"])
def test_a_port_that_is_taken_is_passed_over(bench: Bench, address: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as holder:
        for port in range(20_500, 20_600):
            try:
                holder.bind((address, port))
                break
            except OSError as error:
                if port == 20_599:
                    pytest.skip(f"no port of {address} can be had here: {error}")
        holder.listen()
        done = bench.run(SLURM_JOB_ID=str(1_230_000 + port - 20_000))
    assert done.code == 0, done.out
    word = next(word for word in bench.words(1) if word.startswith("MASTER_PORT="))
    assert port < int(word.partition("=")[2]) < port + 100


@pytest.mark.parametrize(
    ("setup", "named"),
    [
        (["export A=1", "false # the toolkit"], "false # the toolkit"),
        (["module() { return 7; }", "module load cuda/99", "export B=1"], "module load cuda/99"),
        (["if true; then", "  cat /no/such/file", "fi"], "  cat /no/such/file"),
        (["source /no/such/env.sh"], "source /no/such/env.sh"),
        (["set -e", "(exit 9)"], "(exit 9)"),
    ],
)
def test_a_setup_line_that_fails_ends_the_job_and_is_named(bench: Bench, setup: list[str], named: str) -> None:
    done = bench.run((0, 0), batch_job(bench.folder, slurm=SlurmConfig(setup=setup)))
    assert (done.code, done.requeued) == (3, False), done.out
    assert "slurm.setup failed with code" in done.out and named in done.out, done.out
    number = (bench.folder / "job.sbatch").read_text().splitlines().index(named) + 1
    assert f"in line {number} of this script" in done.out
    assert not (bench.folder / "words-0").exists()


@pytest.mark.parametrize(
    "setup",
    [
        ["false || true", "if false; then", "  :", "fi", "! true"],
        ["source ENV"],
        ["set -e"],
    ],
)
def test_what_is_no_failure_of_a_setup_line_changes_nothing(bench: Bench, setup: list[str]) -> None:
    env = bench.folder / "env.sh"
    env.write_text("grep nothing /dev/null\nexport FROM_ENV=1\n")
    setup = [line.replace("ENV", str(env)) for line in setup]
    done = bench.run((143, 143), batch_job(bench.folder, slurm=SlurmConfig(setup=setup)))
    assert (done.code, done.requeued) == (143, True), done.out


def test_what_a_killed_turn_left_is_removed(bench: Bench) -> None:
    logs = bench.folder / "runs" / "demo" / "slurm"
    own, other = logs / "slurm-1234567.a1B2c3", logs / "slurm-12345671.a1B2c3"
    for folder in (own, other):
        folder.mkdir(parents=True)
        (folder / "0").write_text("137\n")
    (logs / "slurm-1234567.node1.out").write_text("kept\n")
    done = bench.run()
    assert done.code == 0, done.out
    assert not own.exists() and other.is_dir()
    assert (logs / "slurm-1234567.node1.out").read_text().startswith("kept\n")


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("Invalid account or account/partition combination specified", "SLURM_ACCOUNT=NAME"),
        ("sbatch: error: invalid partition specified: gpu\nallocation failure: Invalid partition name specified", "SLURM_PARTITION=NAME"),
        ("User's group not permitted to use this partition", "SLURM_PARTITION=NAME"),
        ("Invalid qos specification", "then SLURM_QOS=NAME"),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit\nJob violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
         "your limits"),
        ("AssocGrpCPUMinutesLimit", "your limits"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "SLURM_TIME="),
        ("Requested node configuration is not available", "NUM_NODES, NUM_GPUS"),
        ("Invalid job array specification", "SLURM_ARRAY="),
        ("sbatch: unrecognized option '--frobnicate'", "slurm.options"),
        ("something else", "sbatch's own"),
    ],
)  # fmt: skip
def test_what_sbatch_says_has_its_own_hint(said: str, hint: str) -> None:
    assert hint in about(said)[1]


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("Batch job submission failed: Invalid partition name specified", "slurm.partition"),
        ("Invalid account or account/partition combination specified", "slurm.account"),
        ("Invalid qos specification", "slurm.qos"),
        ("Requested time limit is invalid", "slurm.time"),
        ("Invalid job array specification", "slurm.array"),
        ("unrecognized option '--frobnicate'", "slurm.options"),
        ("Requested node configuration is not available", None),
        ("QOSMaxSubmitJobPerUserLimit", None),
    ],
)  # fmt: skip
def test_a_refusal_is_placed_where_its_key_was_written(
    said: str, key: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for sbatch that refuses in these words; at the script where nobody wrote the key."""
    program, script = tmp_path / "bin" / "sbatch", tmp_path / "job.sbatch"
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\necho {shlex.quote('sbatch: error: ' + said)} >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    for origin, place in (("demo.yaml:7", "demo.yaml:7" if key else str(script)), ("default", str(script))):
        with pytest.raises(UserError) as caught:
            submit(script, {key or "slurm.time": origin})
        assert caught.value.place == place
        assert said in caught.value.message and caught.value.hint


@pytest.mark.parametrize(("array", "index"), [("0-3", 0), ("4-10:2", 4), ("7", 7), ("5,8-9%1", 5), ("12%1", 12)])
def test_the_first_task_of_an_array(array: str, index: int) -> None:
    assert first_index(array) == index


@pytest.mark.parametrize("words", [("HARDWARE=A100+L40S", "NUM_NODES=2"), ("HARDWARE=A100+L40S@10Gbit", "NUM_NODES=2"),
                                   ("HARDWARE=A100+L40S", "SLURM_GPU_TYPE=a100")])  # fmt: skip
def test_unlike_gpus_are_refused(in_process: Program, tmp_path: Path, words: tuple[str, ...]) -> None:
    done = in_process("slurm", f"CONFIG={config_file(tmp_path)}", *words, "RUN_NAME=demo")
    assert done.code == 2, done.err
    assert "unlike GPUs" in done.err and "slurm.gpu_type" in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("begun", "hardware", "target"), [
    ("fsdp2", "4xH100", "train-fsdp"), ("zero", "1xH100", "train-deepspeed"), ("auto", "1xH100", "train"), ("auto", "4xH100", "train-distributed"),
    ("single", "2xH100", "train-distributed"),
])  # fmt: skip
def test_a_run_that_has_started_goes_on_by_its_own_command(
    in_process: Program, tmp_path: Path, begun: str, hardware: str, target: str
) -> None:
    run = RunFolder(tmp_path / "runs" / "demo")
    run.path.mkdir(parents=True)
    record_event(run, "started", launch={"command": begun, "num_gpus": 2, "num_nodes": 2})
    done = in_process("slurm", f"CONFIG={config_file(tmp_path)}", f"HARDWARE={hardware}", "RUN_NAME=demo", "JSON=1")
    assert done.code == 0, done.err
    assert done.json["command"][3] == target
