"""Tests that run Debian programs: skipped by name where these are not installed, and never where `.ci/run` has installed them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.programs import ALL, REQUIRED, need

USERS = re.compile(r"^from tests\.(programs|lan|slurm_lab|browser) import", re.M)
RARE = {"nft", "ping", "faketime"}
"""Only tests that take minutes run them, or that need others first."""


@pytest.mark.long
@pytest.mark.slow
def test_without_the_programs_their_tests_are_skipped_by_name_and_none_fails(tmp_path: Path) -> None:
    for folder in os.environ["PATH"].split(os.pathsep):
        for program in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if program.name not in ALL and not (tmp_path / program.name).is_symlink():
                (tmp_path / program.name).symlink_to(program)
    files = [
        str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py")) if USERS.search(path.read_text())
    ]
    files.remove(str(Path(__file__).relative_to(ROOT)))
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST") and name != REQUIRED}
    said = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-m", "not long and not gpu", *files],
        env={**env, "PATH": str(tmp_path)}, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    ).stdout  # fmt: skip
    assert re.search(r"^\d+ passed, \d+ skipped", said, re.M), said[-3000:]
    named = {name for names in re.findall(r"not installed: (.+)", said) for name in names.split(", ")}
    assert named == set(ALL) - RARE


def test_where_all_was_installed_a_missing_program_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRED, "required")
    with pytest.raises(pytest.fail.Exception, match="not installed: no-such-program"):
        need("sh", "no-such-program")
    need("sh")
