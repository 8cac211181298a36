"""Liger's kernels on a GPU: the losses of transformers' own operations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Program, metrics
from tests.gpu.conftest import written

pytestmark = pytest.mark.gpu
pytest.importorskip("liger_kernel", reason="the package liger-kernel is not installed")


def test_losses_are_those_of_plain_kernels(tiny: Path, tmp_path: Path, program: Program) -> None:
    config = written(tmp_path, tiny, "train: {global_batch_size: 8, max_steps: 6, learning_rate: 5.0e-3}")
    for kernels in ("liger", "off"):
        done = program("train", config, f"TRAIN_KERNELS={kernels}", f"RUN_NAME={kernels}")
        assert done.code == 0, done.err
    plain, liger = ([row["loss"] for row in metrics(tmp_path / "runs" / kernels)] for kernels in ("off", "liger"))
    assert liger == pytest.approx(plain, abs=1e-2)
