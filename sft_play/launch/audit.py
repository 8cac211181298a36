"""`make audit`: whether every dependency is pinned, and which pinned versions have known holes, asked through `pip-audit`.

What cannot be asked is said, and the command fails: silence must never read as safety.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sft_play.config.call import Call
from sft_play.errors import HardwareError

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.!+_-]+)")
NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")
EXACT = re.compile(r"\s*[A-Za-z0-9._-]+(?:\[[^\]]*\])?\s*==\s*([A-Za-z0-9.!+_-]+)\s*")
WITH_PYTHON = frozenset({"pip", "setuptools", "wheel"})
"""They come with the virtual environment."""
SECONDS = 900
WAIT_SECONDS = 15
"""For each answer of the service."""
SERVICES = {"pypi": "the package index's own advisories", "osv": "the open vulnerability database"}
"""Option of `pip-audit` -> what it asks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Direct:
    """A package that `pyproject.toml` names."""

    name: str
    group: str
    """`dependencies`, or the name of an optional group."""
    pinned: str | None
    """By `constraints.txt`, or exactly by `pyproject.toml`."""
    installed: str | None

    @property
    def problem(self) -> str | None:
        """What is wrong, in words."""
        if self.pinned is None:
            return "is not pinned in constraints.txt"
        if self.installed is not None and self.installed.partition("+")[0] != self.pinned.partition("+")[0]:
            return f"is pinned to {self.pinned}, and {self.installed} is installed"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Hole:
    """A known hole of a pinned version."""

    package: str
    version: str
    id: str
    fixed: str
    """Versions without it, or nothing."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What came of asking for holes."""

    service: str | None = None
    """Who answered."""
    packages: int = 0
    """That an answer came for."""
    holes: tuple[Hole, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict)
    """Package -> why nothing is known of it."""
    failure: str | None = None
    """Why nobody could be asked at all."""


def main(call: Call) -> int:
    """Prints both tables; returns 3 when a package is not pinned, has a hole, or could not be asked for."""
    pins, problems = read_pins(ROOT / "constraints.txt")
    direct = list(direct_dependencies(ROOT / "pyproject.toml", pins))
    problems += [f"`{one.name}` ({one.group}) {one.problem}" for one in direct if one.problem]
    problems += [
        f"`{name}` (needed by {by}) is installed and not pinned in constraints.txt" for name, by in unpinned(direct, pins)
    ]
    asked = ask(ROOT / "constraints.txt", pins)
    clean = not problems and not asked.holes and not asked.silent and asked.failure is None
    if call.json:
        facts = {"clean": clean, "pins": len(pins), "direct": [asdict(one) | {"problem": one.problem} for one in direct]}
        print(json.dumps(facts | {"problems": problems, "asked": asdict(asked)}, indent=2))
    else:
        show(pins, direct, problems, asked)
    return 0 if clean else 3


def canonical(name: str) -> str:
    """Returns a package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(path: Path) -> tuple[dict[str, str], list[str]]:
    """Returns canonical name -> version, and what is wrong with lines of `constraints.txt`. Raises `HardwareError` without it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        hint = "run it in a checkout of SFT-Play: an installed package has no pins of its own"
        raise HardwareError(f"cannot be read: {error.strerror}", place=str(path), hint=hint) from None
    pins: dict[str, str] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].partition(";")[0].strip()
        if not text:
            continue
        found = PIN.fullmatch(text)
        if not found:
            problems.append(f"constraints.txt:{number}: `{text}` pins no version; expected `name==version`")
        elif canonical(found[1]) in pins:
            problems.append(f"constraints.txt:{number}: `{found[1]}` is there twice")
        else:
            pins[canonical(found[1])] = found[2]
    return pins, problems


def direct_dependencies(path: Path, pins: Mapping[str, str]) -> Iterator[Direct]:
    """Yields the packages of `pyproject.toml` with their pins and what is installed."""
    project: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    groups = {"dependencies": project["dependencies"], **project.get("optional-dependencies", {})}
    for group, requirements in groups.items():
        for requirement in requirements:
            named, exact = NAME.match(requirement), EXACT.fullmatch(requirement)
            assert named, f"{path} holds {requirement}"
            name = canonical(named[1])
            yield Direct(
                name=name, group=group, pinned=exact[1] if exact else pins.get(name), installed=_installed(name)
            )  # fmt: skip


