"""Tests that run Debian programs: skipped by name where these are not installed, and never where `.ci/run` has installed them."""

from __future__ import annotations

import pytest

from tests.programs import REQUIRED, need


def test_where_all_was_installed_a_missing_program_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRED, "required")
    with pytest.raises(pytest.fail.Exception, match="not installed: no-such-program"):
        need("sh", "no-such-program")
    need("sh")
