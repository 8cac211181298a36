"""Random states of a rank: Python's, numpy's, torch's on the CPU and on this rank's GPU."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path

import numpy
import torch
from safetensors import safe_open
from torch import Tensor

from sft_play.training.states.shelf import readable

FACTS = "facts"


def random_states() -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns copies of the states as tensors, and what belongs to them as metadata."""
    version, inner, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    tensors = {
        "python": torch.tensor(inner, dtype=torch.int64),
        "numpy": torch.from_numpy(numpy.array(keys, dtype=numpy.uint32)),
        "torch": torch.random.get_rng_state().clone(),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state().clone()
    facts = {
        "python": [version, gauss],
        "numpy": [str(name), int(position), int(has_gauss), float(cached)],
    }
    return tensors, {FACTS: json.dumps(facts)}


def set_random_states(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Puts states back that `random_states` returned."""
    facts = json.loads(metadata[FACTS])
    version, gauss = facts["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    name, position, has_gauss, cached = facts["numpy"]
    numpy.random.set_state((name, tensors["numpy"].numpy(), position, has_gauss, cached))
    torch.random.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def restore_random_states(path: Path | None, rank: int, *, seed: int, step: int) -> None:
    """Puts a rank's states back from its file. Without one (it was not there when the checkpoint was written) it starts from `fresh_seed`."""
    if path is None:
        number = fresh_seed(seed, rank, step)
        random.seed(number)
        numpy.random.seed(number % 2**32)
        torch.manual_seed(number)
        return
    with readable(path), safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        set_random_states(tensors, file.metadata())


def fresh_seed(seed: int, rank: int, step: int) -> int:
    """Returns the seed of a rank that joins a run at `step`: 63 bits of the sha256 of `seed/rank/step`."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{rank}/{step}".encode()).digest()[:8], "big") >> 1
