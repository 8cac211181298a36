"""Launching as a user does: real processes on the CPU, and every failure with one message, its exit code, and no
trace.
"""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path

import pytest

from sft_play.launch.environment import free_port
from tests.conftest import metrics
from tests.launcher import Launcher, can_mount, events


@pytest.fixture
def launcher(tmp_path: Path, tiny: Path) -> Launcher:
    return Launcher(tmp_path, tiny)


def changed_at(run: Path) -> dict[Path, int]:
    """Return when each file of a run was last written, except its lock."""
    return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.suffix != ".lock" and path != run}


@pytest.mark.parametrize("command", ["train-tb", pytest.param("train-deepspeed-tb", marks=pytest.mark.long)])
def test_a_tb_command_trains_and_leaves_its_curves_open(launcher: Launcher, command: str) -> None:
    port = free_port()
    try:
        done = launcher(command, f"CONFIG={launcher.config}", "RUN_NAME=one", f"TENSORBOARD_PORT={port}")
        assert done.code == 0 and "TensorBoard keeps running" in done.err, done.err
        assert [event["event"] for event in launcher.events("one")] == ["started", "finished"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=240) as response:
            assert response.status == 200
    finally:
        assert launcher("tensorboard-stop").code == 0


def test_one_process_from_start_to_end(launcher: Launcher) -> None:
    done = launcher(
        "train", f"CONFIG={launcher.config}", "RUN_NAME=one", "JSON=1", PET_NNODES="7", RANK="3", NCCL_DEBUG="WARN"
    )
    assert done.code == 0, done.err
    result = json.loads(done.out)  # stdout holds the result only
    assert result["code"] == 0
    assert Path(result["model"]).is_dir()
    before_steps = done.err.partition("step 1/2")[0].splitlines()
    assert len(before_steps) <= 15 and "because" not in done.err, done.err
    run = launcher.runs / "one"
    for line in ("accelerate launch --config_file", "NCCL_DEBUG=WARN  (yours)"):
        assert line not in done.err and line in (run / "logs" / "launcher.log").read_text()
    for name in (
        "config.json",
        "plan.json",
        "prepared.json",
        "stamp.json",
        "accelerate.yaml",
        "metrics.jsonl",
        "logs/rank0.log",
    ):
        assert (run / name).is_file(), name
    assert [e["event"] for e in launcher.events("one")] == ["started", "finished"]
    steps = [line for line in (run / "logs" / "rank0.log").read_text().splitlines() if line.startswith("step ")]
    assert steps and steps == [line for line in done.err.splitlines() if line.startswith("step ")], (
        "once in the log, as on the console"
    )

    before = changed_at(run)
    again = launcher("train", f"CONFIG={launcher.config}", "RUN_NAME=one")
    again.refused(2, "the run `one` exists already", "make resume RUN=one")
    assert changed_at(run) == before

    complete = launcher("resume", "RUN=one")
    assert complete.code == 0 and "is complete" in complete.err
    assert changed_at(run) == before
    (run / "report.html").rename(run / ".report.html.abcd1234")  # a launcher that was killed as it wrote the report
    complete = launcher("resume", "RUN=one")
    assert complete.code == 0 and (run / "report.html").is_file() and not (run / ".report.html.abcd1234").exists()
    before = changed_at(run)

    launcher("resume", "RUN=one", "TRAIN_MAX_STEPS=1").refused(2, "the configuration asks for 1 step in all")
    other = launcher("resume", "RUN=one", "TRAIN_MAX_STEPS=4", "TUNING_BACKEND=unsloth")
    other.refused(5, "`backend` was `bnb` and is `unsloth`")
    for word, key in {
        "TRAIN_LEARNING_RATE=1": "learning_rate",
        "TRAIN_LOSS=dft": "loss",
        "TRAIN_OPTIM=muon": "optim",
    }.items():
        launcher("resume", "RUN=one", word).refused(2, f"`train.{key}` cannot change")
    assert changed_at(run) == before

    longer = launcher("resume", "RUN=one", "TRAIN_MAX_STEPS=3", "WHY=1")
    assert longer.code == 0, longer.err
    assert "from step-000002" in longer.err
    assert "  because  " in longer.out and "accelerate launch --config_file" in longer.out
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]


