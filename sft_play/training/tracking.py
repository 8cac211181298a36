"""Trackers (W&B, MLflow, Comet, Aim) by callbacks in a thread each: one that fails or hangs is a warning and ends no run."""

from __future__ import annotations

import copy
import os
import queue
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback

from sft_play.config.metrics import AIM, OWN, trackers
from sft_play.config.schema import Config
from sft_play.files import read_object, write_json
from sft_play.runs.folder import RunFolder
from sft_play.training.trackers import AimTracker

END_SECONDS = 10.0
"""How long the end of a training waits for a tracker."""
IDS = "trackers.json"
"""File in the run's folder: tracker -> the id of its run, so that a resumed one continues it."""


class Tracked(TrainerCallback):
    """Hands what is logged to a tracker's callback, in a thread: training never waits for a server.

    `make` returns that callback; it is called in the thread, since some libraries bind their run to one.
    """

    def __init__(self, name: str, make: Callable[[], TrainerCallback], run: RunFolder, end_seconds: float = END_SECONDS) -> None:
        self.name, self.run, self.end_seconds = name, run, end_seconds
        self._make, self._failed = make, False
        self._inner: Any = None
        self._events: queue.SimpleQueue[tuple[str, tuple[Any, ...], dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"tracker-{name}", daemon=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._thread.start()
        self._hand("on_train_begin", args, state, model=others.get("model"))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        self._hand("on_log", args, state, logs=dict(logs or {}) if self.name == AIM else flat(logs or {}))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._hand("on_train_end", args, state)
        self._events.put(None)
        self._thread.join(self.end_seconds)
        if self._thread.is_alive() and not self._failed:
            self._failed = True
            self._warn(f"has not taken everything within {self.end_seconds:.0f} s")

    def _hand(self, event: str, args: Any, state: Any, **others: Any) -> None:
        if not self._failed:
            self._events.put((event, (args, copy.copy(state), None), others))

    def _serve(self) -> None:
        while (found := self._events.get()) and not self._failed:
            event, arguments, others = found
            try:
                self._inner = self._inner or self._begin()
                getattr(self._inner, event)(*arguments, **others)
                if event == "on_train_begin":
                    self._begun()
            except BaseException as error:  # noqa: BLE001 - of many kinds, SystemExit among them, and a curve is never worth a run
                if not self._failed:
                    self._failed = True
                    self._warn(f"failed: {(str(error) or type(error).__name__).strip().splitlines()[0]}")

    def _warn(self, what: str) -> None:
        kept = f"training continues without it, `{self.run.metrics.name}` has everything"
        print(f"warning: the tracker `{self.name}` {what}; {kept}", file=sys.stderr, flush=True)

    def _begin(self) -> Any:
        """Say by variables, where the user did not, which run is continued and where files go; return the callback."""
        known = read_object(self.run.path / IDS).get(self.name)
        folder = str(self.run.path.absolute())
        found = {"COMET_DISABLE_AUTO_LOGGING": "1"}  # installed, it would follow MLflow's runs too
        if self.name == "wandb":
            os.environ["WANDB_LOG_MODEL"] = "false"  # it would save the model in this thread while others use it
            known = known or uuid.uuid4().hex[:8]
            found |= {
                "WANDB_RUN_ID": known, "WANDB_RESUME": "allow", "WANDB_PROJECT": "sft-play", "WANDB_DIR": folder, "WANDB_CONSOLE": "off",
                "WANDB_DISABLE_CODE": "true",
            }  # fmt: skip
        elif self.name == "comet_ml":
            known = known or uuid.uuid4().hex
            found |= {"COMET_EXPERIMENT_KEY": known, "COMET_PROJECT_NAME": "sft-play", "COMET_OFFLINE_DIRECTORY": folder}
        elif self.name == "mlflow":
            found |= {
                "MLFLOW_TRACKING_URI": (self.run.path.absolute() / "mlruns").as_uri(), "MLFLOW_EXPERIMENT_NAME": "sft-play",
                "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
            } | ({"MLFLOW_RUN_ID": known} if known else {})  # fmt: skip
        for name, value in found.items():
            os.environ.setdefault(name, value)
        self._keep(known)
        return self._make()

    def _begun(self) -> None:
        """MLflow alone names its runs itself, and would send in a thread of its own, whose errors nobody sees."""
        if self.name == "mlflow":
            import mlflow

            self._inner._async_log = False
            self._keep(mlflow.active_run().info.run_id)

    def _keep(self, known: str | None) -> None:
        if known:
            write_json(self.run.path / IDS, read_object(self.run.path / IDS) | {self.name: known})


def flat(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers only, one name for each rank or machine: `rank_loss/0`."""
    found: dict[str, Any] = {}
    for name, value in logs.items():
        parts = {f"{name}/{index}": one for index, one in enumerate(value)} if isinstance(value, list) else {name: value}
        found |= {key: one for key, one in parts.items() if isinstance(one, (int, float))}
    return found


def tracked(config: Config, run: RunFolder) -> list[Tracked]:
    """Return the callbacks of the trackers that `train.report_to` names, our own TensorBoard excepted."""
    from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

    names = trackers(config)
    names = get_available_reporting_integrations() if "all" in names else names
    served = [
        Tracked(name, INTEGRATION_TO_CALLBACK[name], run) for name in names if name in INTEGRATION_TO_CALLBACK and name != OWN
    ]
    return served + ([Tracked(AIM, lambda: AimTracker(run), run)] if AIM in names else [])
