"""`make doctor`: what in this environment will or may go wrong, each finding with its id, severity and remedy.

Every check stands alone and needs nothing but the standard library, so that the doctor also works where packages are missing.
`docs/doctor.md` lists the findings.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import socket
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import sft_play
from sft_play.doctor import machine
from sft_play.errors import HUB_LOGIN
from sft_play.runs.folder import is_offline
from sft_play.text import Finding, finding_lines, plural

if TYPE_CHECKING:
    from sft_play.config.call import Call

SEVERITIES = ("error", "warning", "note")
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
OLDEST_PYTHON = (3, 11)
ROOT = Path(sft_play.__file__).parent.parent
"""The repository, when the package is installed editable as `make install` does."""
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "datasets", "bitsandbytes", "omegaconf", "tensorboard")


def main(call: Call) -> int:
    """Run every check; return 3 when one found an error, else 0."""
    model = call.load_config().config.model.name if "CONFIG" in call.options else None
    return report(model, as_json=call.json)


def report(model: str | None = None, *, as_json: bool) -> int:
    """Print the findings, errors first; return the exit code. `model`: the configuration's, where one was given."""
    checks: list[Callable[[], Iterable[Finding]]] = [*SOFTWARE_CHECKS, *machine.CHECKS, ports, hub, partial(token, model)]
    findings = sorted((finding for check in checks for finding in check()), key=lambda one: SEVERITIES.index(one.severity))
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    if as_json:
        print(
            json.dumps({"checks": len(checks), "counts": counts, "findings": [asdict(finding) for finding in findings]}, indent=2)
        )
    else:
        for line in finding_lines(findings):
            print(line)
        print(f"{len(checks)} checks: {', '.join(plural(count, severity) for severity, count in counts.items())}")
    sys.stdout.flush()
    return 3 if counts["error"] else 0


# Python, packages and compilers, and the names that shadow them.


def python_version(version: tuple[int, int] = sys.version_info[:2]) -> Iterator[Finding]:
    """Python older than the package needs."""
    if version < OLDEST_PYTHON:
        yield Finding(
            id="python-version",
            severity="error",
            text=f"Python {version[0]}.{version[1]} runs; {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer is needed",
            remedy="make install PYTHON=python3.11",
        )


def packages() -> Iterator[Finding]:
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


def shadowed_libraries() -> Iterator[Finding]:
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


def compilers() -> Iterator[Finding]:
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


SOFTWARE_CHECKS = (python_version, packages, shadowed_libraries, compilers)


# Ports, the hub, gated models.


def ports() -> Iterator[Finding]:
    """Ports that another process has."""
    for port, (finding_id, use, remedy) in PORTS.items():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                text = f"port {port} is taken ({use})"
                yield Finding(id=finding_id, severity="note", text=text, remedy=remedy)


def hub() -> Iterator[Finding]:
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


def token(name: str | None) -> Iterator[Finding]:
    """A gated model without a token."""
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
