"""`make soak` as a user starts it: real kills, and a training that comes out as if there had been none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Done, environment, run_program


def soak(cache: Path, runs: Path, *words: str) -> Done:
    return run_program(["soak", *words], environment(cache, runs, {"OMP_NUM_THREADS": "1"}), timeout=700)


@pytest.mark.long
def test_a_short_soak(cache: Path, tmp_path: Path) -> None:
    words = ("STRATEGY=single", "TRAIN_MAX_STEPS=20")
    done = soak(cache, tmp_path, *words, "KILLS=2", "SEED=5", "JSON=1")
    assert done.code == 0, done.err
    found = done.json
    assert found["kills"] == sum(found["by_phase"].values()) == sum(found["by_target"].values()) == 2
    assert found["steps_lost"]["max"] <= 5, "the save interval"
    assert not list((tmp_path / "soak-single" / "runs").glob("disturbed-*")), "runs that are equal are not kept"

    # Another chunk must be of the same soak; one without kills shows the table of all that came before.
    other = soak(cache, tmp_path, *words, "KILLS=1", "SEED=6")
    assert other.code == 2 and "`seed` was `5` and is `6`" in other.err
    table = tmp_path / "table.md"
    shown = soak(cache, tmp_path, *words, "KILLS=0", "SEED=5", f"OUT={table}")
    assert shown.code == 0, shown.err
    assert "2 kills" in shown.out and "to the bit" in shown.out
    assert table.read_text() == shown.out


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp2"])
def test_a_soak_in_two_chunks(strategy: str, cache: Path, tmp_path: Path) -> None:
    for chunk in (1, 2):
        done = soak(cache, tmp_path, f"STRATEGY={strategy}", "KILLS=5", "JSON=1")
        assert done.code == 0, done.err
        found = done.json
        assert found["problems"] == [] and found["unequal"] == [], done.err
        assert found["kills"] == 5 * chunk
        assert found["runs"] == found["equal"] >= chunk
