"""Each finding of `make doctor`, provoked by its condition: stub packages, fake tools, ports in use."""

from __future__ import annotations

import json
import os
import re
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

from tests.conftest import ROOT, run_program
from tests.launcher import can_mount
from tests.nvml_double import A100_SPLIT, MACHINES, RTX4090, Machine


class Doctor:
    """Runs the doctor in a small environment that a test can spoil."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in ("env", "sh", "cat"):
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
        """Put an executable on the PATH."""
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def torch(self, *, cuda: str | None, fails: str = "", broken: str = "") -> None:
        """Put another torch before the installed one; `fails` is its error for GPUs, `broken` that of its import."""
        package = self.folder / "stubs" / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(
            textwrap.dedent(f"""
                from types import SimpleNamespace as N
                if {broken!r}:
                    raise OSError({broken!r})
                __version__ = "2.13.0"
                version = N(cuda={cuda!r})
                _C = N(_cuda_getArchFlags=lambda: "sm_80 sm_86 sm_89 sm_90")
                def ones(size, device):
                    if {fails!r}:
                        raise RuntimeError({fails!r})
                    return N(item=lambda: 1.0)
            """)
        )
        self.environment["PYTHONPATH"] = f"{package.parent}{os.pathsep}{self.environment['PYTHONPATH']}"

    def findings(self, prefix: tuple[str, ...] = ()) -> Mapping[str, Mapping[str, Any]]:
        """Run it; return id -> finding."""
        process = subprocess.run(
            [*prefix, self.python, "-m", "sft_play.doctor", "JSON=1"],
            cwd=self.working,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert process.stdout, process.stderr
        findings = {finding["id"]: finding for finding in json.loads(process.stdout)["findings"]}
        severities = {finding["severity"] for finding in findings.values()}
        assert severities <= {"error", "warning", "note"} and process.returncode == 3 * ("error" in severities), (
            process.stderr
        )
        assert all(finding["text"] and finding["remedy"] for finding in findings.values())
        return findings


Spoil = Callable[[Doctor], object]


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path)


@pytest.mark.pinned
def test_a_good_environment_has_no_errors(doctor: Doctor) -> None:
    assert set(doctor.findings()) <= {
        "hub-unreachable",
        "port-29500",
        "shared-memory",
        "disk-low",
    }


def test_an_unreachable_hub_and_offline_mode_are_reported(doctor: Doctor) -> None:
    assert "127.0.0.1:9" in doctor.findings()["hub-unreachable"]["text"]
    doctor.environment["HF_HUB_OFFLINE"] = "1"
    findings = doctor.findings()
    assert "hub-offline" in findings
    assert "hub-unreachable" not in findings


def test_missing_packages_compiler_and_ninja_are_reported(doctor: Doctor) -> None:
    (doctor.bin / "c++").unlink()
    (doctor.bin / "ninja").unlink()
    venv.create(doctor.folder / "venv", with_pip=False)  # the test's own environment has a ninja next to its Python
    doctor.python = str(doctor.folder / "venv" / "bin" / "python")
    findings = doctor.findings()
    assert (
        "accelerate" in findings["package-missing"]["text"] and "make install" in findings["package-missing"]["remedy"]
    )
    assert {"no-compiler", "no-ninja"} <= set(findings)


def another_version(doctor: Doctor) -> None:
    info = doctor.folder / "stubs" / "accelerate-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 0.1.0\n")
    doctor.environment["PYTHONPATH"] = f"{info.parent}{os.pathsep}{ROOT}"


def another_library(doctor: Doctor) -> None:
    (doctor.folder / "stubs").mkdir()
    (doctor.folder / "stubs" / "datasets.py").touch()
    doctor.environment["PYTHONPATH"] += f"{os.pathsep}{doctor.folder / 'stubs'}"


def blocked(variable: str) -> Spoil:
    """Put a folder below a file."""
    return lambda doctor: doctor.environment.update({variable: str(doctor.bin / "sh" / "inside")})


def gpus(machine: Machine, **torch: Any) -> Spoil:
    """Move to a machine, with another torch if `torch` describes one."""

    def spoil(doctor: Doctor) -> None:
        doctor.environment |= machine.environment(doctor.folder / "machine")
        if torch:
            doctor.torch(**torch)

    return spoil


NO_IMAGE = "CUDA error: no kernel image is available for execution on the device"
BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
FINDINGS: dict[str, tuple[Spoil, str, str, str]] = {
    "another version": (another_version, "warning", "package-version", "accelerate 0.1.0 (tested: "),
    "hidden library": (
        another_library, "error", "shadowed-library", "stubs/datasets.py` is imported instead"
    ),
    "driver": (
        lambda doctor: doctor.tool(
            "nvidia-smi", 'echo "NVIDIA-SMI has failed because it could not communicate with the driver"; exit 9'
        ),
        "error", "driver-broken", "could not communicate",
    ),
    "runs": (blocked("RUNS_DIR"), "error", "runs-folder", ""),
    "cache": (blocked("SFT_PLAY_CACHE"), "error", "cache-folder", ""),
    "CPU build": (gpus(MACHINES["h200"], cuda=None), "error", "torch-without-cuda", "without CUDA"),
    "old driver": (
        gpus(replace(MACHINES["h200"], cuda=12040), cuda="13.0", fails="The NVIDIA driver on your system is too old"),
        "error", "driver-too-old", "13.0",
    ),
    "old card": (
        gpus(Machine(cards=(replace(RTX4090, capability=(6, 1)),)), cuda="13.0", fails=NO_IMAGE), "error",
        "torch-lacks-architecture", "",
    ),
    "broken torch": (
        gpus(MACHINES["h200"], cuda=None, broken="libcudart.so.13: cannot open shared object file"), "error",
        "torch-broken", "libcudart",
    ),
    "busy slice": (  # one slice is all that a process sees of cards that MIG splits
        gpus(Machine(cards=(A100_SPLIT, A100_SPLIT)), cuda="13.0", fails=BUSY),
        "error", "gpu-unusable", f"torch 2.13.0 cannot use GPU 0 (NVIDIA A100-SXM4-80GB MIG 3g.40gb): {BUSY}",
    ),
    "lost card": (
        gpus(Machine(cards=(RTX4090, replace(RTX4090, lost=True)))), "error", "gpus-refused",
        "GPU 1 of 2 does not answer: GPU is lost",
    ),
    "another maker": (
        gpus(Machine(cards=(), system="Darwin")), "warning", "other-gpu", "Apple's GPUs (MPS) are not supported"
    ),
}  # fmt: skip
TORCH = {"torch-without-cuda", "driver-too-old", "torch-lacks-architecture", "torch-broken", "gpu-unusable"}


@pytest.mark.parametrize("name", FINDINGS)
def test_each_condition_is_its_finding(name: str, doctor: Doctor) -> None:
    spoil, severity, finding, text = FINDINGS[name]
    spoil(doctor)
    findings = doctor.findings()
    assert text in findings[finding]["text"] and findings[finding]["severity"] == severity, findings
    assert TORCH & set(findings) == TORCH & {finding}, "one cause is one finding"


def test_unknown_visible_devices_are_reported(doctor: Doctor) -> None:
    gpus(MACHINES["rtx3090_pair"], cuda="13.0")(doctor)
    doctor.environment["CUDA_VISIBLE_DEVICES"] = "0,5"
    assert "names 5," in doctor.findings()["gpus-refused"]["text"]
    doctor.environment["CUDA_VISIBLE_DEVICES"] = "GPU-1111"
    assert "gpus-refused" not in doctor.findings()
    doctor.environment["CUDA_VISIBLE_DEVICES"] = ""
    assert "gpus-hidden" in doctor.findings()


def test_a_port_in_use_is_reported(doctor: Doctor) -> None:
    with socket.socket() as listener:
        while True:
            try:
                listener.bind(("127.0.0.1", 29500))
            except OSError:  # somebody else has it, which is as good as long as it lasts
                if "port-29500" in doctor.findings():
                    return
            else:
                break
        listener.listen()
        assert "port-29500" in doctor.findings()


def test_stray_variables_and_accelerates_default_file_are_reported(doctor: Doctor) -> None:
    doctor.environment |= {"PET_NNODES": "2", "RANK": "0"}
    default = Path(doctor.environment["HF_HOME"]) / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.touch()
    findings = doctor.findings()
    assert "PET_NNODES, RANK" in findings["stray-variables"]["text"] and "accelerate-default-config" in findings


@pytest.mark.skipif(not can_mount(), reason="needs root and mount namespaces")
def test_a_full_disk_and_small_shared_memory_are_reported(doctor: Doctor) -> None:
    (doctor.folder / "runs").mkdir()
    for tool in ("mount", "unshare"):
        (doctor.bin / tool).symlink_to(str(shutil.which(tool)))
    script = (
        f"mount -t tmpfs -o size=100m none {doctor.folder}/runs && mount -t tmpfs -o size=64m none /dev/shm && exec"
        ' "$@"'
    )
    findings = doctor.findings(prefix=(str(doctor.bin / "unshare"), "-m", str(doctor.bin / "sh"), "-c", script, "sh"))
    assert findings["disk-low"]["severity"] == "error"
    assert "64 MiB" in findings["shared-memory"]["text"]


def test_the_command_reads_a_configuration(doctor: Doctor) -> None:
    config = doctor.working / "gated.yaml"
    config.write_text("model:\n  name: meta-llama/Llama-3.1-8B-Instruct\ndata:\n  train_path: x.jsonl\n")

    words = ["doctor", f"CONFIG={config}"]
    report = run_program([*words, "JSON=1"], doctor.environment, cwd=doctor.working).json
    (missing,) = [f for f in report["findings"] if f["id"] == "token-missing"]
    assert "https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct" in missing["remedy"]
    doctor.environment["HF_TOKEN"] = "hf_x"
    spoken = run_program(words, doctor.environment, cwd=doctor.working)
    assert spoken.code == 0, spoken.err
    assert "token-missing" not in spoken.out and "checks: 0 errors" in spoken.out


def test_every_finding_is_documented() -> None:
    sources = "".join(
        (ROOT / "sft_play" / name).read_text(encoding="utf-8") for name in ("doctor.py", "plan/detect.py")
    )
    ids = set(re.findall(r'Finding\(\s*"([\w-]+)"', sources))
    ids |= {"runs-folder", "cache-folder", "port-29500"}
    documented = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert len(ids) >= 20 and [i for i in sorted(ids) if f"`{i}`" not in documented] == []
