"""Gives a process the names of kernel and system of the machine that `NVML_DOUBLE` describes (WSL2 is known by the
first).
"""

import json
import os
from pathlib import Path

_kernel = os.uname()


def kernel(description):
    """Return what `os.uname` says on the machine of this file; without one, on this machine."""
    machine = (
        json.loads(Path(description).read_text(encoding="utf-8")) if description else {"system": None, "release": None}
    )
    system, node, release, *rest = _kernel
    return os.uname_result((machine["system"] or system, node, machine["release"] or release, *rest))


if path := os.environ.get("NVML_DOUBLE"):
    here = kernel(path)
    os.uname = lambda: here