def unpinned(direct: Iterable[Direct], pins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields each installed package without a pin that one of `direct` needs, through however many others, and what needs it."""
    waiting = [(one.name, "pyproject.toml") for one in direct if one.installed is not None]
    seen = {name for name, _ in waiting}
    while waiting:
        name, by = waiting.pop()
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another system or an extra that was not asked for
        if name not in pins and name not in WITH_PYTHON and by != "pyproject.toml":
            yield name, by
        for requirement in needed:
            found = NAME.match(requirement)
            other = canonical(found[1]) if found and not _is_extra(requirement) else name
            if other not in seen:
                seen.add(other)
                waiting.append((other, name))


def _is_extra(requirement: str) -> bool:
    """Whether a requirement belongs to an extra of its package, which nobody may have asked for."""
    return re.search(r"\bextra\s*==", requirement.partition(";")[2]) is not None


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def ask(constraints: Path, pins: Mapping[str, str]) -> Asked:
    """Asks for the holes of every pin, of each service until one answers. Never raises: what went wrong is in the result."""
    if importlib.util.find_spec("pip_audit") is None:
        return Asked(failure="`pip-audit` is not installed: `make audit` installs it, or `pip install 'sft-play[audit]'`")
    failures = []
    for option, name in SERVICES.items():
        asked = _ask_one(constraints, pins, option)
        if asked.packages:
            return asked
        # pip-audit itself ends with 0 and "no known vulnerabilities" where the service knew none of the packages.
        why = asked.failure or next(iter(asked.silent.values()), "it was asked about nothing")
        failures.append(f"{name}: {why}")
    return Asked(failure="; ".join(failures))


def _ask_one(constraints: Path, pins: Mapping[str, str], service: str) -> Asked:
    words = [
        sys.executable, "-m", "pip_audit", "--requirement", str(constraints), "--no-deps", "--disable-pip", "--format", "json",
        "--desc", "on", "--progress-spinner", "off", "--timeout", str(WAIT_SECONDS), "--vulnerability-service", service,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            words, env=environment(os.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Asked(failure=f"`pip-audit` did not come to an end: {error}")
    try:
        found = json.loads(done.stdout)["dependencies"]
        asked = read_answer(found)
    except (ValueError, KeyError, TypeError):
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return Asked(failure=said[-1].strip()[:300] if said else f"`pip-audit` ended with code {done.returncode}")
    named = {canonical(entry["name"]) for entry in found}
    unnamed = {name: "pip-audit says nothing about it" for name in pins if name not in named}
    return Asked(service=SERVICES[service], packages=asked.packages, holes=asked.holes, silent={**asked.silent, **unnamed})


def read_answer(entries: list[dict[str, Any]]) -> Asked:
    """Returns what `pip-audit --format json` says in `dependencies`."""
    silent = {entry["name"]: str(entry["skip_reason"]) for entry in entries if "skip_reason" in entry}
    holes = [
        Hole(
            package=entry["name"], version=entry["version"], id=" ".join([hole["id"], *hole.get("aliases", [])]),
            fixed=" ".join(hole.get("fix_versions", [])), text=" ".join(str(hole.get("description", "")).split()),
        )
        for entry in entries
        for hole in entry.get("vulns", [])
    ]  # fmt: skip
    return Asked(packages=len(entries) - len(silent), holes=tuple(holes), silent=silent)


def environment(ambient: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for `pip-audit`, which does not read pip's own: certificates and proxy as pip has them."""
    kept = {name: value for name, value in ambient.items() if name not in ("MAKEFLAGS", "MFLAGS", "PYTHONWARNINGS")}
    for name, setting in (("REQUESTS_CA_BUNDLE", "cert"), ("HTTPS_PROXY", "proxy")):
        value = ambient.get(f"PIP_{setting.upper()}") or _pip_setting(setting)
        if value and name not in ambient and name.lower() not in ambient:
            kept[name] = value
    return kept


def _pip_setting(name: str) -> str | None:
    """Returns a global setting of pip's files, the user's before the machine's."""
    for path in (Path.home() / ".config" / "pip" / "pip.conf", Path.home() / ".pip" / "pip.conf", Path("/etc/pip.conf")):
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        if value := parser.get("global", name, fallback=None):
            return value
    return None


def show(pins: Mapping[str, str], direct: list[Direct], problems: list[str], asked: Asked) -> None:
    """Prints what was found, the worst last, where it is seen."""
    named = {one.name for one in direct}
    print(f"pins: {len(pins)} in constraints.txt; {len(named)} packages are used directly")
    for problem in problems:
        print(f"  {problem}")
    if asked.failure:
        print(f"known holes: could not be asked for. {asked.failure}")
        return
    for name, why in asked.silent.items():
        print(f"  {name}: not asked: {why}")
    print(f"known holes: {len(asked.holes)} in the {asked.packages} packages that {asked.service} answered for")
    rows = [
        ("package", "version", "hole", "fixed in"),
        *((h.package, h.version, h.id, h.fixed or "no version yet") for h in asked.holes),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for index, row in enumerate(rows if asked.holes else []):
        print("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        if index:
            print(f"    {asked.holes[index - 1].text[:160]}")
