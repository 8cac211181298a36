"""The batch script: what it asks for, that a shell reads nothing of the user's values, and what it does with each exit code.

The last is tried by running it in bash with small stand-ins for `srun` and `scontrol`; `tests/multinode/test_slurm.py` has the real ones.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.call import Call, Override
from sft_play.config.load import load_config, read_config
from sft_play.config.schema import SlurmConfig
from sft_play.config.slurm_rules import seconds_of
from sft_play.errors import UserError
from sft_play.launch.resume import check_overrides
from sft_play.schedulers.slurm_script import BatchJob, options, render
from tests.conftest import Program
from tests.programs import need

EVIL = "a $(touch x)`touch x` 'single' \"double\" \\ %j #; | & $HOME"
TOKEN = "hf_" + "abcdefghij" * 3


def batch_job(folder: Path = Path("/work/place"), **changes: Any) -> BatchJob:
    """Returns two nodes of four GPUs."""
    values: dict[str, Any] = {
        "run_name": "demo", "nodes": 2, "processes": 4, "gpus": True, "folder": folder, "environment": {"RUNS_DIR": "/work/runs"},
        "words": ("/venv/bin/python", "-m", "sft_play", "train-distributed", "CONFIG=/work/runs/demo/slurm/job.config.json", "NUM_GPUS=4"),
        "logs": folder / "runs" / "demo" / "slurm", "slurm": SlurmConfig(),
    }  # fmt: skip
    return BatchJob(**(values | changes))


def test_what_is_asked_of_the_scheduler() -> None:
    slurm = SlurmConfig(
        partition="gpu", account="lab-7", qos="high", time="2-12", gpu_type="h100", cpus_per_gpu=6, memory="200G", constraint="ib&nvme",
        warning_seconds=90, array="0-3%1", options=["--exclusive", "--mail-type=END", "--comment=two words"],
    )  # fmt: skip
    assert options(batch_job(slurm=slurm)) == [
        "--job-name=demo", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=h100:4", "--cpus-per-task=24", "--mem=200G", "--time=2-12",
        "--partition=gpu", "--account=lab-7", "--qos=high", "--constraint=ib&nvme", "--array=0-3%1", "--signal=B:USR1@90", "--requeue",
        "--open-mode=append", "--export=NONE", "--output=/work/place/runs/demo/slurm/slurm-%A_%a.out", "--exclusive", "--mail-type=END",
        '--comment="two words"',
    ]  # fmt: skip


def test_a_cluster_without_gpus_is_asked_for_none() -> None:
    asked = options(batch_job(gpus=False, processes=3))
    assert not any("gpu" in option for option in asked)
    assert "--cpus-per-task=24" in asked
    assert not any(option.startswith(("--mem", "--partition", "--account", "--array")) for option in asked)


def test_one_node_meets_nobody() -> None:
    text = render(batch_job(nodes=1))
    assert "MASTER_" not in text
    assert "NUM_NODES" not in text
    several = render(batch_job())
    assert 'MASTER_PORT="$port"' in several
    (line,) = [line for line in several.splitlines() if "export MASTER_KEY" in line]
    shell = ["bash", "-c", f'{line}\nprintf %s "$MASTER_KEY"']
    assert re.fullmatch("[0-9a-f]{64}", subprocess.check_output(shell, env={"PATH": os.environ["PATH"]}, text=True))
    assert "port=$((20000 + (SLURM_JOB_ID + tried) % 10000))" in several
    assert 'MASTER_ADDR="$(address_of "$first")"' in several


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nodes": 1},
        {"gpus": False},
        {"slurm": SlurmConfig(array="0-3", setup=["module load cuda/12", "if true; then", "  :", "fi"])},
    ],
    ids=["two nodes", "one node", "cpu", "array and setup"],
)
def test_bash_and_shellcheck_have_nothing_to_say(changes: dict[str, Any]) -> None:
    text = render(batch_job(**changes))
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    need("shellcheck")
    done = subprocess.run(
        ["shellcheck", "--shell=bash", "-"], input=text, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_a_backslash_in_the_outputs_path_is_refused() -> None:
    with pytest.raises(UserError, match="backslash"):
        render(batch_job(logs=Path(r"/a\b")))


@pytest.mark.parametrize("what", ["folder", "logs", "words", "environment", "run_name"])
@pytest.mark.parametrize("letter", ["\n", "\r", "\x1b", "\0", "\x85"])
def test_control_characters_are_refused(what: str, letter: str) -> None:
    bad: dict[str, Any] = {
        "folder": Path(f"/a{letter}b"), "logs": Path(f"/a{letter}b"), "words": ("python", f"CONFIG=a{letter}b"),
        "environment": {"HF_HOME": f"a{letter}b"}, "run_name": f"a{letter}b",
    }  # fmt: skip
    with pytest.raises(UserError, match="control character"):
        render(batch_job(**{what: bad[what]}))


# ---- The script runs, with stand-ins for Slurm's programs

SCONTROL = """#!/bin/bash
printf '%s\\n' "$*" >>"$LAB/scontrol"
case "$1 $2" in
  "show hostnames") printf 'n1\\nn2\\n' ;;
  "show node") echo "NodeName=$3 Arch=x86_64 NodeAddr=10.0.0.${3#n} Port=1" ;;
  "show job") echo "JobId=$3 JobName=demo JobState=$(cat "$LAB/state") Reason=None" ;;
  requeue*) kill -TERM "$PPID" ;;
