"""A worker's process: its place among the ranks, what it is doing, where its output goes, the packages it imports, the record it leaves."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from sft_play.config.schema import Config
from sft_play.errors import HardwareError
from sft_play.files import is_gone, write_json
from sft_play.launch.liveness import LIMITS
from sft_play.launch.process import Console
from sft_play.plan.choices import GPU_ONLY_OPTIMIZERS
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared

RESERVED_BYTES = 64 * 2**10
"""Room for the exit record and for the launcher's event."""
Phase = Literal["loading", "training", "updating", "evaluating", "saving", "leaving"]


def launched_world() -> tuple[int, int]:
    """Return (rank, world size) as the launcher set them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def check_launch(plan: Plan) -> None:
    """Raise `HardwareError` when another number of processes was started than planned."""
    _, world = launched_world()
    if world != plan.world_size:
        raise HardwareError(
            f"{world} processes were started, but the plan is for {plan.world_size}",
            hint="start workers through `make`, or give `accelerate launch` the run's own accelerate.yaml",
        )


@dataclass(kw_only=True, slots=True)
class Activity:
    """What a worker is doing; kept up to date by the trainer, so that an error, a stop and a beat can say it."""

    phase: Phase = "loading"
    step: int | None = None
    """Optimizer step, counted from 1."""
    micro_step: int | None = None
    """Micro-step within it, counted from 1."""
    rows: list[int] = field(default_factory=list)
    """Row ids of the micro-batch."""
    micro_batch: int | None = None
    """Rows (with packing: packs) that this rank has at a time by shares that were found while training; `None` with the plan's."""
    since: float = field(default_factory=time.monotonic)
    """When the training thread last made progress (monotonic seconds)."""
    longest_step: float = 0.0
    """Seconds of the longest optimizer step so far."""
    phase_file: Path | None = None
    """Where rank 0 writes its phase when that changes, for those who watch."""
    _begun: float | None = None
    """When this step began; `None` outside one."""

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
            self.tell(phase)
        self.phase, self.step, self.micro_step, self.rows, self.since = phase, step, None, [], now

    def tell(self, phase: Phase) -> None:
        """Write the phase; a disk that does not take it matters to nobody."""
        if self.phase_file:
            with contextlib.suppress(OSError):
                self.phase_file.write_text(f'{{"phase": "{phase}"}}\n', encoding="utf-8")

    def next_batch(self, rows: list[int]) -> None:
        """Notes the next micro-batch."""
        self.micro_step, self.rows, self.since = (self.micro_step or 0) + 1, list(rows), time.monotonic()

    def get_on(self) -> None:
        """Notes progress within the phase."""
        self.since = time.monotonic()

    def __str__(self) -> str:
        words = {
            "loading": "while the model was loaded",
            "training": f"in step {self.step}",
            "updating": f"in the update of step {self.step}",
            "evaluating": f"in the evaluation after step {self.step}",
            "saving": f"while the checkpoint of step {self.step} was written",
            "leaving": "while the rank was leaving",
        }[self.phase]
        if self.micro_step is not None:
            rows = ", ".join(map(str, self.rows[:16])) + (", ..." if len(self.rows) > 16 else "")
            words += f", micro-batch {self.micro_step}" + (f" (row{'s' if len(self.rows) > 1 else ''} {rows})" if rows else "")
        return words

    def facts(self) -> dict[str, Any]:
        """Return the same as plain data."""
        found = {"phase": self.phase, "step": self.step, "micro_step": self.micro_step, "rows": self.rows}
        return found if self.micro_batch is None else found | {"micro_batch": self.micro_batch}


def reserve(run: RunFolder, rank: int) -> None:
    """Take the disk space that the exit record will need. Raise `OSError` where there is none."""
    path = _reserved(run, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\1" * RESERVED_BYTES)


def leave_record(run: RunFolder, rank: int, record: Mapping[str, Any]) -> None:
    """Write `exit-rank{N}.json` with the time, on a full disk in the reserved space; nothing where the run's folder is gone."""
    value = {**record, "time": time.time()}
    if is_gone(run.path):
        return
    try:
        write_json(run.rank_exit(rank), value)
        _reserved(run, rank).unlink(missing_ok=True)
    except OSError:
        with contextlib.suppress(OSError):  # the launcher looks at the disk when a rank says nothing
            _reserved(run, rank).unlink(missing_ok=True)
            write_json(run.rank_exit(rank), value)


def _reserved(run: RunFolder, rank: int) -> Path:
    return run.rank_exit(rank).with_suffix(".reserved")


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
    """Send this process's output to `log`, native libraries' included, and rank 0's Python output to the console as well.

    The console is standard output: on standard error `accelerate launch` and torchrun speak, and it goes to `logs/launcher.log`.
    Return the console of rank 0 (for the progress line), `None` for others.
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
    """Return this rank's log without the console, once `redirect` was called: what is shown there in another form."""
    log = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)
    return cast(TextIO, Tee(log, None))


