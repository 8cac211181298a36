"""`make soak` as a user starts it: real kills, and a training that comes out as if there had been none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Done, environment, run_program


def soak(cache: Path, runs: Path, *words: str) -> Done:
    return run_program(["soak", *words], environment(cache, runs, {"OMP_NUM_THREADS": "1"}), timeout=700)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "fsdp2"])
def test_a_soak_in_two_chunks(strategy: str, cache: Path, tmp_path: Path) -> None:
    words = (f"STRATEGY={strategy}", "SEED=5", "TRAIN_MAX_STEPS=20")
    for chunk in (1, 2):
        done = soak(cache, tmp_path, *words, "KILLS=3", "JSON=1")
        assert done.code == 0, done.err
        found = done.json
        assert found["problems"] == [] and found["unequal"] == [], done.err
        assert found["kills"] == sum(found["by_phase"].values()) == sum(found["by_target"].values()) == 3 * chunk
        assert found["runs"] == found["equal"] >= chunk
        assert found["steps_lost"]["max"] <= 5, "the save interval"
    assert not list((tmp_path / f"soak-{strategy}" / "runs").glob("disturbed-*")), "runs that are equal are not kept"

    # Another chunk must be of the same soak; one without kills shows the table of all that came before.
    other = soak(cache, tmp_path, *words, "SEED=6")
    assert other.code == 2 and "`seed` was `5` and is `6`" in other.err
    table = tmp_path / "table.md"
    shown = soak(cache, tmp_path, *words, "KILLS=0", f"OUT={table}")
    assert "6 kills" in shown.out and "to the bit" in shown.out and table.read_text() == shown.out, shown.err
