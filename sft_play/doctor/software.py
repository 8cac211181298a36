"""Checks of Python, packages, compilers and the names that shadow them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import sft_play
from sft_play.doctor.finding import Check, Context, Finding

OLDEST_PYTHON = (3, 11)
ROOT = Path(sft_play.__file__).parent.parent
"""The repository, when the package is installed editable as `make install` does."""
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "datasets", "bitsandbytes", "omegaconf", "tensorboard")


def python_version(_: Context, version: tuple[int, int] = sys.version_info[:2]) -> Iterator[Finding]:
    """Python older than the package needs."""
    if version < OLDEST_PYTHON:
        yield Finding(
            id="python-version",
            severity="error",
            text=f"Python {version[0]}.{version[1]} runs; {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer is needed",
            remedy="make install PYTHON=python3.11",
        )


def packages(_: Context) -> Iterator[Finding]:
    """Packages that are missing, or differ from the versions that were tested together."""
    pins = pinned_versions()
    missing, different = [], []
    for name in required_packages():
        try:
            version = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if (pin := pins.get(canonical(name))) and version != pin:
            different.append(f"{name} {version} (tested: {pin})")
    if missing:
        text = f"not installed in {sys.prefix}: {', '.join(missing)}"
        yield Finding(id="package-missing", severity="error", text=text, remedy="make install")
    if different:
        text = f"other versions than the tested ones: {', '.join(different)}"
        remedy = "remove .venv and run make install, or expect differences"
        yield Finding(id="package-version", severity="warning", text=text, remedy=remedy)


def required_packages() -> list[str]:
    """Returns the names of the runtime dependencies."""
    project = ROOT / "pyproject.toml"
    if project.is_file():
        requirements = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        requirements = [r for r in importlib.metadata.requires("sft-play") or [] if "extra ==" not in r]
    return [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in requirements]


def pinned_versions() -> dict[str, str]:
    """Returns package -> version of constraints.txt; empty where the package is installed without it."""
    file = ROOT / "constraints.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return {canonical(line.split("==")[0]): line.split("==")[1].strip() for line in lines if "==" in line and line[0] != "#"}


def canonical(name: str) -> str:
    """Returns a package's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def shadowed_libraries(_: Context) -> Iterator[Finding]:
    """Files in the working folder that Python would import in place of a library."""
    for name in LIBRARIES:
        for candidate in (Path(f"{name}.py"), Path(name) / "__init__.py"):
            if candidate.is_file():
                yield Finding(
                    id="shadowed-library",
                    severity="error",
                    text=f"`{candidate}` in the working folder hides the library `{name}`",
                    remedy="rename it: Python looks in the working folder first",
                )


def compilers(_: Context) -> Iterator[Finding]:
    """Tools that DeepSpeed needs to compile its communication op and its CPU optimizer."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++")):
        yield Finding(
            id="no-compiler",
            severity="warning",
            text="no C++ compiler on the PATH; DeepSpeed compiles an extension when it first runs",
            remedy="apt-get install g++ (Debian, Ubuntu) or the like; all but train-deepspeed works without",
        )
    beside_python = Path(sys.executable).with_name("ninja")  # not on the PATH when the environment is not activated
    if not shutil.which("ninja") and not beside_python.is_file():
        yield Finding(
            id="no-ninja",
            severity="warning",
            text="`ninja` is missing; DeepSpeed needs it to compile its extension",
            remedy="make install, or pip install ninja",
        )


CHECKS: tuple[Check, ...] = (python_version, packages, shadowed_libraries, compilers)
