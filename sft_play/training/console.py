"""Where a worker's output goes: `logs/rank{N}.log` for every rank, and the console for rank 0 only."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import TextIO, cast

from sft_play.launch.console import Console


class Tee:
    """A text stream that writes to a log file and, on rank 0, to the console too.

    Neither ends a run: on a full disk the log stays short, and a console that is closed (`| head`) is written to no more.
    """

    def __init__(self, log: TextIO, console: TextIO | None) -> None:
        self.log = log
        self.console = console
        self.encoding = "utf-8"
        self.errors = "replace"

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.log.write(text)
            self.log.flush()
        if self.console is not None:
            self.console.write(text)
            self.console.flush()
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.log.flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self.log.fileno()


def redirect(log: Path, rank: int) -> TextIO | None:
    """Sends this process's output to `log`, native libraries' included, and rank 0's Python output to the console as well.

    The console is standard output: on standard error `accelerate launch` and torchrun speak, and it goes to `logs/launcher.log`.
    Returns the console of rank 0 (for the progress line), `None` for others.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    file = log.open("a", encoding="utf-8", buffering=1)
    console: TextIO | None = None
    if rank == 0:
        console = cast(TextIO, Console(os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")))
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = Tee(file, console)
    sys.stderr = Tee(file, console)
    return console


def log_alone() -> TextIO:
    """Returns this rank's log without the console, once `redirect` was called: what is shown there in another form."""
    log = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)
    return cast(TextIO, Tee(log, None))


def quiet_libraries() -> None:
    """Lets libraries speak of errors only: what they say at start-up is said better by the plan, or does not concern users."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore")
    for name in ("transformers", "accelerate", "datasets", "peft", "deepspeed", "DeepSpeed", "torch.distributed", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