esac
"""
SRUN = """#!/bin/bash
printf '%s\\n' "$*" >"$LAB/srun"
while [[ $1 == --* ]]; do shift; done
[[ -z ${KILL_BY:-} ]] || kill -s "$KILL_BY" $$
trap 'for one in "${all[@]}"; do kill -USR1 "$one"; done' USR1
for ((i = 0; i < SLURM_NNODES; i++)); do SLURM_NODEID=$i "$@" & all+=("$!"); done
worst=0
for one in "${all[@]}"; do
  wait "$one"; code=$?
  while kill -0 "$one" 2>/dev/null; do wait "$one"; code=$?; done
  ((code > worst)) && worst=$code
done
exit "$worst"
"""
NODE = """#!/bin/bash
node=0
for word in "$@"; do [[ $word == NODE_RANK=* ]] && node=${word#NODE_RANK=}; done
printf '%s\\0' "$@" >"$LAB/words-$node"
env >"$LAB/env-$node"
if [[ -e $LAB/cause-$node ]]; then cp "$LAB/cause-$node" "$SFT_PLAY_CAUSE_FILE"; fi
if [[ -e $LAB/hold ]]; then
  trap 'exit 143' TERM
  touch "$LAB/ready-$node"
  while :; do sleep 0.02; done
fi
exit "$(cat "$LAB/code-$node")"
"""
"""What stands in for our own command on a node: writes down what it was given, and ends as it is told."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A script that was run."""

    code: int
    out: str
    asked: list[str]
    """What scontrol was asked."""

    @property
    def requeued(self) -> bool:
        return "requeue 1234567" in self.asked


class Bench:
    """Runs scripts of two nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("node", NODE)):
            path = folder / "bin" / name
            path.write_text(text)
            path.chmod(0o755)
        (folder / "state").write_text("RUNNING")

    def start(self, codes: tuple[int, ...] = (0, 0), job: BatchJob | None = None, **variables: str) -> subprocess.Popen[str]:
        for node, code in enumerate(codes):
            (self.folder / f"code-{node}").write_text(str(code))
        job = job or batch_job(self.folder)
        job = dataclasses.replace(job, words=(str(self.folder / "bin" / "node"), *job.words[1:]))
        job.logs.mkdir(parents=True, exist_ok=True)
        script = self.folder / "job.sbatch"
        script.write_text(render(job))
        variables = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "LAB": str(self.folder), "SLURM_JOB_ID": "1234567",
            "SLURM_NNODES": str(job.nodes), "SLURM_JOB_NODELIST": "n[1-2]", **variables,
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", str(script)], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.folder
        )

    def run(self, codes: tuple[int, ...] = (0, 0), job: BatchJob | None = None, **variables: str) -> Ran:
        return self.end(self.start(codes, job, **variables))

    def end(self, process: subprocess.Popen[str]) -> Ran:
        try:
            out, _ = process.communicate(timeout=30)
        finally:
            process.kill()
        asked = self.folder / "scontrol"
        return Ran(process.returncode, out, asked.read_text().splitlines() if asked.exists() else [])

    def words(self, node: int) -> list[str]:
        return (self.folder / f"words-{node}").read_text().split("\0")[:-1]

    def environment(self, node: int) -> Mapping[str, str]:
        return dict(line.partition("=")[::2] for line in (self.folder / f"env-{node}").read_text().splitlines())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_every_node_gets_the_command_that_a_person_would_type(bench: Bench) -> None:
    done = bench.run()
    assert (done.code, done.requeued) == (0, False), done.out
    for node in (0, 1):
        assert bench.words(node) == [
            "-m", "sft_play", "train-distributed", "CONFIG=/work/runs/demo/slurm/job.config.json", "NUM_GPUS=4", "RUN_NAME=demo",
            "LAUNCH_AUTO_RESUME=true", "NUM_NODES=2", "MASTER_ADDR=10.0.0.1", "MASTER_PORT=24567", f"NODE_RANK={node}",
        ]  # fmt: skip
    asked = (bench.folder / "srun").read_text()
    for option in ("--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--ntasks-per-node=1", "--cpus-per-task=32"):
        assert f"{option} " in asked
    assert not list((bench.folder / "runs" / "demo" / "slurm").glob("*.??????")), "codes are left behind"


def test_a_shell_interprets_nothing_of_the_users_values(bench: Bench) -> None:
    folder = bench.folder / EVIL.replace("/", "")
    folder.mkdir()
    job = batch_job(
        folder,
        logs=bench.folder / "logs $(touch x) #",
        nodes=1,
        words=("python", f"CONFIG={EVIL}"),
        environment={"HF_HOME": EVIL, "RUNS_DIR": EVIL},
    )
    done = bench.run((0,), job)
    assert done.code == 0, done.out
    assert bench.words(0)[0] == f"CONFIG={EVIL}"
    assert bench.environment(0)["HF_HOME"] == EVIL
    assert not list(bench.folder.rglob("x"))


def test_variables_of_configuration_keys_come_from_setup_lines_only(bench: Bench) -> None:
    slurm = SlurmConfig(array="0-3", setup=["export SFT_TRAIN_SEED=$SLURM_ARRAY_TASK_ID"])
    done = bench.run(
        (0, 0), batch_job(bench.folder, slurm=slurm), SFT_TRAIN_EPOCHS="7", SLURM_ARRAY_JOB_ID="1234560", SLURM_ARRAY_TASK_ID="3"
    )
    assert done.code == 0, done.out
    environment = bench.environment(1)
    assert environment["SFT_TRAIN_SEED"] == "3"
    assert "SFT_TRAIN_EPOCHS" not in environment
    assert "RUN_NAME=demo-3" in bench.words(1)
    assert (bench.folder / "runs/demo/slurm/slurm-1234560_3.node1.out").exists()


@pytest.mark.parametrize(
    ("codes", "code", "requeued"),
    [
        ((143, 143), 143, True), ((75, 75), 75, True), ((75, 143), 75, True), ((0, 75), 75, True), ((4, 75), 4, False), ((143, 5), 5, False),
        ((1, 1), 1, False), ((2, 0), 2, False), ((3, 75), 3, False), ((130, 130), 130, False), ((137, 137), 137, False), ((137, 75), 75, True),
    ],
)  # fmt: skip
def test_only_a_lost_peer_and_a_clean_stop_are_queued_again(
    bench: Bench, codes: tuple[int, int], code: int, requeued: bool
) -> None:
    done = bench.run(codes)
    assert (done.code, done.requeued) == (code, requeued), done.out


@pytest.mark.parametrize(("turn", "requeued"), [("0", True), ("1", True), ("2", False)])
def test_there_is_a_last_turn(bench: Bench, turn: str, requeued: bool) -> None:
    done = bench.run((143, 143), batch_job(bench.folder, slurm=SlurmConfig(max_requeues=2)), SLURM_RESTART_COUNT=turn)
    assert (done.code, done.requeued) == (143, requeued)
    assert ("slurm.max_requeues" in done.out) is not requeued


@pytest.mark.parametrize("state", ["CANCELLED", "PENDING", "TIMEOUT", ""])
def test_a_job_that_somebody_has_ended_stays_as_it_is(bench: Bench, state: str) -> None:
    (bench.folder / "state").write_text(state)
    done = bench.run((143, 143))
    assert (done.code, done.requeued) == (143, False), done.out


def test_the_early_warning_reaches_all_nodes_and_takes_another_turn(bench: Bench) -> None:
    (bench.folder / "hold").touch()
    process = bench.start()
    deadline = time.monotonic() + 20
    while not all((bench.folder / f"ready-{node}").exists() for node in (0, 1)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    done = bench.end(process)
    assert (done.code, done.requeued) == (143, True), done.out


def test_a_warning_before_the_start_takes_another_turn(bench: Bench) -> None:
    slurm = SlurmConfig(setup=["kill -USR1 $$"])
    done = bench.run((0, 0), batch_job(bench.folder, slurm=slurm))
    assert (done.code, done.requeued) == (143, True), done.out
    assert not (bench.folder / "words-0").exists()
    early = bench.run((0, 0), KILL_BY="USR1")
    assert (early.code, early.requeued) == (143, True), early.out


# ---- Configuration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("24:00:00", 86400), ("2-12", 216000), ("1-02:30", 95400), ("1-02:30:10", 95410), ("soon", None),
    ("1:2:3:4", None),
     ("-5", None), ("", None)],
)  # fmt: skip
def test_times_are_read_as_sbatch_reads_them(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds


def config_file(folder: Path, *lines: str) -> Path:
    """Writes a small configuration with these lines of `slurm`."""
    path = folder / "demo.yaml"
    slurm = "slurm:\n" + "".join(f"  {line}\n" for line in lines) if lines else ""
    path.write_text(
        "model:\n  name: TinyLlama/TinyLlama-1.1B-Chat-v1.0\n  max_seq_len: 512\ndata:\n  train_path: rows.jsonl\ntrain:\n  max_steps: 10\n"
        + slurm
    )
    return path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('partition: "gpu; rm -rf ~"', "slurm.partition"), ('account: "a b"', "slurm.account"), ('qos: ""', "slurm.qos"),
        ('partition: "gpu\\nevil"', "slurm.partition"), ("gpu_type: 'h100 x'", "slurm.gpu_type"), ("memory: lots", "slurm.memory"),
        ('constraint: "$(id)"', "slurm.constraint"), ("array: all", "slurm.array"), ("array: 1-10%0", "slurm.array"),
        ("array: 3-1", "whose range `3-1` runs backwards\n\nhint: did you mean `1-3`?"), ("array: '0,9-7:2%1'", "did you mean `7-9`?"),
        ("array: 0-3:0", "has a step of 0"),
        ("time: 25:99", "did you mean `26:39:00` (hours:minutes:seconds) or `26:39` (minutes:seconds)?"),
        ("time: 1:90:00", "did you mean `02:30:00`?"), ("time: 30:00:75", "did you mean `30:01:15`?"),
        ("time: 2-12:90", "did you mean `2-13:30:00`?"),
        ("time: soon", "slurm.time"), ("time: '2'", "the job ends after 120 s"), ("warning_seconds: 90000", "slurm.warning_seconds"),
        ("options: ['-N 3']", "expected an option of sbatch"), ("options: ['--nodes=3']", "NUM_NODES"),
        ("options: ['--partition=x']", "slurm.partition"),
        ("options: ['--requeue']", "not for the script"), ("options: ['--export=ALL']", "not for the script"),
        ("options: ['--hold']", "type it when you"),
        ('options: ["--comment=a\\nb"]', "expected an option of sbatch"), (f"setup: ['export HF_TOKEN={TOKEN}']", "access token"),
        ('setup: ["a\\u001bb"]', "control character"), ("max_requeues: -1", "slurm.max_requeues"),
    ],
)  # fmt: skip
def test_what_sbatch_would_not_take_is_refused_with_its_place(tmp_path: Path, line: str, words: str) -> None:
    path = config_file(tmp_path, line)
    with pytest.raises(UserError) as caught:
        load_config(path, environ={})
    text = caught.value.render()
    assert words in text
    assert "demo.yaml:" in text
    assert text.count("error: ") == 1 or TOKEN in line
    assert TOKEN not in text


def test_a_time_needs_no_quotes_and_a_resumed_run_may_have_another(tmp_path: Path) -> None:
    for given in ("12:30:00", "59:59", "90", "2-30", "2-12:59:59", "100:59:59"):
        assert load_config(config_file(tmp_path, f"time: {given}"), environ={}).config.slurm.time == given
    key = Override(key="slurm.time", text="48:00:00", origin="SLURM_TIME=48:00:00")
    check_overrides(Call(command="resume", overrides=(key,)))  # raises nothing


# ---- The command


def command(program: Program, folder: Path, *words: str, env: Mapping[str, str] | None = None, **options: Any) -> Any:
    config = next((word for word in words if word.startswith("CONFIG=")), f"CONFIG={config_file(folder)}")
    rest = [word for word in words if not word.startswith("CONFIG=")]
    return program("slurm", config, "HARDWARE=4xH100", *rest, env=env, **options)


def test_script_and_frozen_configuration_lie_in_the_runs_folder(in_process: Program, tmp_path: Path) -> None:
    secret = {
        "HF_TOKEN": TOKEN,
        "https_proxy": "http://me:secret-word@proxy:3128",
        "HF_HOME": "/shared/hf",
        "SFT_TRAIN_SEED": "7",
    }
    done = command(in_process, tmp_path, "NUM_NODES=2", "RUN_NAME=demo", "TRAIN_LEARNING_RATE=3e-5", "JSON=1", env=secret)
    assert done.code == 0, done.err
    facts = done.json
    folder = tmp_path / "runs" / "demo" / "slurm"
    assert facts["script"] == str(folder / "job.sbatch")
    assert (facts["nodes"], facts["processes_per_node"], facts["job"], facts["plan"]["world_size"]) == (2, 4, None, 8)
    assert facts["command"][3] in ("train-distributed", "train-deepspeed", "train-fsdp")
    text = (folder / "job.sbatch").read_text()
    written = text + (folder / "job.config.json").read_text()
    assert TOKEN not in written and "secret-word" not in written
    assert "https_proxy" in done.err and "hf auth login" in done.err
    assert "export HF_HOME=/shared/hf" in text and f"export RUNS_DIR={tmp_path / 'runs'}" in text
    assert "#SBATCH --gpus-per-node=4\n" in text
    (tmp_path / "demo.yaml").write_text("model:\n  name: another\n")  # a later edit
    frozen = read_config(folder / "job.config.json")
    assert (frozen.config.train.learning_rate, frozen.config.model.name, frozen.config.train.seed) == (
        3e-5,
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        7,
    )
    assert frozen.typed("train.learning_rate") and not frozen.typed("train.weight_decay")


def test_a_users_deepspeed_json_is_frozen_too(in_process: Program, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text('{"zero_optimization": {"stage": 2}, /* mine */ "train_micro_batch_size_per_gpu": "auto"}')
    done = command(in_process, tmp_path, "RUN_NAME=zero", f"DEEPSPEED_CONFIG={own}", "JSON=1")
    assert done.code == 0, done.err
    kept = tmp_path / "runs" / "zero" / "slurm" / "job.deepspeed.json"
    assert json.loads(kept.read_text())["zero_optimization"]["stage"] == 2
    assert done.json["command"][3] == "train-deepspeed" and f"DEEPSPEED_CONFIG={kept}" in done.json["command"]


def test_hardware_that_was_named_is_not_asked_for(in_process: Program, tmp_path: Path) -> None:
    config = f"CONFIG={config_file(tmp_path)}"
    done = in_process("slurm", config, "HARDWARE=cpu", "NUM_GPUS=1", "RUN_NAME=a")
    assert done.code == 0 and "planned for nodes like this machine" not in done.err, done.err
    assert "slurm: 1 node, 1 process each, 8 cores each, " in done.out
    unnamed = in_process("slurm", config, "NUM_GPUS=2", "NUM_NODES=2", "RUN_NAME=b", env={"CUDA_VISIBLE_DEVICES": ""})
    assert "planned for nodes like this machine; HARDWARE=4xH100 describes the cluster's nodes" in unnamed.err
    assert "slurm: 2 nodes, 2 processes each, " in unnamed.out


def test_text_says_what_was_written_and_how_to_submit_it(in_process: Program, tmp_path: Path) -> None:
    done = command(in_process, tmp_path, "RUN_NAME=demo", f"OUT={tmp_path / 'jobs' / 'first.sbatch'}", "SLURM_ARRAY=0-3")
    assert done.code == 0, done.err
    assert "plan: " in done.out and "1 node, 4 GPUs each, 32 cores each, 24:00:00, tasks 0-3: runs demo-INDEX" in done.out
    assert f"submit   sbatch {tmp_path / 'jobs' / 'first.sbatch'}" in done.out
    assert (tmp_path / "jobs" / "first.config.json").is_file()
    assert not (tmp_path / "runs").exists()
    again = command(in_process, tmp_path, "RUN_NAME=demo", f"OUT={tmp_path / 'jobs' / 'first.sbatch'}")
    assert again.code == 0, again.err  # its own script is written anew


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["SUBMIT=perhaps"], 2, "expected `1` or `0`"),
        (["RUN_NAME=a b"], 2, "`RUN_NAME` is `a b`"),
        ([f"RUN_NAME={'a' * 115}", "SLURM_ARRAY=0-3"], 2, "`RUN_NAME` is"),
        (["OUT=FOREIGN"], 2, "is no script of `make slurm`"),
        (["OUT=FOREIGN/job.sbatch"], 2, "cannot be written"),
        (['SLURM_SETUP=["echo \'open"]'], 2, "`slurm.setup` is no shell text"),
        (["SUBMIT=1"], 3, "there is no `sbatch` here"),
        (["MASTER_PORT=1"], 2, "takes no `MASTER_PORT`"),
    ],
)
def test_bad_input_is_one_error_and_loses_nothing(
    in_process: Program, tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    foreign = tmp_path / "mine.sh"
    foreign.write_text("#!/bin/bash\necho mine\n")
    bare = tmp_path / "bare"
    bare.mkdir()
    bash = shutil.which("bash")
    assert bash is not None
    (bare / "bash").symlink_to(bash)
    words = [word.replace("FOREIGN", str(foreign)) for word in words]
    done = command(in_process, tmp_path, "RUN_NAME=demo", *words, env={"PATH": str(bare)}) if "RUN_NAME" not in words[0] else command(
        in_process, tmp_path, *words, env={"PATH": str(bare)}
    )  # fmt: skip
    assert done.code == code, done.err
    assert said in done.err
    assert done.err.count("error: ") == 1
    assert foreign.read_text() == "#!/bin/bash\necho mine\n"


def test_a_model_that_does_not_fit_is_shown_and_nothing_is_written(in_process: Program, tmp_path: Path) -> None:
    config = config_file(tmp_path)
    config.write_text(config.read_text().replace("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "meta-llama/Llama-3.1-70B-Instruct"))
    done = in_process("slurm", f"CONFIG={config}", "HARDWARE=1x8GB", "TUNING_MODE=full", "RUN_NAME=demo")
    assert done.code in (2, 3), done.err
    assert not (tmp_path / "runs").exists()
