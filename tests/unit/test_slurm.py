"""`make slurm`: its options, the quoting of the user's values, and the script's reaction to each exit code.

Bash runs the script with stand-ins for `srun` and `scontrol`; `tests/multinode/test_slurm.py` has the real ones.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.call import Call
from sft_play.config.layers import Override
from sft_play.config.load import load_config, read_config
from sft_play.config.schedulers import SlurmConfig
from sft_play.errors import UserError
from sft_play.launch.resume import check_overrides
from sft_play.launch.run_folder import record_event
from sft_play.plan.hardware import cpu_threads
from sft_play.runs.folder import RunFolder
from sft_play.schedulers.slurm import BatchJob, options, render
from tests.conftest import Done, Program
from tests.programs import need

JOB = Path("runs", "demo", "slurm", "job.sbatch")
EVIL = "a $(touch x)`touch x` 'single' \"double\" \\ %j #; | & $HOME @JOB@"
TOKEN = "hf_" + "abcdefghij" * 3


def batch_job(folder: Path = Path("/work/place"), **changes: Any) -> BatchJob:
    """Return the job of two nodes of four GPUs."""
    values: dict[str, Any] = {
        "run_name": "demo",
        "nodes": 2,
        "processes": 4,
        "gpus": True,
        "folder": folder,
        "environment": {"SFT_PLAY_CACHE": "/work/cache"},
        "words": ("/venv/bin/python", "-m", "sft_play", "train-distributed", "NUM_GPUS=4"),
        "logs": folder / "logs",
        "slurm": SlurmConfig(),
    }
    return BatchJob(**(values | changes))


def test_every_option_reaches_the_scheduler() -> None:
    slurm = SlurmConfig(
        partition="gpu",
        account="lab-7",
        qos="high",
        time="2-12",
        gpu_type="h100",
        cpus_per_gpu=6,
        memory="200G",
        constraint="ib&nvme",
        warning_seconds=90,
        array="0-3%1",
        options=["--exclusive", "--mail-type=END", "--comment=two words"],
    )
    assert options(batch_job(slurm=slurm)) == [
        "--job-name=demo",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=h100:4",
        "--cpus-per-task=24",
        "--mem=200G",
        "--time=2-12",
        "--partition=gpu",
        "--account=lab-7",
        "--qos=high",
        "--constraint=ib&nvme",
        "--array=0-3%1",
        "--signal=B:USR1@90",
        "--requeue",
        "--open-mode=append",
        "--output=/work/place/logs/slurm-%A_%a.out",
        "--exclusive",
        "--mail-type=END",
        '--comment="two words"',
        "--export=NIL",
    ]


def test_shellcheck_has_no_findings() -> None:
    need("shellcheck")
    slurm = SlurmConfig(array="3", setup=["if true; then", "  :", "fi"])
    script = render(batch_job(slurm=slurm, tasks={3: ("demo-03", ["MODEL_NAME=a b"])}))
    words = ["shellcheck", "--shell=bash", "-"]
    done = subprocess.run(words, input=script, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout


# ---- The script runs, with stand-ins for Slurm's programs

PROGRAMS = {
    "scontrol": (
        r"""
printf '%s\n' "$*" >>"$LAB/scontrol"
case "$1 $2" in
  "show hostnames") printf 'n1\nn2\n' ;;
  "show node") echo "NodeName=$3 Arch=x86_64 NodeAddr=10.0.0.${3#n} Port=1" ;;
  "show job") echo "JobId=$3 JobName=demo JobState=$(cat "$LAB/state") Reason=None" ;;
  requeue*) kill -TERM "$PPID" ;;
esac"""
    ),
    "srun": (
        r"""
printf '%s\n' "$*" >"$LAB/srun"
while [[ $1 == --* ]]; do shift; done
for ((i = 0; i < SLURM_NNODES; i++)); do SLURM_NODEID=$i "$@" & all+=("$!"); done
worst=0
for one in "${all[@]}"; do
  wait "$one"; code=$?
  ((code > worst)) && worst=$code
done
exit "$worst" """
    ),
    "node": (
        r"""
