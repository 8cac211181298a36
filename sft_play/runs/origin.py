"""Where a run came from: git state, the source of this program, package versions, machine."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sft_play import __version__
from sft_play.files import file_sha256, text_sha256

OPTIONAL = ("flash-attn", "liger-kernel", "unsloth", "unsloth-zoo")
"""Packages that our installations do not include; a plan made on a machine that has them applies to all machines."""
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "deepspeed",
    "bitsandbytes",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
    *OPTIONAL,
)
"""Packages whose version affects results or communication: the same on every machine of a run, and recorded in its
stamp.
"""
UNSLOTH_HINT = (
    "`make install-unsloth` in a clone installs it into a separate environment (without a clone: `docs/models.md`);"
    " `tuning.backend: bnb` needs none"
)
SOURCES = frozenset({".py", ".json", ".yaml", ".txt", ".jinja"})
GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false")
"""A repository can name a program that git starts as a file monitor; this prevents it."""
GIT_SECONDS = 20


def has_unsloth() -> bool:
    """Return whether Unsloth is installed in this environment, ignoring a folder of that name in the working folder."""
    return any(importlib.metadata.distributions(name="unsloth"))


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Return `commit` and `dirty` of the repository around `folder` (default: the working folder), and `diff_sha256` if
    dirty.

    `diff_sha256` is the hash of `git diff HEAD`, or `None` if that failed or took too long. Remote URLs, which may
    contain a password, are not read. Return `None` without git, a repository or a commit.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    words = ("diff", "--ignore-submodules=dirty", "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "HEAD")
    diff = _git(folder, *words)
    state: dict[str, Any] = {"commit": commit.decode("ascii", "replace").strip(), "dirty": diff is None or bool(diff)}
    if state["dirty"]:
        state["diff_sha256"] = hashlib.sha256(diff).hexdigest() if diff is not None else None
    return state


def _git(folder: Path | None, *words: str) -> bytes | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            [*GIT, *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout if done.returncode == 0 else None


@functools.cache
def code_sha256() -> str:
    """Return a sha256 over names and contents of this package's source files."""
    package = Path(__file__).resolve().parent.parent
    files = sorted(
        path
        for path in package.rglob("*")
        if path.suffix in SOURCES and path.is_file() and package / "shipped" not in path.parents
    )
    return text_sha256("\n".join(f"{path.relative_to(package).as_posix()} {file_sha256(path)}" for path in files))


@functools.cache
def versions() -> Mapping[str, str]:
    """Return the versions of Python, of this program, and of the packages that affect results."""
    installed = {"python": platform.python_version(), "sft_play": __version__}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = "not installed"
    return installed


def machine(devices: list[str], *, cuda: bool) -> dict[str, Any]:
    """Return operating system, processor, the plan's `devices`, and for GPUs the versions of the driver and torch's
    CUDA.
    """
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "devices": devices,
    }
    return facts | ({"driver": driver_version(), "cuda": torch_cuda()} if cuda else {})


@functools.cache
def processor() -> str:
    """Return the processor's name."""
    try:
        model_name = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"), re.M
        )
    except OSError:
        model_name = None
    return model_name.group(1).strip() if model_name else platform.processor() or platform.machine() or "CPU"


@functools.cache
def driver_version() -> str | None:
    """Return the NVIDIA driver's version, or `None`."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            driver = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # noqa: BLE001 - NVML raises many types, and a missing version must not end a run
        return None
    return driver.decode() if isinstance(driver, bytes) else str(driver)


def torch_cuda() -> str | None:
    """Return the CUDA version that torch is built for."""
    versions = torch_version()
    return versions[1] if versions else None


@functools.cache
def torch_version() -> tuple[str, str | None] | None:
    """Return torch's version and its CUDA version, read from `version.py` without importing torch."""
    try:
        spec = importlib.util.find_spec("torch")
        text = (
            (Path(str(spec.origin)).parent / "version.py").read_text(encoding="utf-8") if spec and spec.origin else ""
        )
    except (OSError, ValueError, ImportError):
        return None
    constants = {
        name: re.search(rf"^{name}(?:: [^=]+)? = ['\"]([^'\"]+)['\"]", text, re.M) for name in ("__version__", "cuda")
    }
    version, cuda = constants["__version__"], constants["cuda"]
    return (version[1], cuda[1] if cuda else None) if version else None
