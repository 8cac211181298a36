"""Gives a process the names of kernel and system of the machine that `NVML_DOUBLE` describes (WSL2 is known by the first)."""

import json
import os
from pathlib import Path

if path := os.environ.get("NVML_DOUBLE"):
    machine = json.loads(Path(path).read_text(encoding="utf-8"))
    before = os.uname

    def uname():
        system, node, release, *rest = before()
        return os.uname_result((machine["system"] or system, node, machine["release"] or release, *rest))

    os.uname = uname
