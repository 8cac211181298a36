"""Compiles `guard.cpp` against the installed torch without importing it: the library must be loaded first."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


def compiled(cache: Path) -> Path:
    """Return the shared library, which `cache` keeps for the torch that is installed."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    torch = Path(spec.submodule_search_locations[0])
    parts = (path.read_text(encoding="utf-8") for path in (SOURCE, Path(__file__), torch / "version.py"))
    content = "".join([str(torch), *parts])  # the library finds torch by its path
    library = cache / f"fake-cuda-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}")
        libraries = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
        command = [
            "g++",
            "-shared",
            "-fPIC",
            "-std=c++20",
            f"-I{torch / 'include'}",
            str(SOURCE),
            "-o",
            str(partial),
            *libraries,
        ]
        subprocess.run(command, check=True, timeout=240)
        partial.rename(library)
    return library
