"""What tests with real processes share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import environment
from tests.training_runs import Trained, train_once


@pytest.fixture(scope="module")
def variables(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of commands that write runs into one folder per module."""
    return environment(cache, tmp_path_factory.mktemp("runs"), {"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="session")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Run of `tiny`, whose head is its embedding: one tensor, which a sharding engine may save twice, once or not at
    all.
    """
    return train_once(tmp_path_factory.mktemp("trained"), tiny)
