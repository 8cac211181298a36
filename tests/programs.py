"""Debian programs that some tests run, and the skip of these tests if one is missing."""

from __future__ import annotations

import os
import shutil

import pytest

REQUIRED = "SFT_PLAY_TEST_PROGRAMS"
"""Set to `required` by `.ci/run`, which installs them: then no test may be skipped for lack of one."""
SLURM = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
HOSTS = ("ip", "tc", "ssh", "ssh-keygen", "sshd", "rsync")
ALL = (*SLURM, *HOSTS, "nft", "ping", "faketime", "shellcheck", "chromium")
"""What `scripts/install-test-systems.sh` installs."""


def need(*programs: str) -> None:
    """Skip the test that asks for `programs`, with the names of those that are not on `PATH`."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        unavailable(f"not installed: {', '.join(missing)}")


def unavailable(reason: str) -> None:
    """Skip the test, or fail it if all programs are required."""
    (pytest.fail if os.environ.get(REQUIRED) == "required" else pytest.skip)(reason)
