"""Each finding of `make doctor`, provoked by the condition that it is about: stub packages, fake tools, limits, taken ports."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import textwrap
import venv
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.nvml_double import A100_SPLIT, MACHINES, MISMATCH, RTX4090, Machine

ROOT = Path(__file__).parents[2]
TOOLS = ("env", "sh", "cat")


class Doctor:
    """Runs the doctor in a small environment that a test can spoil."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        for tool in ("c++", "ninja"):
            self.tool(tool, "exit 0")
        self.python = sys.executable
        self.working = folder / "work"
        self.working.mkdir()
        self.environment = {
            "PATH": str(self.bin),
            "HOME": str(folder / "home"),
            "PYTHONPATH": str(ROOT),
            "RUNS_DIR": str(folder / "runs"),
            "SFT_PLAY_CACHE": str(folder / "cache"),
            "HF_HOME": str(folder / "hf"),
            "HF_ENDPOINT": "http://127.0.0.1:9",
        }

    def tool(self, name: str, script: str) -> None:
        """Puts an executable on the PATH."""
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def machine(self, machine: Machine) -> None:
        """Moves to a machine with these GPUs."""
        self.environment |= machine.environment(self.folder / "machine")

    def torch(self, *, cuda: str | None, architectures: str = "", fails: str = "", broken: str = "") -> None:
        """Puts another torch in front of the installed one; `fails` is what it says of every GPU, `broken` of being imported."""
        package = self.folder / "stubs" / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(
            textwrap.dedent(f"""
                from types import SimpleNamespace as N
                if {broken!r}:
                    raise OSError({broken!r})
                __version__ = "2.13.0"
                version = N(cuda={cuda!r})
                _C = N(_cuda_getArchFlags=lambda: {architectures!r})
                def ones(size, device):
                    if {fails!r}:
                        raise RuntimeError({fails!r})
                    return N(item=lambda: 1.0)
            """)
        )
        self.environment["PYTHONPATH"] = f"{package.parent}{os.pathsep}{self.environment['PYTHONPATH']}"

    def findings(
        self, *arguments: str, code: int | None = None, prefix: tuple[str, ...] = (), limit: Callable[[], None] | None = None
    ) -> Mapping[str, Mapping[str, Any]]:
        """Runs it; returns id -> finding."""
        command = [*prefix, self.python, "-m", "sft_play.doctor", "JSON=1", *arguments]
        process = subprocess.run(
            command,
            cwd=self.working,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            preexec_fn=limit,
        )
        assert process.stdout, process.stderr
        report = json.loads(process.stdout)
        assert process.returncode == (3 if report["counts"]["error"] else 0), process.stderr
        if code is not None:
            assert process.returncode == code, report
        for finding in report["findings"]:
            assert finding["severity"] in {"error", "warning", "note"}
            assert finding["text"]
            assert finding["remedy"]
        return {finding["id"]: finding for finding in report["findings"]}


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path)


def test_a_good_environment_has_no_errors(doctor: Doctor) -> None:
    found = doctor.findings(code=0)
    assert set(found) <= {"hub-unreachable", "port-29500", "memory-low", "shared-memory", "disk-low", "open-files"}


def test_hub_unreachable_and_offline(doctor: Doctor) -> None:
    assert "127.0.0.1:9" in doctor.findings()["hub-unreachable"]["text"]
    doctor.environment["HF_HUB_OFFLINE"] = "1"
    found = doctor.findings()
    assert "hub-offline" in found
    assert "hub-unreachable" not in found


def test_missing_packages(doctor: Doctor) -> None:
    venv.create(doctor.folder / "venv", with_pip=False)
    doctor.python = str(doctor.folder / "venv" / "bin" / "python")
    found = doctor.findings(code=3)
    assert "accelerate" in found["package-missing"]["text"]
    assert "make install" in found["package-missing"]["remedy"]


def test_other_version_than_the_pin(doctor: Doctor) -> None:
    info = doctor.folder / "stubs" / "accelerate-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 0.1.0\n")
    doctor.environment["PYTHONPATH"] = f"{info.parent}{os.pathsep}{ROOT}"
    assert "accelerate 0.1.0 (tested: " in doctor.findings(code=0)["package-version"]["text"]


