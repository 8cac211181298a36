"""Imported first by commands, so that a user's `tokenizers.py` or `datasets.py` in the working folder is not imported
instead of a library.

`python -m` puts that folder first. It is removed here and (`PYTHONSAFEPATH`) in every child process, unless SFT-Play
itself is only there. `PYTHONOPTIMIZE=2` is removed too.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

LAUNCHER_VARIABLES = re.compile(
    r"PET_\w+|(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|NODE_RANK"
    r"|TORCHELASTIC_\w+|ACCELERATE_\w+|FSDP_\w+|(OMPI_COMM_WORLD|MV2_COMM_WORLD|PMI)_\w+|MPI_LOCAL\w+|DS_ACCELERATOR"
)
"""Variables that torchrun, accelerate or DeepSpeed silently obey. Launches set the right ones; a stray one would change
a run.
"""


def _is_found_elsewhere(path: list[str]) -> bool:
    """Return whether a `sys.path` contains this package, or it is installed as editable."""
    here, path_before = Path(__file__).with_name("__init__.py"), sys.path
    sys.path = path
    try:
        for finder in sys.meta_path:
            with contextlib.suppress(AttributeError, ImportError):
                if (spec := finder.find_spec("sft_play", None)) and spec.origin:
                    return Path(spec.origin).resolve() == here.resolve()
    finally:
        sys.path = path_before
    return False


def leave_working_folder() -> None:
    """Remove the working folder from `sys.path`."""
    folder = str(Path.cwd())
    by_module = not sys.flags.safe_path and sys.path[:1] in ([""], [folder])
    search_path = sys.path[1:] if by_module else sys.path
    if _is_found_elsewhere(search_path):
        sys.path[:] = search_path
        os.environ["PYTHONSAFEPATH"] = "1"


_program = Path(sys.argv[0] if sys.argv else "")
if _program.name == "sft-play" or _program.parent.name == "sft_play":  # a program that imports us keeps the folder
    if sys.flags.optimize > 1 and os.environ.pop("PYTHONOPTIMIZE", ""):  # transformers needs docstrings
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    with contextlib.suppress(OSError):  # the working folder may be gone
        leave_working_folder()
