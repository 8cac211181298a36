"""Imported first by commands, so that a user's `tokenizers.py` or `datasets.py` in the working folder is not imported
instead of a library.

`python -m` puts that folder first, and accelerate appends it to the `PYTHONPATH` of DeepSpeed's workers. It is removed
here and (`PYTHONSAFEPATH`) in every child process, unless SFT-Play itself is only there. `PYTHONOPTIMIZE=2` is removed
too. A file of `PYTHONPATH` in a library's place is refused.
"""

# ruff: noqa: E402
from __future__ import annotations

import os
import re
import sys

_folder, _name = os.path.split(sys.argv[0] if sys.argv else "")
IS_PROGRAM = _name == "sft-play" or _folder.endswith(f"{os.sep}sft_play")
"""Whether this process runs a command; a program that imports us keeps its working folder."""
_with_folder = list(sys.path)
try:
    _here = os.getcwd()  # noqa: PTH109 - `pathlib` is imported below
except OSError:  # it has been removed
    _here = ""
if IS_PROGRAM and not sys.flags.safe_path and sys.path[:1] in ([""], [_here]):
    del sys.path[0]  # before the next imports: a user's `csv.py` would be one of them
elif IS_PROGRAM and sys.flags.safe_path and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    *_typed, _last = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _last == _here:  # accelerate appended it
        os.environ["PYTHONPATH"] = os.pathsep.join(_typed)
        sys.path[:] = [entry for entry in sys.path if entry != _here or _here in _typed]

import contextlib
import importlib.machinery
from collections.abc import Iterator
from pathlib import Path

LAUNCHER_VARIABLES = re.compile(
    r"PET_\w+|(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|NODE_RANK"
    r"|TORCHELASTIC_\w+|ACCELERATE_\w+|FSDP_\w+|(OMPI_COMM_WORLD|MV2_COMM_WORLD|PMI)_\w+|MPI_LOCAL\w+|DS_ACCELERATOR"
)
"""Variables that torchrun, accelerate or DeepSpeed silently obey. Launches set the right ones; a stray one would change
a run.
"""

LIBRARIES = (
    "yaml", "psutil", "numpy", "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "accelerate",
    "deepspeed", "peft", "datasets", "evaluate", "bitsandbytes", "omegaconf", "tensorboard",
)  # fmt: skip


def _is_found() -> bool:
    """Return whether `sys.path` contains this package, or it is installed as editable."""
    here = Path(__file__).with_name("__init__.py")
    for finder in sys.meta_path:
        with contextlib.suppress(AttributeError, ImportError):
            if (spec := finder.find_spec("sft_play", None)) and spec.origin:
                return Path(spec.origin).resolve() == here.resolve()
    return False


def shadowed_libraries() -> Iterator[tuple[str, Path]]:
    """Yield each library instead of which another file of PYTHONPATH would be imported, and that file.

    A folder that shares files with the installed library is a version of it, which the user has chosen.
    """
    entries = {Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    others = [entry for entry in sys.path if Path(entry).resolve() not in entries]
    for name in LIBRARIES if entries else ():
        installed, first = (importlib.machinery.PathFinder.find_spec(name, path) for path in (others, sys.path))
        if installed and first and first.origin != installed.origin and not _files(installed) & _files(first):
            yield name, Path(first.origin or "")


def _files(spec: importlib.machinery.ModuleSpec) -> set[str]:
    names = {entry.name for folder in spec.submodule_search_locations or () for entry in Path(folder).iterdir()}
    return names - {"__init__.py", "__pycache__"}


if IS_PROGRAM:
    if sys.flags.optimize > 1 and os.environ.pop("PYTHONOPTIMIZE", ""):  # transformers needs docstrings
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    _is_doctor = "doctor" in (_name.removesuffix(".py"), *sys.argv[1:2])
    with contextlib.suppress(OSError):  # the working folder may be gone
        if _is_found():
            os.environ["PYTHONSAFEPATH"] = "1"
        else:
            sys.path[:] = _with_folder
        for _library, _file in shadowed_libraries():
            if _is_doctor and _library not in ("yaml", "psutil"):  # without these two it cannot report it
                continue
            _text = f"error: PYTHONPATH: `{_file}` is imported instead of the library `{_library}`"
            print(f"{_text}\n\nhint: rename it, or `unset PYTHONPATH`", file=sys.stderr)
            sys.exit(3)
