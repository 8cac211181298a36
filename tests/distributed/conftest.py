"""What tests with real processes share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import environment


@pytest.fixture(scope="module")
def variables(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of commands that write their runs into one folder for each module."""
    return environment(cache, tmp_path_factory.mktemp("runs"), {"OMP_NUM_THREADS": "1"})
