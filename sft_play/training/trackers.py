"""Log to TensorBoard (curves per rank, machine and evaluation) and to other trackers."""

from __future__ import annotations

import contextlib
import copy
import os
import queue
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from transformers import TrainerCallback

from sft_play.config.schema import Config
from sft_play.config.trackers import AIM, OWN, trackers
from sft_play.files import free_bytes, open_own, read_json, read_object, write_json
from sft_play.runs.folder import RunFolder
from sft_play.text import tell

ROOM_BYTES = 2**20
"""Free bytes needed to start a new file."""
NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "tokens_per_second": "speed/tokens_per_second",
    "step_seconds": "speed/step_seconds",
    "mfu": "speed/mfu",
}
PLACE = re.compile(r"(rank|node)_(.+)")
"""A list with a value for each rank or machine; its curves are `rank/loss/0`, `rank/loss/1`, ..."""


class Curves(TrainerCallback):
    """Write what is logged as scalars into `tb/`; a resumed run continues from its checkpoint's step.

    Events that do not fit on the disk are dropped, and a new file is started when there is space again. The library's
    own writer thread is not used, because it would end at a full disk with a traceback.
    """

    def __init__(self, run: RunFolder) -> None:
        self.folder = run.tensorboard
        self.stream: BinaryIO | None = None
        self._files = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self.folder.mkdir(parents=True, exist_ok=True)
        step = state.global_step
        if step:  # invalidates later steps in earlier files
            self._write(step + 1, session_log=SessionLog(status=SessionLog.START))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        curves = {
            f"{place}/{name}/{index}" if place else NAMES.get(name) or f"eval/{name.removeprefix('eval_')}": number
            for place, name, index, number in numbers_of(logs)
            if place or name in NAMES or name.startswith("eval_")
        }
        if curves:
            values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in curves.items()]
            self._write(state.global_step, summary=Summary(value=values))

    def _write(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        try:
            if self.stream is None:
                if free_bytes(self.folder) < ROOM_BYTES:
                    return
                self._files += 1
                name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{self._files}"
                self.stream = open_own(self.folder / name, empty=True)
                RecordWriter(self.stream).write(
                    Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString()
                )
            RecordWriter(self.stream).write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
            # A killed process loses unflushed events, and steps before a checkpoint are never repeated.
            self.stream.flush()
        except OSError:  # readers stop at a torn record, so the file cannot be continued
            stream, self.stream = self.stream, None
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def numbers_of(logs: Mapping[str, Any]) -> Iterator[tuple[str, str, int, float]]:
    """Yield (`rank` or `node`, name, index, number) for each rank or machine, `("", name, 0, number)` for others."""
    for name, value in logs.items():
        if match := PLACE.fullmatch(name):
            yield from ((match[1], match[2], index, number) for index, number in enumerate(value))
        elif isinstance(value, int | float):
            yield "", name, 0, value


# Each tracker (W&B, MLflow, Comet, Aim) runs its callback in a separate thread: a failure or hang gives a warning and
# ends no run.


END_SECONDS = 60.0
"""How long the end of a training waits for a tracker; W&B sends what is left over a slow network."""
IDS = "trackers.json"
"""File in the run's folder: tracker -> id of its run, which a resumed run continues."""


class Tracked(TrainerCallback):
    """Pass what is logged to a tracker's callback in a thread, so that training never waits for a server.

    `make` returns that callback; it is called in the thread, because some libraries bind their run to a thread.
    """

    def __init__(
        self, name: str, make: Callable[[], TrainerCallback], run: RunFolder, end_seconds: float = END_SECONDS
    ) -> None:
        self.name, self.run, self.end_seconds = name, run, end_seconds
        self._make, self._failed = make, False
        self._inner: Any = None
        self._events: queue.SimpleQueue[tuple[str, tuple[Any, ...], dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"tracker-{name}", daemon=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._thread.start()
        self._hand("on_train_begin", args, state, model=others.get("model"))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        flat = {f"{place}_{name}/{index}" if place else name: number for place, name, index, number in numbers_of(logs)}
        self._hand("on_log", args, state, logs=dict(logs) if self.name == AIM else flat)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._hand("on_train_end", args, state)
        self._events.put(None)
        self._thread.join(self.end_seconds)
        if self._thread.is_alive() and not self._failed:
            self._failed = True
            self._warn(f"has not accepted everything within {self.end_seconds:.0f} s")

    def _hand(self, event: str, args: Any, state: Any, **others: Any) -> None:
        if not self._failed:
            self._events.put((event, (args, copy.copy(state), None), others))

    def _serve(self) -> None:
        while (item := self._events.get()) and not self._failed:
            event, arguments, others = item
            try:
                self._inner = self._inner or self._begin()
                getattr(self._inner, event)(*arguments, **others)
                if event == "on_train_begin":
                    self._begun()
            except BaseException as error:  # noqa: BLE001 - of any kind, even SystemExit; a curve is not worth a run
                if not self._failed:
                    self._failed = True
                    self._warn(f"failed: {(str(error) or type(error).__name__).strip().splitlines()[0]}")

    def _warn(self, what: str) -> None:
        fallback = f"training continues without it, `{self.run.metrics.name}` has everything"
        tell(f"warning: the tracker `{self.name}` {what}; {fallback}")

    def _begin(self) -> Any:
        """Set the variables for the tracker's run and folder that the user did not set; return the callback."""
        run_id = read_object(self.run.path / IDS).get(self.name)
        folder = str(self.run.path.absolute())
        if self.name in ("wandb", "comet_ml"):
            run_id = run_id or uuid.uuid4().hex
        os.environ["WANDB_LOG_MODEL"] = "false"  # W&B would save the model in this thread while others use it
        variables = {
            "wandb": {
                "WANDB_RUN_ID": run_id,
                "WANDB_RESUME": "allow",
                "WANDB_PROJECT": "sft-play",
                "WANDB_DIR": folder,
                "WANDB_CONSOLE": "off",
                "WANDB_DISABLE_CODE": "true",
            },
            "comet_ml": {
                "COMET_EXPERIMENT_KEY": run_id,
                "COMET_PROJECT_NAME": "sft-play",
                "COMET_OFFLINE_DIRECTORY": folder,
            },
            "mlflow": {
                "MLFLOW_RUN_ID": run_id,
                "MLFLOW_TRACKING_URI": (self.run.path.absolute() / "mlruns").as_uri(),
                "MLFLOW_EXPERIMENT_NAME": "sft-play",
                "MLFLOW_ALLOW_FILE_STORE": "true",
                "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
                "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
            },
        }.get(self.name, {})
        for name, value in variables.items():
            if value:
                os.environ.setdefault(name, value)
        keep_id(self.run, self.name, run_id)
        return self._make()

    def _begun(self) -> None:
        """Record MLflow's run id, since it names runs itself, and turn off its own thread, whose errors nobody sees."""
        if self.name == "mlflow":
            import mlflow

            self._inner._async_log = False
            keep_id(self.run, self.name, mlflow.active_run().info.run_id)


def keep_id(run: RunFolder, tracker: str, run_id: str | None) -> None:
    """Save a tracker's id of this run."""
    if run_id:
        write_json(run.path / IDS, read_object(run.path / IDS) | {tracker: run_id})


class AimTracker(TrainerCallback):
    """Write numbers as sequences of an Aim run, on rank 0; a step repeated after a resume replaces its value."""

    def __init__(self, run: RunFolder) -> None:
        self.folder = run
        self.run: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        from aim import Run

        before = read_object(self.folder.path / IDS).get(AIM) if state.global_step else None
        self.run = Run(
            before,
            repo=os.environ.get("AIM_REPO") or str(self.folder.path),
            experiment=self.folder.name,
            force_resume=True,
            log_system_params=False,
            capture_terminal_logs=False,
            system_tracking_interval=None,
        )
        self.run.name = self.folder.name
        self.run["config"] = read_json(self.folder.config)["config"]
        keep_id(self.folder, AIM, self.run.hash)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        for place, name, index, number in numbers_of(logs):
            context = {"subset": "eval" if name.startswith("eval_") else "train"} | ({place: index} if place else {})
            plain = name.removeprefix("eval_")
            self.run.track(float(number), name=plain, step=state.global_step, epoch=state.epoch, context=context)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run.close()


def tracker_callbacks(config: Config, run: RunFolder) -> list[Tracked]:
    """Return the callbacks of the trackers that `train.report_to` names, except TensorBoard, which we write."""
    from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

    names = trackers(config)
    names = get_available_reporting_integrations() if "all" in names else names
    served = [
        Tracked(name, INTEGRATION_TO_CALLBACK[name], run)
        for name in names
        if name in INTEGRATION_TO_CALLBACK and name != OWN
    ]
    return served + ([Tracked(AIM, lambda: AimTracker(run), run)] if AIM in names else [])
