"""A worker's process: its rank, activity, output, imported packages and exit record."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from sft_play.config.optimizers import OPTIMIZERS
from sft_play.config.schema import Config
from sft_play.errors import HardwareError
from sft_play.files import is_gone, open_own, write_json
from sft_play.launch.process import Console
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder, cache_folder
from sft_play.runs.prepared import Prepared
from sft_play.text import numbered

Phase = Literal["loading", "training", "updating", "evaluating", "saving", "leaving"]


def launched_world() -> tuple[int, int]:
    """Return (rank, world size) as set by the launcher."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def check_launch(plan: Plan) -> None:
    """Raise `HardwareError` if the number of processes is not the planned one."""
    _, world = launched_world()
    if world != plan.world_size:
        raise HardwareError(
            f"{world} processes were started, but the plan is for {plan.world_size}",
            hint="start workers through `make`, or run `accelerate launch` with the run's own accelerate.yaml",
        )


@dataclass(kw_only=True, slots=True)
class Activity:
    """What a worker is doing, updated by the trainer and reported by errors, stops and heartbeats."""

    phase: Phase = "loading"
    step: int | None = None
    """Optimizer step, counted from 1."""
    micro_step: int | None = None
    """Micro-step within it, counted from 1."""
    rows: list[int] = field(default_factory=list)
    """Row ids of the micro-batch."""
    micro_batch: int | None = None
    """This rank's rows (or packs) per micro-batch if shares were adjusted while training, `None` with the plan's."""
    since: float = field(default_factory=time.monotonic)
    """When the training thread last made progress (monotonic seconds)."""
    longest_step: float = 0.0
    """Seconds of the longest optimizer step so far."""
    phase_file: Path | None = None
    """File to which rank 0 writes each new phase, for `make watch`."""
    _begun: float | None = None
    """When this step began; `None` outside a step."""

    def enter(self, phase: Phase, *, step: int | None = None) -> None:
        """Begin another phase."""
        now = time.monotonic()
        if phase == "training":
            self._begun = now
        elif self._begun is not None:
            self.longest_step = max(self.longest_step, now - self._begun)
            if phase != "updating":
                self._begun = None
        if self.phase_file and phase != self.phase and {phase, self.phase} != {"training", "updating"}:
            self.write_phase(phase)
        self.phase, self.step, self.micro_step, self.rows, self.since = phase, step, None, [], now

    def write_phase(self, phase: Phase) -> None:
        """Write the phase; a failed write does not matter."""
        if self.phase_file:
            with contextlib.suppress(OSError), open_own(self.phase_file, empty=True) as stream:
                stream.write(f'{{"phase": "{phase}"}}\n'.encode())

    def next_batch(self, rows: list[int]) -> None:
        """Record the next micro-batch."""
        self.micro_step, self.rows, self.since = (self.micro_step or 0) + 1, list(rows), time.monotonic()

    def get_on(self) -> None:
        """Record progress within the phase."""
        self.since = time.monotonic()

    def __str__(self) -> str:
        words = {
            "loading": "before its first step (the model, the data)",
            "training": f"in step {self.step}",
            "updating": f"in the update of step {self.step}",
            "evaluating": f"in the evaluation after step {self.step}",
            "saving": f"while the checkpoint of step {self.step} was written",
            "leaving": "while the rank was exiting",
        }[self.phase]
        if self.micro_step is not None:
            words += f", micro-batch {self.micro_step}" + (f" ({numbered('row', self.rows)})" if self.rows else "")
        return words

    def facts(self) -> dict[str, Any]:
        """Return the activity as plain data."""
        facts = {"phase": self.phase, "step": self.step, "micro_step": self.micro_step, "rows": self.rows}
        return facts if self.micro_batch is None else facts | {"micro_batch": self.micro_batch}


def leave_record(run: RunFolder, rank: int, record: Mapping[str, Any]) -> None:
    """Write `exit-rank{N}.json` with the time, unless the run's folder is gone."""
    if not is_gone(run.path):
        with contextlib.suppress(OSError):  # the launcher checks the disk if a rank leaves no record
            write_json(run.rank_exit(rank), {**record, "time": time.time()})


class Tee:
    """A text stream that writes to a log file and, on rank 0, to the console too.

    Neither ends a run: on a full disk the log is cut short, and a console that is closed (`| head`) is not used again.
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
    """Send this process's output, native libraries included, to `log`, and rank 0's Python output also to the console.

    The console is standard output: `accelerate launch` and torchrun use standard error, which goes to
    `logs/launcher.log`. Return the console of rank 0 (for the progress line), `None` for others.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    file = io.TextIOWrapper(open_own(log), encoding="utf-8", line_buffering=True)
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
    """Return this rank's log without the console, after `redirect`, for output that the console shows differently."""
    log = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)
    return cast(TextIO, Tee(log, None))


def quiet_libraries() -> None:
    """Let libraries report only errors: the plan covers their start-up messages, or users need not see them."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore")
    for name in (
        "transformers",
        "accelerate",
        "datasets",
        "peft",
        "deepspeed",
        "DeepSpeed",
        "torch.distributed",
        "bitsandbytes",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)


def import_libraries(config: Config, plan: Plan, prepared: Prepared) -> None:
    """Import torch, transformers, accelerate and PEFT; call this before anything else imports them.

    PEFT and accelerate import bitsandbytes and DeepSpeed whenever they are installed. If the plan does not use them,
    `None` in `sys.modules` makes them look absent (Python's reference, 5.3.1). transformers' `Trainer` does the same
    with `datasets`, which user code may still need, so it is hidden only during this import. Garbage collection is off
    meanwhile (it takes a fifth of the time), and skips the imported objects afterwards.
    """
    gc.disable()
    if config.tuning.backend == "unsloth":
        os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")  # it requests a file from the hub to count its users
        # Otherwise Unsloth creates a folder in the working directory.
        os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(cache_folder() / "unsloth"))
        import unsloth  # noqa: F401 - it changes what is imported after it
    # transformers imports Comet if it is installed, and Comet would log MLflow's runs.
    os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")
    absent = {
        "deepspeed": not plan.zero,
        "bitsandbytes": not uses_bitsandbytes(config, plan, prepared),
    }
    for name in [name for name, is_absent in absent.items() if is_absent and not config.model.trust_remote_code]:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    hides_datasets = sys.modules.setdefault("datasets", None) is None  # type: ignore[arg-type]
    from transformers import Trainer  # noqa: F401 - brings the others

    if plan.zero:
        import deepspeed.ops

        # On a CPU it would compile an all-reduce for inference, which no training calls (0.19.8, `comm/torch.py`).
        deepspeed.ops.__compatible_ops__ = {}
    if hides_datasets:
        del sys.modules["datasets"]
    gc.freeze()
    gc.enable()


def uses_bitsandbytes(config: Config, plan: Plan, prepared: Prepared) -> bool:
    """Return whether weights are, or may be, quantised (QLoRA, Unsloth, the base itself), or optimizer states are."""
    from sft_play.model.resolve import quantization_in

    return (
        config.tuning.mode == "qlora"
        or config.tuning.backend == "unsloth"
        or OPTIMIZERS[plan.optim].bitsandbytes
        or quantization_in(Path(prepared.model.path)) != ""
    )
