"""A plan's traced memory against two real steps on a GPU: allocated within 2 %, with reserve and context within 5 % or
100 MiB.
"""

from __future__ import annotations

import pytest

from benchmarks.memory import CASES, compare, measure

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
def test_the_planned_peak_is_the_measured_one(name: str) -> None:
    cells, within = compare(measure(CASES[name]), on_gpu=True)
    assert within, cells