def test_a_zero_3_file_of_two_words_saves_the_full_model(launcher: Launcher) -> None:
    """Neither a user's JSON nor that of `make setup-accelerate` sets the gathering of weights at a save."""
    (launcher.folder / "ds.json").write_text(
        '{"zero_optimization": {"stage": 3,\n "stage3_gather_16bit_weights_on_model_save": false}}'
    )
    assert launcher("setup-accelerate", "STRATEGY=zero3", "NUM_GPUS=2", "OUT=zero3.yaml").code == 0
    for name, file in (("one", "DEEPSPEED_CONFIG=ds.json"), ("two", "ACCELERATE_CONFIG=zero3.yaml")):
        words = ("train-deepspeed", f"CONFIG={launcher.config}", f"RUN_NAME={name}", "NUM_GPUS=2", "TUNING_MODE=full")
        done = launcher(*words, file, TORCH_EXTENSIONS_DIR=str(launcher.folder / "extensions"))
        assert done.code == 0, done.err
        assert not (launcher.folder / "extensions").exists(), "a run that offloads nothing compiles nothing"
        assert (launcher.runs / name / "checkpoints" / "step-000001").is_dir()
        assert (launcher.runs / name / "model" / "model.safetensors").is_file()
        assert ("ds.json:2: `stage3_gather" in done.out) == (name == "one"), done.out


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.long)])
def test_two_nodes_train_and_resume_by_hand(launcher: Launcher, address: str) -> None:
    place, runs = (
        (f"MASTER_ADDR={address}", f"MASTER_PORT={free_port()}"),
        [launcher.folder / f"runs{rank}" for rank in range(2)],
    )

    def on_both(code: int, *words: str) -> list[str]:
        nodes = [
            launcher.start(*words, *place, f"NODE_RANK={rank}", RUNS_DIR=str(folder))
            for rank, folder in enumerate(runs)
        ]
        codes, outputs = zip(*(node.end() for node in nodes), strict=True)
        assert codes == (code, code), outputs
        return list(outputs)

    on_both(0, "train-distributed", f"CONFIG={launcher.config}", "NUM_NODES=2", "NUM_GPUS=1", "RUN_NAME=nodes")
    for rank, folder in enumerate(runs):
        logs = folder / "nodes" / "logs"
        assert (logs / f"rank{rank}.log").is_file() and (logs / f"holdings-rank{rank}.json").is_file()
        assert events(folder / "nodes")[-1]["event"] == "finished"
    host = socket.gethostname()
    for output in on_both(5, "resume", "RUN=nodes", "TRAIN_MAX_STEPS=9"):
        assert (
            "the nodes begin at different points: `run` is `continued from step-000002 (" in output
            and f")` on node 0 ({host}), `continued from its start` on node 1 ({host})" in output
        )
        assert "hint: let RUNS_DIR be a folder that all" in output
    alone = launcher("resume", "RUN=nodes", "NUM_NODES=1", "TRAIN_MAX_STEPS=3", RUNS_DIR=str(runs[0]))
    assert alone.code == 0 and "ran with 2 processes, and continues with 1;" in alone.err, alone.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("NUM_NODES=2",), 2, ("`NODE_RANK`, `MASTER_ADDR`, `RUN_NAME`",)),
        (("NUM_NODES=2", "NODE_RANK=1", "MASTER_ADDR=127.0.0.1", "RUN_NAME=x", "SOURCE=probe"), 2, ("on one machine",)),
        (
            ("NUM_NODES=2", "NODE_RANK=1", "MASTER_ADDR=pc:29500", "RUN_NAME=x"),
            2,
            ("MASTER_ADDR=pc:29500: ", "MASTER_PORT"),
        ),
        (("MASTER_PORT={busy}",), 3, ("port {busy} is taken",)),
        (("ACCELERATE_CONFIG={folder}/three.yaml", "NUM_GPUS=2"), 2, ("`NUM_GPUS` is 2", "says 3")),
        (("DATA_TRAIN_PATH={folder}/empty.jsonl",), 4, ("empty.jsonl",)),
    ],
)
def test_refusals_leave_nothing(
    launcher: Launcher, arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    (launcher.folder / "three.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 3\n")
    (launcher.folder / "empty.jsonl").touch()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        values = {"busy": str(listener.getsockname()[1]), "folder": str(launcher.folder)}
        typed = [part.format(**values) for part in arguments]
        outcome = launcher("train-distributed", f"CONFIG={launcher.config}", *typed)
    outcome.refused(code, *(word.format(**values) for word in words))
    assert outcome.err.count("error: ") == 1
    assert not launcher.runs.exists()


@pytest.mark.skipif(not can_mount(), reason="needs root and mount namespaces")
def test_a_full_disk_is_refused_before_the_workers_start(launcher: Launcher) -> None:
    small = launcher.folder / "small"
    small.mkdir()
    script = f'mount -t tmpfs -o size=2m none {small} && "$@"; code=$?; ls -A {small} >&2; exit $code'
    outcome = launcher.in_namespace("-m", script, "train", f"CONFIG={launcher.config}", RUNS_DIR=str(small))
    assert outcome.code == 3, outcome.err
    assert "GiB free, but this run needs" in outcome.err
    assert "demo-20" not in outcome.err.splitlines()[-1]  # the run's folder is gone again


@pytest.mark.long
def test_training_follows_the_accelerate_config_that_is_named(launcher: Launcher) -> None:
    named = launcher.folder / "mine.yaml"
    named.write_text(
        "distributed_type: MULTI_CPU\nmachine_rank: 0\nmixed_precision: 'no'\nnum_machines: 1\nnum_processes:"
        " 2\nuse_cpu: true\n"
    )
    words = (f"CONFIG={launcher.config}", f"ACCELERATE_CONFIG={named}", "RUN_NAME=mine", "TRAIN_MAX_STEPS=1")
    outcome = launcher("train-distributed", *words)
    assert outcome.code == 0, outcome.err
    plan = json.loads((launcher.runs / "mine" / "plan.json").read_text())
    assert (plan["strategy"], plan["world_size"]) == ("ddp", 2)
