"""`SOURCE=probe`: two steps of the worst batch by real workers; their figures correct every later plan."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Program


@pytest.mark.slow
def test_a_probe_runs_the_longest_rows_and_is_remembered(program: Program, tiny: Path, tmp_path: Path) -> None:
    words = [
        "CONFIG=configs/quickstart.yaml",
        f"MODEL_NAME={tiny}",
        "MODEL_MAX_SEQ_LEN=128",
        "DATA_VALIDATION=",
        f"DATA_TRAIN_PATH={ROOT}/examples/02_your_jsonl/train.jsonl",
        "NUM_GPUS=2",
        "JSON=1",
    ]
    env = {"SFT_PLAY_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    probed = program("plan", *words, "SOURCE=probe", env=env)
    assert probed.code == 0 and probed.json["source"] == "probe", probed.err
    assert "probe: 2 steps with the longest rows, micro-batch 4 ..." in probed.err
    assert any("memory by a probe" in reason for reason in probed.json["reasons"].values())
    assert all(200e6 < rank["peak_bytes"] < 2e9 for rank in probed.json["ranks"])
    later = program("plan", *words, env=env)
    assert later.json["source"] == "probe" and later.json["ranks"][0]["micro_batch"] == 4
    assert "probe:" not in later.err
    assert not (tmp_path / "runs").exists() and not list((tmp_path / "cache").glob("probe-*"))
    other = program("plan", *words, "SOURCE=formula", env=env)
    assert other.json["source"] == "formula"


def test_pages_that_loading_mapped_are_no_peak_of_a_step(tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux measures anew")
    program = f"""
import mmap
from pathlib import Path
from sft_play.training.metrics import forget_peak, peak_memory_bytes

path = Path(r"{tmp_path}") / "weights"
path.write_bytes(bytes(200 * 2**20))
with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
    assert sum(pages[:: mmap.PAGESIZE]) == 0
loading = peak_memory_bytes()
forget_peak()
print((loading - peak_memory_bytes()) // 2**20)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 150


def test_described_hardware_cannot_be_probed(program: Program) -> None:
    done = program("plan", "CONFIG=configs/quickstart.yaml", "HARDWARE=24GB", "SOURCE=probe")
    assert done.code == 2 and "measures on this machine" in done.err and "SOURCE=trace" in done.err
