"""What a save gathers under FSDP2, and what a probe takes for its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from sft_play.probe import held, measured
from sft_play.training.checkpoint_files import gather_weights
from tests.contexts import context_of

GIB = 2**30


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize(("mode", "names"), [("lora", ["0.weight"]), ("full", ["0.weight", "1.weight"])])
def test_a_frozen_base_is_not_gathered(alone: None, tmp_path: Path, mode: str, names: list[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].requires_grad_(mode == "full")
    wanted = model[0].weight.detach().clone()
    fully_shard(model, mesh=distributed.device_mesh.init_device_mesh("cpu", (1,)))
    trainer = SimpleNamespace(
        model=model,
        is_fsdp_enabled=True,
    )
    found = gather_weights(context_of(tmp_path, tuning={"mode": mode}), trainer, clone=True)
    assert found is not None and sorted(found) == names
    assert torch.equal(found["0.weight"], wanted) and type(found["0.weight"]) is torch.Tensor


def test_other_programs_memory_is_not_the_probes_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A desktop holds 2 of 24 GiB, which the plan's capacity leaves out already, and the driver half a GiB that CUDA does not count."""
    used = iter([2.5, 12.5])
    card = {"is_available": lambda: True, "device_memory_used": lambda _: int(next(used) * GIB)}
    card |= {"mem_get_info": lambda: (int(11.5 * GIB), int(23.5 * GIB))}
    card |= {"max_memory_allocated": lambda: 8 * GIB, "max_memory_reserved": lambda: 9 * GIB}
    for name, value in card.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert measured(0, 1, 1.0, held()).device_bytes == 10 * GIB
    assert measured(0, 1, 1.0, 0).device_bytes == 12 * GIB, "NVML does not tell, as of a MIG slice"
