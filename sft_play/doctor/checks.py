"""Checks of Python, packages, compilers, ports, the hub and gated models."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import socket
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import sft_play
from sft_play.errors import HUB_LOGIN
from sft_play.plan.hub import is_offline

# What a check is given and what it returns.


Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that a user should know or mend."""

    id: str
    """Stable name, listed in `docs/doctor.md`."""
    severity: Severity
    """`error`: a run cannot work; `warning`: some runs will fail or be slow; `note`: worth knowing."""
    text: str
    remedy: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What the user asked about."""

    model_name: str | None
    """The configuration's model, when `CONFIG` was given."""


Check = Callable[[Context], Iterable[Finding]]


HUB_SECONDS = 4.0
GATED = ("meta-llama/", "google/gemma", "mistralai/", "black-forest-labs/")
"""Owners and names on the hub whose models ask for a licence to be accepted."""
PORTS = {
    29500: (
        "port-29500",
        "multi-node runs meet there",
        "one machine takes a free port by itself; several nodes: MASTER_PORT=29501",
    ),
    6006: ("port-6006", "TensorBoard's usual port", "nothing to do: the next free port is taken; or set TENSORBOARD_PORT"),
}


def ports(_: Context) -> Iterator[Finding]:
    """Ports that another process has."""
    for port, (finding_id, use, remedy) in PORTS.items():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                text = f"port {port} is taken ({use})"
                yield Finding(id=finding_id, severity="note", text=text, remedy=remedy)


def hub(_: Context) -> Iterator[Finding]:
    """Whether models and data can be downloaded."""
    if is_offline():
        text = "HF_HUB_OFFLINE is set: only models and data on this machine are used"
        yield Finding(id="hub-offline", severity="note", text=text, remedy="unset HF_HUB_OFFLINE to download")
        return
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        with urllib.request.urlopen(endpoint, timeout=HUB_SECONDS):
            return
    except urllib.error.HTTPError:
        return  # it answers
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        yield Finding(
            id="hub-unreachable",
            severity="warning",
            text=f"{endpoint} cannot be reached: {reason}",
            remedy="check the network and HTTPS_PROXY; local folders work, and so does the quickstart if pip reaches its index",
        )


def token(context: Context) -> Iterator[Finding]:
    """A gated model without a token."""
    name = context.model_name
    if not name or not name.startswith(GATED) or Path(name).exists():
        return
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    file = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    if not os.environ.get("HF_TOKEN") and not file.is_file():
        yield Finding(
            id="token-missing",
            severity="warning",
            text=f"`{name}` is gated, and no hub token is set",
            remedy=f"accept the licence on https://huggingface.co/{name}, then set HF_TOKEN or run {HUB_LOGIN}",
        )


NETWORK_CHECKS: tuple[Check, ...] = (ports, hub, token)


# Checks of Python, packages, compilers and the names that shadow them.


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


SOFTWARE_CHECKS: tuple[Check, ...] = (python_version, packages, shadowed_libraries, compilers)
