"""Compressed gradients: exact where possible, else close, and as few bytes on the wire as promised."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
import torch

from sft_play.training.slow_network import FP16_MOST, narrow_of
from tests.numerics.rank_processes import results_of_ranks
from tests.programs import need

ALONE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
"""A separate network namespace, whose interface counts nothing else."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of both ranks of `tests.numerics.exchange_ranks`, in one network namespace."""
    need("ip")
    if shutil.which("unshare") is None or subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here (it needs root)")
    return results_of_ranks("exchange_ranks", tmp_path_factory.mktemp("exchange"), 2, [], inside=ALONE)


@pytest.mark.broad
def test_fp16_and_bf16_halve_the_bytes_on_the_wire(results: list[dict[str, Any]]) -> None:
    sent = results[0]["sent"]
    whole = 2 * 4 * results[0]["numbers"]  # each of two ranks sends all of it once: 2 (N - 1) / N of it, N times
    assert whole < sent["none"] < 1.1 * whole
    for kind in ("fp16", "bf16"):
        assert 0.45 < sent[kind] / sent["none"] < 0.55, sent


@pytest.mark.broad
def test_outer_steps_are_torchs_nesterov_on_the_token_weighted_mean(results: list[dict[str, Any]]) -> None:
    for outer in (result["outer"] for result in results):
        assert outer["gap"] < 1e-6 and outer["back"]
        assert (outer["window"], outer["tokens"]) == (0, 0)


def test_small_gradients_keep_their_digits_and_large_ones_do_not_overflow() -> None:
    """The scale: gradients of a mean are small, and below 6e-5 fp16 loses digits."""
    torch.manual_seed(0)
    gradients = torch.randn(100_000) * torch.exp(torch.randn(100_000) * 2 - 14)  # around 1e-6, as of full tuning
    unscaled = narrow_of("fp16", scaled=False)
    assert unscaled is not None
    mean = unscaled.unpack(
        sum((unscaled.pack(gradients, 2) for _ in range(2)), torch.zeros(())), torch.empty_like(gradients)
    )
    bare = gradients.half().float()
    off = [((reduced - gradients).abs() > 0.01 * gradients.abs()).float().mean().item() for reduced in (mean, bare)]
    assert off[0] < 0.03 and off[1] > 0.5, f"gradients that are off by more than a hundredth: {off}"
    assert (bare == 0).float().mean() > 20 * (mean == 0).float().mean()
    large = unscaled.unpack(unscaled.pack(torch.tensor([1e9, -1e9]), 1), torch.empty(2))
    assert large.tolist() == [FP16_MOST / 1024, -FP16_MOST / 1024]
