"""Double of torch for what is asked before a launch: which CUDA and architectures it was built for, and whether it can
use the cards.

It describes the machine of `NVML_DOUBLE` and answers like the real one: see `torch.cuda._lazy_init` and CUDA's errors.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

_machine = json.loads(Path(os.environ["NVML_DOUBLE"]).read_text(encoding="utf-8"))
_built = _machine["torch"]
__version__ = _built["version"]
version = SimpleNamespace(cuda=_built["cuda"], hip=None)
_C = SimpleNamespace(_cuda_getArchFlags=lambda: " ".join(_built["architectures"]))


def _problem():
    if _built["cuda"] is None:
        return "Torch not compiled with CUDA enabled"
    if _machine["cuda"] // 1000 < int(_built["cuda"].split(".")[0]):
        return f"The NVIDIA driver on your system is too old (found version {_machine['cuda']})."
    return None


def _card(device):
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(len(_machine["cards"]))] if shown is None else shown.split(",")
    name = names[int(device.partition(":")[2])]
    return next(card for index, card in enumerate(_machine["cards"]) if name == str(index) or name in _uuids(card))


def _uuids(card):
    return [card["uuid"], *(slice_facts["uuid"] for slice_facts in card["slices"] or [])]


def ones(size, device):
    if problem := _problem():
        raise RuntimeError(problem)
    card = _card(device)
    digits = "".join(map(str, card["capability"]))
    if not any(arch[3] == digits[0] and arch[4:] <= digits[1:] for arch in _built["architectures"]):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
    if card["mode"] == 2 or (card["mode"] == 3 and card["held_by"]):
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    if card["slices"] is not None and not card["permitted"]:
        raise RuntimeError("No CUDA GPUs are available")
    return SimpleNamespace(item=lambda: 1.0)


cuda = SimpleNamespace(is_available=lambda: _problem() is None)
