"""Fixtures of tests on a real card."""

from __future__ import annotations

import pytest

from sft_play.plan.detect import detect


@pytest.fixture
def two_gpus() -> None:
    if len(detect().devices) < 2:
        pytest.skip("needs two GPUs")