node=0
for word in "$@"; do [[ $word == NODE_RANK=* ]] && node=${word#NODE_RANK=}; done
printf '%s\0' "$@" >"$LAB/words-$node"
env >"$LAB/env-$node"
if [[ -e $LAB/cause-$node ]]; then cp "$LAB/cause-$node" "$SFT_PLAY_CAUSE_FILE"; fi
exit "$(cat "$LAB/code-$node")" """
    ),
}
"""Slurm's programs, and what stands in for our own command on a node: writes down what it was given, and ends as it is
told.
"""


class Bench:
    """Runs scripts of two nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.logs = folder, folder / "logs"
        (folder / "bin").mkdir()
        for name, text in PROGRAMS.items():
            (folder / "bin" / name).write_text("#!/bin/bash" + text)
            (folder / "bin" / name).chmod(0o755)
        (folder / "state").write_text("RUNNING")

    def run(
        self,
        codes: tuple[int, ...],
        code: int,
        job: BatchJob | None = None,
        *,
        requeued: bool = False,
        **variables: str,
    ) -> str:
        """Run a script whose nodes end with `codes`; assert its exit code and whether it was requeued; return its
        output.
        """
        for node, its_code in enumerate(codes):
            (self.folder / f"code-{node}").write_text(str(its_code))
        job = job or batch_job(self.folder)
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        words = (str(self.folder / "bin" / "node"), *job.words[1:])
        job = dataclasses.replace(job, words=words, environment={"PATH": path, **job.environment})
        job.logs.mkdir(parents=True, exist_ok=True)
        script = self.folder / "job.sbatch"
        script.write_text(render(job))
        variables = {
            "HOME": str(self.folder),
            "PATH": os.environ["PATH"],
            "LAB": str(self.folder),
            "SLURM_JOB_ID": "1234567",
            "SLURM_NNODES": str(job.nodes),
            "SLURM_JOB_NODELIST": "n[1-2]",
            **variables,
        }
        done = subprocess.run(
            ["bash", script],
            check=False,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            timeout=240,
        )
        assert (done.returncode, "\nrequeue 1234567" in f"\n{self.asked()}") == (code, requeued), done.stdout
        assert not list(self.logs.glob("*.??????")), "codes are left behind"
        return done.stdout

    def asked(self) -> str:
        """Return scontrol's calls, one per line."""
        path = self.folder / "scontrol"
        return path.read_text() if path.exists() else ""

    def words(self, node: int) -> list[str]:
        return (self.folder / f"words-{node}").read_text().split("\0")[:-1]

    def environment(self, node: int) -> Mapping[str, str]:
        return dict(line.partition("=")[::2] for line in (self.folder / f"env-{node}").read_text().splitlines())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_every_node_gets_the_command_that_a_person_would_type(bench: Bench) -> None:
    (bench.folder / ".profile").write_text("export FROM_LOGIN=$HOME\n")
    bench.run((0, 0), 0)
    common = ["-m", "sft_play", "train-distributed", "NUM_GPUS=4", "RUN_NAME=demo", "LAUNCH_AUTO_RESUME=true"]
    for node in (0, 1):
        assert bench.words(node) == [
            *common,
            "NUM_NODES=2",
            "MASTER_ADDR=10.0.0.1",
            "MASTER_PORT=25670",
            f"NODE_RANK={node}",
        ]
        environment = bench.environment(node)
        assert (
            re.fullmatch("[0-9a-f]{64}", environment["MASTER_KEY"]) and environment["SFT_PLAY_CACHE"] == "/work/cache"
        )
        assert environment["USER"] and environment["FROM_LOGIN"] == environment["HOME"], (
            "nobody else makes a login shell of `--export=NIL`"
        )
    asked = (bench.folder / "srun").read_text()
    for option in ("--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--ntasks-per-node=1", "--cpus-per-task=32"):
        assert f"{option} " in asked
    bench.run((0,), 0, batch_job(bench.folder, nodes=1))
    assert bench.words(0) == common and "MASTER_KEY" not in bench.environment(0)


def test_a_shell_interprets_nothing_of_the_users_values_and_each_task_of_a_sweep_has_its_own(bench: Bench) -> None:
    folder = bench.folder / EVIL.replace("/", "")
    folder.mkdir()
    environment = {"HF_HOME": EVIL, "RUNS_DIR": EVIL}
    job = batch_job(
        folder,
        logs=bench.folder / "logs $(touch x) #",
        nodes=1,
        words=("python", f"CONFIG={EVIL}"),
        environment=environment,
        slurm=SlurmConfig(array="3"),
        tasks={3: ("demo-03", [f"MODEL_NAME={EVIL}"])},
    )
    bench.run((0,), 0, job, SLURM_ARRAY_JOB_ID="1234567", SLURM_ARRAY_TASK_ID="3")
    assert bench.words(0) == [f"CONFIG={EVIL}", f"MODEL_NAME={EVIL}", "RUN_NAME=demo-03", "LAUNCH_AUTO_RESUME=true"]
    assert environment.items() <= bench.environment(0).items()
    assert not list(bench.folder.rglob("x"))


def test_one_task_of_an_array_is_a_run_and_is_queued_again_alone(bench: Bench) -> None:
    """A task's job id can be the array's number, which alone would name all tasks; variables of keys come only from
    setup lines.
    """
    job = batch_job(bench.folder, slurm=SlurmConfig(array="0-3", setup=["export SFT_TRAIN_SEED=$SLURM_ARRAY_TASK_ID"]))
    task = {"SLURM_ARRAY_JOB_ID": "1234567", "SLURM_ARRAY_TASK_ID": "3", "SFT_TRAIN_EPOCHS": "7"}
    output = bench.run((143, 143), 143, job, requeued=True, **task)
    asked = bench.asked()
    assert "requeue 1234567_3\n" in asked and "show job 1234567_3 --oneliner\n" in asked and "1234567\n" not in asked
    assert "slurm job 1234567_3: turn 0" in output and (bench.logs / "slurm-1234567_3.node1.out").exists()
    assert bench.environment(1)["SFT_TRAIN_SEED"] == "3" and "SFT_TRAIN_EPOCHS" not in bench.environment(1)
    assert "RUN_NAME=demo-3" in bench.words(1)


@pytest.mark.parametrize(
    ("codes", "code", "requeued", "changed", "message"),
    [
        ((143, 143), 143, True, {}, ""),
        ((0, 75), 75, True, {}, ""),
        ((137, 75), 75, True, {}, ""),
        ((4, 75), 4, False, {}, ""),
        ((75, 75), 75, False, {"cause-0": "peer\n", "cause-1": "out_of_memory\n"}, "because memory ran out"),
        ((143, 143), 143, False, {"state": "CANCELLED"}, ""),
    ],
)
def test_only_a_lost_peer_and_a_clean_stop_are_queued_again(
    bench: Bench, codes: tuple[int, int], code: int, requeued: bool, changed: dict[str, str], message: str
) -> None:
    """A job that was cancelled is not requeued either."""
    for name, text in changed.items():
        (bench.folder / name).write_text(text)
    assert message in bench.run(codes, code, requeued=requeued)


OF_ANOTHER_JOB = {
    "SLURM_MEM_PER_CPU": "100",
    "SLURM_GPUS_PER_TASK": "1",
    "SLURM_TIMELIMIT": "1",
    "SLURM_EXCLUSIVE": "user",
    "SLURM_PARTITION": "other",
    "SLURM_RESERVATION": "lab",
    "SLURM_OVERLAP": "1",
    "SRUN_CPUS_PER_TASK": "3",
    "SLURM_HINT": "nomultithread",
    "SLURM_CLUSTERS": "west",
}
OF_THIS_JOB = {
    "SLURM_MEM_PER_NODE": "500",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_CONF": "/etc/s.conf",
    "SLURM_JOB_QOS": "high",
}


def test_only_the_job_sets_options_for_srun(bench: Bench) -> None:
    """sbatch hands every `SLURM_` variable of its shell on to a job, and srun takes most of them for options."""
    variables = dict.fromkeys((*OF_ANOTHER_JOB, *OF_THIS_JOB))

    def seen(**options: Any) -> dict[str, str]:
        bench.run((0, 0), 0, batch_job(bench.folder, slurm=SlurmConfig(**options)), **OF_ANOTHER_JOB, **OF_THIS_JOB)
        return {name: text for name, text in bench.environment(0).items() if name in variables}

    assert seen(memory="500") == OF_THIS_JOB
    assert seen(memory="500", options=["--hint=nomultithread"]) == {**OF_THIS_JOB, "SLURM_HINT": "nomultithread"}
    assert seen() == {name: text for name, text in OF_THIS_JOB.items() if name != "SLURM_MEM_PER_NODE"}


def test_requeues_end_at_their_limit(bench: Bench) -> None:
    job = batch_job(bench.folder, slurm=SlurmConfig(max_requeues=2))
    assert "slurm.max_requeues" in bench.run((143, 143), 143, job, SLURM_RESTART_COUNT="2")


def test_a_setup_line_that_fails_ends_the_job_and_is_named(bench: Bench) -> None:
    setup = ["module() { return 7; }", "module load cuda/99", "export B=1"]
    output = bench.run((0, 0), 3, batch_job(bench.folder, slurm=SlurmConfig(setup=setup)))
    number = (bench.folder / "job.sbatch").read_text().splitlines().index(setup[1]) + 1
    assert "slurm.setup failed with code" in output and f"in line {number} of this script: {setup[1]}" in output, output
    assert not (bench.folder / "words-0").exists()


# ---- Configuration, and what sbatch refuses


def config_file(folder: Path, line: str = "max_requeues: 3") -> Path:
    """Write a small configuration with this line of `slurm`."""
    path = folder / "demo.yaml"
    (folder / "rows.jsonl").touch()
    path.write_text(
        "model:\n  name: TinyLlama/TinyLlama-1.1B-Chat-v1.0\n  max_seq_len: 512\ndata:\n  train_path: "
        f"{folder}/rows.jsonl\ntrain:\n  max_steps: 10\nslurm:\n  {line}\n"
    )
    return path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('partition: "gpu; rm -rf ~"', "slurm.partition"),
        ("time: 25:99", "expected a time as sbatch takes it"),
        ("time: '2'", "the job ends after 120 s"),
        ("options: ['--nodes=3']", "NUM_NODES"),
        (f"setup: ['export HF_TOKEN={TOKEN}']", "access token"),
    ],
)
def test_invalid_sbatch_options_are_refused_with_their_place(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(config_file(tmp_path, line), environ={})
    text = caught.value.render()
    assert words in text and "demo.yaml:" in text and TOKEN not in text
    assert text.count("error: ") == 1 or TOKEN in line


@pytest.mark.parametrize("time", ["12:30:00", "90", "2-12:59:59"])
def test_a_time_does_not_need_quotes(tmp_path: Path, time: str) -> None:
    assert load_config(config_file(tmp_path, f"time: {time}"), environ={}).config.slurm.time == time


def test_a_resumed_run_may_have_another_time() -> None:
    key = Override(key="slurm.time", text="48:00:00", origin="SLURM_TIME=48:00:00")
    check_overrides(Call(command="resume", overrides=(key,)))  # raises nothing


# ---- The command


def command(program: Program, folder: Path, *words: str, env: Mapping[str, str] | None = None) -> Done:
    """Type `make slurm` for four H100 a node and a run `demo`, unless `words` name others."""
    typed = {
        "CONFIG": str(config_file(folder)),
        "HARDWARE": "4xH100",
        "RUN_NAME": "demo",
        **dict(w.split("=", 1) for w in words),
    }
    return program("slurm", *(f"{name}={text}" for name, text in typed.items()), env=env)


def test_script_and_frozen_configuration_lie_in_the_runs_folder(in_process: Program, tmp_path: Path) -> None:
    env = {
        "HF_TOKEN": TOKEN,
        "https_proxy": "http://me:secret-word@proxy:3128",
        "HF_HOME": "/shared/hf",
        "SFT_TRAIN_SEED": "7",
    }
    done = command(in_process, tmp_path, "NUM_NODES=2", "TRAIN_LEARNING_RATE=3e-5", "JSON=1", env=env)
    assert done.code == 0, done.err
    facts, folder = done.json, tmp_path / "runs" / "demo" / "slurm"
    assert facts["script"] == str(folder / "job.sbatch")
    assert (facts["nodes"], facts["processes_per_node"], facts["job"], facts["plan"]["world_size"]) == (2, 4, None, 8)
    text = (folder / "job.sbatch").read_text()
    written = text + Path(facts["config"]).read_text()
    assert TOKEN not in written and "secret-word" not in written
    assert "https_proxy" in done.err
    assert "export HF_HOME=/shared/hf" in text and f"export RUNS_DIR={tmp_path / 'runs'}" in text
    assert "#SBATCH --gpus-per-node=4\n" in text
    assert Path(facts["config"]).parent == folder and f"CONFIG={facts['config']}" in text
    frozen = read_config(Path(facts["config"]))
    assert (frozen.config.train.learning_rate, frozen.config.train.seed) == (3e-5, 7)
    assert frozen.typed("train.learning_rate") and not frozen.typed("train.weight_decay")


def test_a_job_that_waits_keeps_its_configuration_when_its_run_is_written_again(
    in_process: Program, tmp_path: Path
) -> None:
    """sbatch keeps a copy of the script, but the job reads its files only when it starts."""
    rates = ("3e-5", "1e-4")
    first, second = (command(in_process, tmp_path, f"TRAIN_LEARNING_RATE={rate}", "JSON=1").json for rate in rates)
    assert first["script"] == second["script"]
    for facts, rate in zip((first, second), rates, strict=True):
        [config] = [word.removeprefix("CONFIG=") for word in facts["command"] if word.startswith("CONFIG=")]
        assert read_config(Path(config)).config.train.learning_rate == float(rate)


def test_cores_are_at_most_those_of_a_node_unless_typed(in_process: Program, tmp_path: Path) -> None:
    for words in (("NUM_NODES=2",), ("NUM_GPUS=2",), ("NUM_NODES=1",)):
        done = command(in_process, tmp_path, "HARDWARE=cpu", *words)
        cores = re.search(r"^#SBATCH --cpus-per-task=(\d+)$", (tmp_path / JOB).read_text(), re.M)
        assert done.code == 0 and cores and 1 <= int(cores[1]) <= max(cpu_threads(), 2), done.err
    command(in_process, tmp_path, "HARDWARE=cpu", "NUM_NODES=2", "NUM_GPUS=2", "SLURM_CPUS_PER_GPU=16")
    assert "--cpus-per-task=32\n" in (tmp_path / JOB).read_text()
    command(in_process, tmp_path)
    assert "--cpus-per-task=32\n" in (tmp_path / JOB).read_text(), "cards as described say nothing about cores"


def test_paths_on_a_disk_of_each_node_are_noted(in_process: Program, tmp_path: Path) -> None:
    done = command(in_process, tmp_path, "DATA_TRAIN_PATH=/shared/rows.jsonl", env={"TMPDIR": str(tmp_path)})
    assert done.code == 0 and re.search(rf"note: nodes may not see .*{tmp_path}/runs.*: `/tmp`", done.err), done.err
    assert "/shared" not in re.sub("(?m)^warning: .*", "", done.err)
    assert f"{tmp_path}/rows.jsonl" in command(in_process, tmp_path, env={"TMPDIR": str(tmp_path)}).err


def test_the_output_names_the_script_and_how_to_submit_it(in_process: Program, tmp_path: Path) -> None:
    script = tmp_path / "jobs" / "first.sbatch"
    done = command(in_process, tmp_path, f"OUT={script}", "SLURM_ARRAY=0-3", "PRICE_PER_HOUR=9", "WHY=0")
    assert "at PRICE_PER_HOUR" in done.out + done.err and "\n  because" not in done.out
    assert done.code == 0 and "planned for nodes like this machine" not in done.err, done.err
    assert (
        "plan: " in done.out
        and "1 node, 4 GPUs each, 32 cores each, at most 24.0 h, tasks 0-3: runs demo-INDEX" in done.out
    )
    assert f"submit   sbatch {script}" in done.out
    assert list(script.parent.glob("first.config-*.json")) and not (tmp_path / "runs").exists()


def test_tasks_of_an_array_that_train_the_same_are_noted(in_process: Program, tmp_path: Path) -> None:
    for setup, same in (
        ("[]", True),
        ("['module load cuda/12.8', 'export NCCL_DEBUG=INFO']", True),
        ("['module load cuda/12.8', 'export SFT_TRAIN_SEED=$SLURM_ARRAY_TASK_ID']", False),
        ("['source ~/seeds.sh']", False),
    ):
        done = command(in_process, tmp_path, "SLURM_ARRAY=0-3", f"SLURM_SETUP={setup}")
        assert done.code == 0 and ("train the same, each for itself" in done.err) == same, done.err


def test_a_time_limit_below_the_forecast_is_noted_with_the_turns_that_it_takes(
    in_process: Program, tmp_path: Path
) -> None:
    words = ("MODEL_NAME=Qwen/Qwen2.5-7B-Instruct", "HARDWARE=1xH100", "TRAIN_MAX_STEPS=500000", "SLURM_TIME=24")
    done = command(in_process, tmp_path, *words)
    turns = re.search(r"note: the forecast is [\d.]+ \w+ without .* is 24.0 min: at least (\d+) turns", done.err)
    assert done.code == 0 and turns and int(turns[1]) > 21, done.err
    assert "`slurm.max_requeues` is 3, which is too few" in done.err and "at most 24.0 min" in done.out
    done = command(in_process, tmp_path, *words, f"SLURM_MAX_REQUEUES={int(turns[1]) - 1}")
    assert f"`slurm.max_requeues` is {int(turns[1]) - 1}, which is enough" in done.err
    assert "the forecast is" not in command(in_process, tmp_path, *words, "TRAIN_MAX_STEPS=5").err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["OUT={folder}/mine.sh"], 2, "was not written by `make slurm`"),
        (["SUBMIT=1"], 3, "there is no `sbatch` here"),
        (["MASTER_PORT=1"], 2, "takes no `MASTER_PORT`"),
        (["HARDWARE=A100+L40S", "NUM_NODES=2"], 2, "different GPUs"),
        (["MODEL_NAME=meta-llama/Llama-3.1-70B-Instruct", "HARDWARE=1x8GB", "TUNING_MODE=full"], 3, "TRAIN_"),
    ],
)
def test_bad_input_is_one_error_and_leaves_files_unchanged(
    in_process: Program, tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    foreign, text = tmp_path / "mine.sh", "#!/bin/bash\necho mine\n"
    foreign.write_text(text)
    (tmp_path / "bash").symlink_to(str(shutil.which("bash")))
    done = command(in_process, tmp_path, *(word.format(folder=tmp_path) for word in words), env={"PATH": str(tmp_path)})
    assert done.code == code, done.err
    assert message in done.out + done.err and done.err.count("error: ") == 1
    assert foreign.read_text() == text
    assert (tmp_path / "runs").exists() == ("SUBMIT=1" in words)


def test_refusals_of_sbatch_are_user_errors(in_process: Program, tmp_path: Path) -> None:
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\necho 'sbatch: error: Invalid qos specification' >&2\nexit 1\n")
    program.chmod(0o755)
    queue = tmp_path / "squeue"
    queue.write_text("#!/bin/sh\n")
    queue.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = command(in_process, tmp_path, "SUBMIT=1", "SLURM_QOS=best", env=env)
    message = "job.sbatch: the cluster refuses the job:\nsbatch: error: Invalid qos specification"
    assert done.code == 2 and message in done.err and "`sacctmgr show qos`" in done.err, done.err

    queue.write_text("#!/bin/sh\nexit 1\n")
    done = command(in_process, tmp_path, "SUBMIT=1", env=env)
    assert done.code == 3 and "Slurm is not set up here, or its controller does not answer" in done.err, done.err
    assert "sacctmgr" not in done.err


SBATCH = """#!/bin/sh
env | grep -E '^(SBATCH|SLURM|SQUEUE)_' >>seen
echo 7
"""


def test_variables_of_the_shell_do_not_change_options_of_the_job(in_process: Program, tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text(SBATCH.replace("seen", str(tmp_path / "seen")))
    (tmp_path / "sbatch").chmod(0o755)
    typed = {
        "SBATCH_PARTITION": "other",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_EXPORT": "ALL",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JWT": "secret",  # who the user is, where there is no munge
    }
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **typed, "SLURM_CLUSTERS": "west"}

    def seen() -> list[str]:
        return sorted((tmp_path / "seen").read_text().splitlines())

    done = command(in_process, tmp_path, env=env)
    without = "-u SBATCH_EXPORT -u SBATCH_PARTITION -u SBATCH_TIMELIMIT -u SLURM_CLUSTERS"
    assert f"submit   env {without} sbatch {tmp_path}/runs/demo/slurm/job.sbatch" in done.out
    done = command(in_process, tmp_path, "SUBMIT=1", env=env)
    assert done.code == 0 and seen() == ["SLURM_CONF=/etc/slurm.conf"] * 2 + ["SLURM_JWT=secret"] * 2
    assert "note: SBATCH_EXPORT, SBATCH_PARTITION, SBATCH_TIMELIMIT, SLURM_CLUSTERS of this shell would win" in done.err
    inside = {**env, "SLURM_JOB_ID": "5", "SLURM_MEM_PER_CPU": "100", "SLURM_TIMELIMIT": "1"}
    done = command(in_process, tmp_path, "SUBMIT=1", env=inside)
    assert done.code == 0 and seen() == ["SLURM_CONF=/etc/slurm.conf"] * 4 + ["SLURM_JWT=secret"] * 4
    assert "note: SBATCH_EXPORT, SBATCH_PARTITION, SBATCH_TIMELIMIT of this shell" in done.err


def test_scripts_written_in_the_same_second_have_different_runs(
    in_process: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "20261121-051500")
    typed = [f"CONFIG={config_file(tmp_path)}", "HARDWARE=4xH100"]
    runs = [in_process("slurm", *typed, f"TRAIN_SEED={seed}", "JSON=1").json for seed in range(3)]
    assert [facts["run"] for facts in runs] == [f"demo-20261121-051500{end}" for end in ("", ".2", ".3")]
    assert [read_config(Path(facts["config"])).config.train.seed for facts in runs] == [0, 1, 2]
    refused = in_process("slurm", *typed, f"OUT={tmp_path}/demo.yaml")
    assert refused.code == 2 and len(list((tmp_path / "runs").iterdir())) == 3


def test_a_started_run_continues_by_its_own_command(in_process: Program, tmp_path: Path) -> None:
    start_run(in_process, tmp_path)
    assert command(in_process, tmp_path, "JSON=1").json["command"][3] == "train-fsdp"


def start_run(program: Program, folder: Path) -> None:
    """Leave what nodes leave that have started the run `demo`."""
    run = RunFolder(folder / "runs" / "demo")
    shutil.copy(command(program, folder, "JSON=1").json["config"], run.config)
    record_event(
        run, "started", launch={"command": "fsdp2", "num_gpus": 2, "num_nodes": 2, "deepspeed": None, "fsdp": {}}
    )


def test_what_the_job_would_refuse_of_a_started_run_is_refused_before(in_process: Program, tmp_path: Path) -> None:
    start_run(in_process, tmp_path)
    script = (tmp_path / JOB).read_text()
    refused = command(in_process, tmp_path, "TRAIN_LEARNING_RATE=1e-3")
    assert refused.code == 2 and "TRAIN_LEARNING_RATE=1e-3: `train.learning_rate` cannot change in" in refused.err
    assert (tmp_path / JOB).read_text() == script
    for words in (
        ("NUM_NODES=2", "NUM_GPUS=2", "SLURM_TIME=2:00:00", "TRAIN_MAX_STEPS=20", "TRAIN_BATCH_SIZE=1"),
        ("SLURM_SETUP=['export SFT_TRAIN_LEARNING_RATE=1e-3']", "TRAIN_LEARNING_RATE=2e-4"),  # the job decides
        ("RUN_NAME=other", "TRAIN_LEARNING_RATE=1e-3"),
    ):
        assert (done := command(in_process, tmp_path, *words)).code == 0, done.err
