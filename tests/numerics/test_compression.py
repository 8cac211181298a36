"""Gradients in fewer bytes: exact where they can be, close where not, and as few bytes on the wire as promised."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sft_play.plan.network import powersgd_elements
from sft_play.training.slow_network import FP16_MOST, narrow_of
from tests.conftest import ROOT
from tests.programs import need

SECONDS = 120
ALONE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
"""A network namespace of its own, so that its interface counts nothing else."""


def ranks_in_a_namespace(folder: Path, world: int) -> dict[str, Any]:
    """Returns what rank 0 of `tests.numerics.exchange_ranks` found, all ranks in one network namespace."""
    need("ip")
    if shutil.which("unshare") is None or subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here (it needs root)")
    each = [sys.executable, "-m", "tests.numerics.exchange_ranks"]
    lines = [
        " ".join([*each, str(rank), str(world), str(folder / "meeting"), str(folder / f"{rank}.json")]) for rank in range(world)
    ]
    script = " & ".join(lines[1:]) + f" & {lines[0]}; code=$?; wait; exit $code"
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*ALONE, "sh", "-c", script], env=variables, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {str(rank): json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ranks_in_a_namespace(tmp_path_factory.mktemp("exchange"), 2)


def test_fp16_and_bf16_halve_the_bytes_on_the_wire_and_powersgd_sends_fewer(found: dict[str, Any]) -> None:
    sent = {kind: found["0"][kind]["sent"] for kind in ("none", "fp16", "bf16", "powersgd")}
    whole = 2 * 4 * found["0"]["numbers"]  # each of two ranks sends all of it once: 2 (N - 1) / N of it, N times
    assert whole < sent["none"] < 1.1 * whole
    for kind in ("fp16", "bf16"):
        assert 0.45 < sent[kind] / sent["none"] < 0.55, sent
    numbers = 2 * powersgd_elements(256, 256, 4) + 3 * 256 + 1 + 256
    assert sent["powersgd"] < 1.3 * 2 * 4 * numbers + 10_000 < sent["none"] / 8, sent


def test_powersgd_converges_with_what_was_not_sent_kept_for_later(found: dict[str, Any]) -> None:
    mine, plain = found["0"]["powersgd"], found["0"]["plain60"]
    assert mine["weights"] == found["1"]["powersgd"]["weights"]
    assert mine["losses"][:10] == plain["losses"][:10], "the first steps are plain"
    first, last = mine["losses"][0], mine["losses"][-1]
    assert last < 0.2 * first and last < 1.5 * plain["losses"][-1] + 0.02, mine["losses"][-5:]
    assert set(mine["error"]) == {"0.weight", "2.weight"} and all(norm > 0 for norm in mine["error"].values())


def test_outer_steps_are_torchs_nesterov_on_the_token_weighted_mean(found: dict[str, Any]) -> None:
    for rank in ("0", "1"):
        outer = found[rank]["outer"]
        assert outer["gap"] < 1e-6 and outer["back"]
        assert (outer["window"], outer["tokens"]) == (0, 0)


def test_small_gradients_keep_their_digits_and_large_ones_do_not_overflow() -> None:
    """The scale: gradients of a mean are small, and below 6e-5 fp16 loses digits."""
    torch.manual_seed(0)
    gradients = torch.randn(100_000) * torch.exp(torch.randn(100_000) * 2 - 14)  # around 1e-6, as of full tuning
    kept = narrow_of("fp16", scaled=False)
    assert kept is not None
    mean = kept.unpack(sum((kept.pack(gradients, 2) for _ in range(2)), torch.zeros(())), torch.empty_like(gradients))
    bare = gradients.half().float()
    off = [((one - gradients).abs() > 0.01 * gradients.abs()).float().mean().item() for one in (mean, bare)]
    assert off[0] < 0.03 and off[1] > 0.5, f"gradients that are off by more than a hundredth: {off}"
    assert (bare == 0).float().mean() > 20 * (mean == 0).float().mean()
    large = kept.unpack(kept.pack(torch.tensor([1e9, -1e9]), 1), torch.empty(2))
    assert large.tolist() == [FP16_MOST / 1024, -FP16_MOST / 1024]
