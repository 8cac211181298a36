"""Machines with absent NVIDIA cards: doubles of the driver's library, of the kernel's name, and of a torch built for
them.

`Machine.environment` writes a description and returns the environment with which any child process is on that machine.
Only what stands for hardware is replaced: `pynvml` always, `torch` only where `torch=True` (for what is asked before a
launch).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.conftest import ROOT

DOUBLES = ROOT / "tests" / "doubles"
NOT_LOADED, MISMATCH = 9, 18
"""NVML's codes of a driver that is not there, and of one that was updated under a running kernel."""


@dataclass(frozen=True)
class Slice:
    """A MIG slice."""

    name: str
    gib: float
    free: float
    uuid: str


@dataclass(frozen=True)
class Gpu:
    """One card."""

    name: str
    gib: float
    free: float
    capability: tuple[int, int]
    uuid: str = ""
    slices: tuple[Slice, ...] | None = None
    """`None`: MIG is off."""
    permitted: bool = True
    """Whether a user may use the slices."""
    mode: int = 0
    """Compute mode: 0 default, 2 prohibited, 3 exclusive process."""
    held_by: tuple[int | None, ...] = (None,)
    """Processes on it; `None` is the one that asks."""
    lost: bool = False
    unified: bool = False


@dataclass(frozen=True)
class Torch:
    """What torch was built for; the default is the pinned wheel's."""

    version: str = "2.13.0+cu130"
    cuda: str | None = "13.0"
    architectures: tuple[str, ...] = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Everything that the doubles answer from."""

    cards: tuple[Gpu, ...]
    driver: str = "580.65.06"
    cuda: int = 13000
    """The newest CUDA that the driver supports, as NVML counts: 12040 is 12.4."""
    release: str | None = None
    """The kernel's name; `None` for this machine's own."""
    system: str | None = None
    """The operating system's name, such as `Darwin`; `None` for this machine's own."""
    linked: bool = False
    broken: int | None = None
    """NVML's code when it cannot be initialised."""
    torch: Torch = field(default_factory=Torch)

    def write(self, folder: Path) -> None:
        """Write the description; a process that runs on it already sees the change."""
        folder.mkdir(parents=True, exist_ok=True)
        value = asdict(self)
        for index, card in enumerate(value["cards"]):
            card["uuid"] = card["uuid"] or f"GPU-{index}{index}{index}{index}"
        (folder / "machine.json").write_text(json.dumps(value), encoding="utf-8")

    def environment(self, folder: Path, *, torch: bool = False) -> dict[str, str]:
        """Write the description and return the variables of a process on this machine."""
        self.write(folder)
        if torch:
            package = folder / "torch"
            package.mkdir(exist_ok=True)
            shutil.copy(DOUBLES / "torch_facts.py", package / "__init__.py")
            version = f"__version__ = {self.torch.version!r}\ncuda: Optional[str] = {self.torch.cuda!r}\n"
            (package / "version.py").write_text(version, encoding="utf-8")
        paths = [DOUBLES / "machine", *([folder] if torch else []), ROOT]
        return {"PYTHONPATH": ":".join(map(str, paths)), "NVML_DOUBLE": str(folder / "machine.json")}


RTX4090 = Gpu("NVIDIA GeForce RTX 4090", 23.99, 23.5, (8, 9))
RTX3090 = Gpu("NVIDIA GeForce RTX 3090", 24.0, 23.6, (8, 6))
A100_SLICES = (
    Slice("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.5, 9.45, "MIG-11111111-0000-0000-0000-000000000001"),
    Slice("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.25, 39.2, "MIG-11111111-0000-0000-0000-000000000002"),
)
A100_SPLIT = Gpu("NVIDIA A100-SXM4-80GB", 79.25, 30.0, (8, 0), slices=A100_SLICES)

MACHINES: dict[str, Machine] = {
    "rtx4090": Machine(cards=(RTX4090,)),
    "rtx3090_pair": Machine(cards=(RTX3090, RTX3090)),
    "t4": Machine(cards=(Gpu("Tesla T4", 14.7, 14.5, (7, 5)),)),
    "v100": Machine(cards=(Gpu("Tesla V100-SXM2-16GB", 15.8, 15.5, (7, 0)),)),
    "h200": Machine(cards=(Gpu("NVIDIA H200", 139.8, 139.0, (9, 0)),)),
    "unlike_pair": Machine(
        cards=(
            Gpu("NVIDIA GeForce RTX 4070", 11.99, 11.5, (8, 9)),
            Gpu("NVIDIA GeForce RTX 4080", 15.99, 15.5, (8, 9)),
        )
    ),
    "mig": Machine(cards=(A100_SPLIT,)),
    "mig_without_rights": Machine(
        cards=(Gpu("NVIDIA A100-SXM4-80GB", 79.25, 30.0, (8, 0), slices=A100_SLICES, permitted=False),)
    ),
    "wsl2": Machine(cards=(RTX4090,), release="6.6.87.2-microsoft-standard-WSL2"),
    "old_driver": Machine(cards=(RTX4090,), driver="550.54.14", cuda=12040),
    "cpu_torch": Machine(cards=(RTX4090,), torch=Torch("2.13.0+cpu", None, ())),
}
"""The machines of the issue, by name."""


def emulated(folder: Path, name: str, *, torch: bool = False) -> dict[str, str]:
    """Return the environment of a process on one of `MACHINES`."""
    return MACHINES[name].environment(folder, torch=torch)
