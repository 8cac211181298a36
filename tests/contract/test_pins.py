"""All that is installed is pinned in `constraints.txt`; a missing program is named with what to do."""

from __future__ import annotations

import importlib.metadata
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.documents import ROOT
from tests.programs import REQUIRED, need

WITH_PYTHON = {"pip", "setuptools", "wheel"}
"""They come with the virtual environment."""


def pinned() -> list[Requirement]:
    """Return the lines of `constraints.txt`."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(text) for line in lines if (text := line.partition("#")[0].strip())]


def test_every_line_pins_one_version_and_no_package_twice() -> None:
    requirements = pinned()
    assert all([requirement.operator for requirement in line.specifier] == ["=="] for line in requirements)
    assert len({canonicalize_name(requirement.name) for requirement in requirements}) == len(requirements) > 100


@pytest.mark.pinned
def test_all_dependencies_are_pinned_and_installed_in_that_version() -> None:
    pins = {canonicalize_name(pin.name): pin for pin in pinned()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    waiting = [(Requirement(text), {""}) for group in groups for text in group]
    loose = {
        pin.name for pin, _ in waiting if canonicalize_name(pin.name) not in pins and "==" not in str(pin.specifier)
    }
    assert loose == set(), "named in pyproject.toml"
    seen = set()
    while waiting:
        requirement, extras = waiting.pop()
        name = canonicalize_name(requirement.name)
        applies = not requirement.marker or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        if not applies or (name, *requirement.extras) in seen or name in WITH_PYTHON:
            continue
        seen.add((name, *requirement.extras))
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of a group that is not installed here
        assert name in pins or "==" in str(requirement.specifier), f"{name} is installed and not pinned"
        assert name not in pins or pins[name].specifier.contains(version.partition("+")[0]), (
            f"{name} {version} is not the pinned one"
        )
        waiting += [(Requirement(text), {"", *requirement.extras}) for text in importlib.metadata.requires(name) or []]


def test_a_missing_program_is_a_failure_if_all_were_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRED, "required")
    with pytest.raises(pytest.fail.Exception, match="not installed: no-such-program"):
        need("sh", "no-such-program")
    need("sh")