@pytest.mark.parametrize("path", ["deepspeed/__init__.py", "datasets.py"])
def test_a_file_that_hides_a_library(doctor: Doctor, path: str) -> None:
    (doctor.working / path).parent.mkdir(exist_ok=True)
    (doctor.working / path).touch()
    assert path in doctor.findings(code=3)["shadowed-library"]["text"]


def test_no_compiler_and_no_ninja(doctor: Doctor) -> None:
    (doctor.bin / "c++").unlink()
    (doctor.bin / "ninja").unlink()
    venv.create(doctor.folder / "venv", with_pip=False)  # the test's own environment has a ninja beside its Python
    doctor.python = str(doctor.folder / "venv" / "bin" / "python")
    assert {"no-compiler", "no-ninja"} <= set(doctor.findings())


def test_broken_driver(doctor: Doctor) -> None:
    doctor.tool("nvidia-smi", 'echo "NVIDIA-SMI has failed because it could not communicate with the driver"; exit 9')
    assert "could not communicate" in doctor.findings(code=3)["driver-broken"]["text"]


@pytest.mark.parametrize(
    ("machine", "stub", "finding", "text"),
    [
        (MACHINES["h200"], {"cuda": None}, "torch-without-cuda", "without CUDA"),
        (
            replace(MACHINES["h200"], cuda=12040), {"cuda": "13.0", "fails": "The NVIDIA driver on your system is too old"},
            "driver-too-old", "13.0",
        ),
        (
            Machine(cards=(replace(RTX4090, capability=(6, 1)),)),
            {"cuda": "13.0", "fails": "CUDA error: no kernel image is available for execution on the device"},
            "torch-lacks-architecture", "",
        ),
        (MACHINES["h200"], {"cuda": None, "broken": "libcudart.so.13: cannot open shared object file"}, "torch-broken", "libcudart"),
    ],
)  # fmt: skip
def test_a_torch_that_cannot_use_the_card(
    doctor: Doctor, machine: Machine, stub: dict[str, Any], finding: str, text: str
) -> None:
    doctor.machine(machine)
    doctor.torch(architectures="sm_80 sm_90", **stub)
    found = doctor.findings(code=3)
    assert text in found[finding]["text"]
    assert len({"torch-without-cuda", "driver-too-old", "torch-lacks-architecture", "torch-broken"} & set(found)) == 1


def test_a_card_that_torch_cannot_use_for_another_reason(doctor: Doctor) -> None:
    doctor.machine(Machine(cards=(A100_SPLIT, A100_SPLIT)))
    doctor.torch(cuda="13.0", architectures="sm_80", fails="CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    text = doctor.findings(code=3)["gpu-unusable"]["text"]  # one slice is all that a process sees of cards that MIG splits
    assert text == (
        "torch 2.13.0 cannot use GPU 0 (NVIDIA A100-SXM4-80GB MIG 3g.40gb): "
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    )


def test_another_makers_gpu_is_named(doctor: Doctor) -> None:
    doctor.environment |= Machine(cards=(), system="Darwin").environment(doctor.folder / "machine")
    assert "Apple's GPUs (MPS) are not supported" in doctor.findings(code=0)["other-gpu"]["text"]


def test_visible_devices_that_are_not_here(doctor: Doctor) -> None:
    doctor.machine(MACHINES["rtx3090_pair"])
    doctor.torch(cuda="13.0", architectures="sm_86")
    doctor.environment["CUDA_VISIBLE_DEVICES"] = "0,5"
    assert "names 5," in doctor.findings(code=3)["gpus-refused"]["text"]
    doctor.environment["CUDA_VISIBLE_DEVICES"] = "GPU-1111"
    assert "gpus-refused" not in doctor.findings(code=0)
    doctor.environment["CUDA_VISIBLE_DEVICES"] = ""
    assert "gpus-hidden" in doctor.findings(code=0)


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        (MACHINES["mig_without_rights"], "none of its slices can be used here: Insufficient Permissions"),
        (Machine(cards=(RTX4090, replace(RTX4090, lost=True))), "GPU 1 of 2 does not answer: GPU is lost"),
        (Machine(cards=(RTX4090,), broken=MISMATCH), "the NVIDIA driver fails: RM has detected an NVML/RM version mismatch."),
    ],
)
def test_gpus_that_every_launch_refuses(doctor: Doctor, machine: Machine, text: str) -> None:
    doctor.machine(machine)
    assert text in doctor.findings(code=3)["gpus-refused"]["text"]


