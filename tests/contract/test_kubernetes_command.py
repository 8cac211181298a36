"""`make kubernetes` as a user types it: files, JSON, the example of two L40S pods, and clear errors that write
nothing.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from tests.conftest import Program
from tests.documents import documented_commands
from tests.kubernetes_runs import TWO, of_kind, pods

EXAMPLE = "examples/09_two_l40s_pods/README.md"


def test_files_go_to_the_runs_folder_and_json_says_which(in_process: Program, tmp_path: Path) -> None:
    done = in_process("kubernetes", *TWO, "RUN_NAME=demo", "JSON=1")
    assert done.code == 0, done.err
    assert done.json["files"] == [str(tmp_path / "runs" / "demo" / "pytorchjob.yaml")]
    assert (done.json["pods"], done.json["card"], done.json["plan"]["world_size"]) == (2, "L40S", 2)
    text = Path(done.json["files"][0]).read_text()
    assert "# PyTorchJob of the run demo, rendered by: make kubernetes" in text
    again = in_process("kubernetes", *TWO, "RUN_NAME=demo")
    assert again.code == 0 and Path(done.json["files"][0]).read_text() == text
    assert "kubectl apply -f" in again.out and "2 pods with 1 GPU (L40S) each" in again.out
    assert "these claims must exist: models, runs, each mounted by all pods at once" in again.err


def test_without_a_description_the_hardware_is_this_machines(in_process: Program, tmp_path: Path) -> None:
    words = ("kubernetes", "CONFIG=configs/quickstart.yaml", "OUT=~/manifests", "KUBERNETES_KIND=job", "JSON=1")
    done = in_process(*words, env={"CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)})
    assert done.code == 0, done.err
    assert done.json["words"][0] == "train" and done.json["pods"] == 1
    assert (tmp_path / "manifests" / "job.yaml").is_file(), "a home is a home"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ("HARDWARE=8GB", "MODEL_NAME=Qwen/Qwen2.5-14B-Instruct", "TUNING_MODE=full"),
            3,
            "not even one row of 2048 tokens fits",
        ),
        (("OUT=FILE/x",), 2, "error: OUT: "),
    ],
)
def test_bad_input_is_one_error_and_nothing_is_written(
    in_process: Program, tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    (tmp_path / "file").write_text("")
    arguments = [*TWO, f"OUT={tmp_path / 'out'}", *(word.replace("FILE", str(tmp_path / "file")) for word in words)]
    done = in_process("kubernetes", *{word.partition("=")[0]: word for word in arguments}.values())
    assert done.code == code, done.err
    assert message in done.err and "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


def test_files_of_others_are_not_overwritten(in_process: Program, tmp_path: Path) -> None:
    mine, words = tmp_path / "pytorchjob.yaml", ("kubernetes", *TWO, f"OUT={tmp_path}")
    mine.write_text("kind: PyTorchJob # mine\n")
    done = in_process(*words, "KUBERNETES_CREATE_CLAIMS=true", "KUBERNETES_STORAGE_CLASS=nfs")
    assert done.code == 2 and "was not written by `make kubernetes`" in done.err
    assert mine.read_text() == "kind: PyTorchJob # mine\n" and not (tmp_path / "claims.yaml").exists()


def test_the_example_of_two_l40s_pods_is_planned_and_rendered(in_process: Program, tmp_path: Path) -> None:
    """28 rows per GPU fit, 56 make a step; both kinds are rendered by the commands of its README."""
    plan, *renders = [shlex.split(command.text) for command in documented_commands() if command.document == EXAMPLE]
    done = in_process(*plan[1:], "JSON=1")
    assert done.code == 0, done.err
    assert [(r["micro_batch"], r["accumulation"]) for r in done.json["ranks"]] == [(28, 1)] * 2
    assert len(renders) == 2
    for words in renders:
        done = in_process(*(word for word in words[1:] if not word.startswith("OUT=")), f"OUT={tmp_path / 'out'}")
        assert done.code == 0, done.err
        assert "names `aim`, which is in an image that was built with --build-arg TRACKERS=aim==3.29.1" in done.err
    documents = list(yaml.safe_load_all((tmp_path / "out" / "pytorchjob.yaml").read_text()))
    for template in pods(documents):
        assert template["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L40S"}
    config = json.loads(of_kind(documents, "ConfigMap")["data"]["config.json"])["config"]
    assert config["train"]["extra"]["report_to"] == ["tensorboard", "aim"]