def quiet_libraries() -> None:
    """Let libraries speak of errors only: what they say at start-up is said better by the plan, or does not concern users."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore")
    for name in ("transformers", "accelerate", "datasets", "peft", "deepspeed", "DeepSpeed", "torch.distributed", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)


def import_libraries(config: Config, plan: Plan, prepared: Prepared) -> None:
    """Import torch, transformers, accelerate and PEFT; call before anything else does.

    PEFT and accelerate import bitsandbytes and DeepSpeed only because they are installed: where the plan has no use for them, `None` in
    `sys.modules` makes them look absent (Python's reference, 5.3.1). transformers' `Trainer` does the same with `datasets`, which user
    code may still want, so that is hidden during this import alone. Garbage collection rests meanwhile (a fifth of the time), and never
    again walks over what was imported.
    """
    gc.disable()
    os.environ.setdefault(
        "COMET_DISABLE_AUTO_LOGGING", "1"
    )  # transformers imports Comet if it is there, and it would follow MLflow's runs
    absent = {"deepspeed": not plan.strategy.startswith("zero"), "bitsandbytes": not uses_bitsandbytes(config, plan, prepared)}
    for name in [name for name, is_absent in absent.items() if is_absent and not config.model.trust_remote_code]:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    hides_datasets = sys.modules.setdefault("datasets", None) is None  # type: ignore[arg-type]
    from transformers import Trainer  # noqa: F401 - brings the others

    if hides_datasets:
        del sys.modules["datasets"]
    gc.freeze()
    gc.enable()


def uses_bitsandbytes(config: Config, plan: Plan, prepared: Prepared) -> bool:
    """Whether weights are quantised, or may be (by Unsloth, or in the base as it comes), or an optimizer's states are."""
    from sft_play.model.resolve import quantisation_of

    return (
        config.tuning.mode == "qlora"
        or config.tuning.backend == "unsloth"
        or plan.optim in GPU_ONLY_OPTIMIZERS
        or "8bit" in plan.optim
        or quantisation_of(Path(prepared.model.path)) is not None
    )


# Requests to stop: SIGTERM, SIGINT, SIGUSR1. Signals are read from a pipe by a thread: a main thread that waits in a collective operation, or for
# a library to load, would not hear them. What a request leads to:
#
# - before the first step has ended there is nothing to save: the process leaves at once;
# - afterwards the ranks agree at the end of a step (`training.stopping`), save and leave;
# - without checkpoints (`train.save_strategy` is `no`) the process leaves at once, unless the last step has ended: then the model is written;
# - when no end of a step came within `PATIENCE_SECONDS` the process leaves without a new checkpoint, except in the middle of a save.


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PATIENCE_SECONDS, AFTER_SAVE_SECONDS = LIMITS.patience, LIMITS.after_save
LOOK_SECONDS = 0.1
LEAVE_SECONDS = 2.0
"""How long the end waits for the thread that asks other ranks; it looks up once a second, and at the end at once."""
KEY = "asked_to_stop"


def code_of(number: int) -> int:
    """Return the exit code of a stop that this signal asked for."""
    return 130 if number == signal.SIGINT else 143


@dataclass(kw_only=True, slots=True)
class StopRequest:
    """Whether this worker has been asked to stop, and its end when it cannot stop in order."""

    run: RunFolder
    rank: int
    activity: Activity
    heard: int | None = None
    """The signal, here or (SIGTERM) on another rank."""
    during: str = "loading"
    """The phase in which it was heard."""
    nothing_to_save: bool = True
    """Until the first step has ended; without checkpoints until the last has."""
    step: int = 0
    """The last optimizer step that has ended."""
    first_step: int = 0
    """The step that this process continued from."""
    saved: int | None = None
    """The step of the newest checkpoint of this process."""
    _ended: bool = False
    _code: int = 1
    _ending: threading.Lock = field(default_factory=threading.Lock)
    _over: threading.Event = field(default_factory=threading.Event)
    _sharing: threading.Thread | None = None

    def listen(self) -> None:
        """Take the signals over; call once, in the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, _nothing)  # what counts is the byte in the pipe
        os.register_at_fork(after_in_child=_as_child)
        threading.Thread(target=self._read, args=(reader,), name="requests to stop", daemon=True).start()

    def hear(self, number: int) -> None:
        """Take up a request; the first counts."""
        if self.heard is None:
            self.heard, self.during = number, self.activity.phase
            threading.Thread(target=self._wait, name="time to leave", daemon=True).start()

    def share(self, connect: Callable[[], Any]) -> None:
        """Tell other ranks and hears from them, about every second, through a torch `Store` that `connect` opens for it alone."""
        self._sharing = threading.Thread(target=self._share, args=(connect,), name="requests to others", daemon=True)
        self._sharing.start()

    def finish(self, record: Mapping[str, Any]) -> None:
        """Write this process's exit record; from here on it only has to leave."""
        with self._ending:
            if not self._ended:
                leave_record(self.run, self.rank, self._with_facts(record))
                self._code, self._ended = int(record["code"]), True
        self._over.set()
        # A thread that comes back from torch's C++ into an interpreter that ends aborts the process
        if self._sharing is not None:
            self._sharing.join(LEAVE_SECONDS)

    def _with_facts(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Add to the exit record of a stop what is known of it."""
        if self.heard is None or record["code"] not in (130, 143):
            return dict(record)
        stop = {"signal": signal.Signals(self.heard).name, "phase": self.during, "step": self.step, "saved": self.saved}
        return {**record, "stop": stop}

    def _read(self, reader: int) -> None:
        while received := os.read(reader, 64):
            for number in received:
                if number in SIGNALS:  # the pipe tells of other signals with handlers too (SIGCHLD)
                    self.hear(number)

    def _wait(self) -> None:
        """End the process when it does not end in time."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._ended:
            if self.activity.phase == "saving":  # it is finished, however long it takes
                deadline = max(deadline, time.monotonic() + AFTER_SAVE_SECONDS)
            elif self.nothing_to_save:
                since = f"after step {self.first_step}" if self.first_step else "of this run"
                kept = f"`train.save_strategy` is `no`, so nothing {since} is kept; step {self.step} had ended"
                self._leave("nothing is lost: no step has ended since the start" if self.step == self.first_step else kept)
            if time.monotonic() > deadline:
                self._leave(
                    f"no step ended within {PATIENCE_SECONDS:.0f} s, so there is no new checkpoint; the last one is complete"
                )
            time.sleep(LOOK_SECONDS)
        time.sleep(AFTER_SAVE_SECONDS)  # an interpreter that hangs in its last clearing up must not keep its launcher waiting
        os._exit(self._code)

    def _leave(self, why: str) -> None:
        assert self.heard is not None
        with self._ending:
            if self._ended:
                return
            name = signal.Signals(self.heard).name
            with contextlib.suppress(OSError, ValueError):
                print(f"{name} {self.activity}: rank {self.rank} leaves; {why}", file=sys.stderr, flush=True)
            leave_record(self.run, self.rank, self._with_facts({"code": code_of(self.heard), "error": "", "note": why}))
            os._exit(code_of(self.heard))

    def _share(self, connect: Callable[[], Any]) -> None:
        told = False
        with contextlib.suppress(RuntimeError):  # without a store, and when it is gone, ranks still agree at the end of each step
            store = connect()
            while not self._ended:
                if self.heard is not None and not told:
                    store.set(KEY, str(int(self.heard)))
                    told = True
                elif not told and store.check([KEY]):
                    told = True
                    self.hear(int(store.get(KEY)))
                self._over.wait(1.0)


def ignore_stops(_worker: int = 0) -> None:
    """For processes that load data (`worker_init_fn`): where all processes of a job get the signal, they must live until the save."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _nothing(_number: int, _frame: object) -> None:
    pass


def _as_child() -> None:
    """A forked process has no part in this: it must not write into the pipe."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
