"""Gives a process the kernel's name of the machine that `NVML_DOUBLE` describes (WSL2 is known by it)."""

import json
import os
from pathlib import Path

if (path := os.environ.get("NVML_DOUBLE")) and (release := json.loads(Path(path).read_text(encoding="utf-8"))["release"]):
    before = os.uname

    def uname():
        sysname, node, _, version, machine = before()
        return os.uname_result((sysname, node, release, version, machine))

    os.uname = uname