def test_mixed_cards(doctor: Doctor) -> None:
    doctor.machine(MACHINES["unlike_pair"])
    doctor.torch(cuda="13.0", architectures="sm_89")
    assert "mixed-gpus" in doctor.findings(code=0)


@pytest.mark.parametrize(("variable", "finding"), [("RUNS_DIR", "runs-folder"), ("SFT_PLAY_CACHE", "cache-folder")])
def test_folders_that_cannot_be_written(doctor: Doctor, variable: str, finding: str) -> None:
    blocker = doctor.folder / "file"
    blocker.touch()
    doctor.environment[variable] = str(blocker / "inside")
    assert variable in doctor.findings(code=3)[finding]["remedy"]


def test_a_taken_port(doctor: Doctor) -> None:
    with socket.socket() as listener:
        with contextlib.suppress(OSError):  # then somebody else has it, which is as good
            listener.bind(("127.0.0.1", 29500))
            listener.listen()
        assert "port-29500" in doctor.findings()


def test_stray_variables_and_accelerates_default_file(doctor: Doctor) -> None:
    doctor.environment |= {"PET_NNODES": "2", "RANK": "0"}
    default = Path(doctor.environment["HF_HOME"]) / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.touch()
    found = doctor.findings(code=0)
    assert "PET_NNODES, RANK" in found["stray-variables"]["text"] and "accelerate-default-config" in found


def test_a_lock_that_a_killed_build_left(doctor: Doctor) -> None:
    lock = doctor.folder / "extensions" / "py311_cpu" / "op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    doctor.environment["TORCH_EXTENSIONS_DIR"] = str(doctor.folder / "extensions")
    assert "stale-build-lock" not in doctor.findings()
    os.utime(lock, (0, 0))
    assert doctor.findings()["stale-build-lock"]["remedy"] == f"rm {lock}"


def test_few_open_files(doctor: Doctor) -> None:
    found = doctor.findings(limit=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)))
    assert "256 files" in found["open-files"]["text"]


def can_mount() -> bool:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    test = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m none /mnt"]
    return subprocess.run(test, capture_output=True, timeout=10, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs root and mount namespaces")
def test_full_disk_and_small_shared_memory(doctor: Doctor) -> None:
    (doctor.folder / "runs").mkdir()
    for tool in ("mount", "unshare"):
        (doctor.bin / tool).symlink_to(str(shutil.which(tool)))
    script = f'mount -t tmpfs -o size=100m none {doctor.folder}/runs && mount -t tmpfs -o size=64m none /dev/shm && exec "$@"'
    found = doctor.findings(code=3, prefix=(str(doctor.bin / "unshare"), "-m", str(doctor.bin / "sh"), "-c", script, "sh"))
    assert found["disk-low"]["severity"] == "error"
    assert "64 MiB" in found["shared-memory"]["text"]


def test_the_command_reads_a_configuration(doctor: Doctor) -> None:
    config = doctor.working / "gated.yaml"
    config.write_text("model:\n  name: meta-llama/Llama-3.1-8B-Instruct\ndata:\n  train_path: x.jsonl\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [doctor.python, "-m", "sft_play", "doctor", f"CONFIG={config}", *arguments]
        return subprocess.run(
            command, cwd=doctor.working, env=doctor.environment, capture_output=True, text=True, timeout=60, check=False
        )

    report = json.loads(run("JSON=1").stdout)
    (missing,) = [f for f in report["findings"] if f["id"] == "token-missing"]
    assert "https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct" in missing["remedy"]
    doctor.environment["HF_TOKEN"] = "hf_x"
    spoken = run()
    assert spoken.returncode == 0, spoken.stderr
    assert "token-missing" not in spoken.stdout
    assert "checks: 0 errors" in spoken.stdout


def test_every_finding_is_documented() -> None:
    sources = "".join((ROOT / "sft_play" / name).read_text(encoding="utf-8") for name in ("doctor.py", "plan/detect.py"))
    ids = set(re.findall(r'Finding\(\s*"([\w-]+)"', sources))
    ids |= {"runs-folder", "cache-folder", "port-29500"}
    documented = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert len(ids) >= 20 and [i for i in sorted(ids) if f"`{i}`" not in documented] == []
