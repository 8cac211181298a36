"""From a machine that a driver double describes to the runs of its workers, as the commands make them."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from sft_play.__main__ import COMMANDS
from sft_play.config.call import parse_call
from sft_play.files import write_json
from sft_play.launch.attempt import write_launch_files
from sft_play.launch.environment import worker_environment
from sft_play.launch.job import job_of
from sft_play.launch.options import read_options
from sft_play.model.resolve import resolve_model
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared
from tests.conftest import ROOT
from tests.fake_cuda.guard import compiled
from tests.training_runs import make_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A run that is ready for its worker, and what the launch would give to it."""

    plan: Plan
    environment: Mapping[str, str]
    run: RunFolder


def ready(path: Path, words: Sequence[str], environment: Mapping[str, str]) -> Start:
    """Does what `make train WORDS` does before its workers start, with rows that are already prepared."""
    with on_machine(environment):
        call = parse_call(["train", *words], COMMANDS)
        options, loaded = read_options(call, call.load_config(), "single")
        job = job_of(call, loaded, options)
        run = RunFolder(path)
        path.mkdir(parents=True)
        prepared = Prepared(model=resolve_model(loaded.config.model), train=make_rows(path / "rows", 24, seed=1), validation=None)
        prepared.save(run.prepared)
        plan = job.plan(prepared)
        write_launch_files(job, plan, run)
        variables = worker_environment(plan, job.node, os.environ, cpu_threads=1).variables
    return Start(plan=plan, environment=variables, run=run)


@contextlib.contextmanager
def on_machine(environment: Mapping[str, str]) -> Iterator[None]:
    """This process is on the machine that `environment` describes: a child would find the doubles by its `PYTHONPATH`."""
    machine = json.loads(Path(environment["NVML_DOUBLE"]).read_text(encoding="utf-8"))
    real, kernel = sys.modules.get("pynvml"), os.uname()
    named = os.uname_result((kernel[0], kernel[1], machine["release"] or kernel.release, *kernel[3:]))
    sys.modules["pynvml"] = importlib.import_module("tests.doubles.machine.pynvml")
    try:
        with mock.patch.dict(os.environ, environment, clear=True), mock.patch("os.uname", lambda: named):
            yield
    finally:
        del sys.modules["pynvml"]
        if real is not None:
            sys.modules["pynvml"] = real


def steps(starts: Mapping[str, Start], cache: Path) -> dict[str, dict[str, Any]]:
    """Runs the workers on fake GPUs, one process that imports torch for all; returns what each reports."""
    folder = next(iter(starts.values())).run.path.parent
    jobs = [
        {"run": str(start.run.path), "environment": dict(start.environment), "report": str(folder / f"{name}.json")}
        for name, start in starts.items()
    ]  # fmt: skip
    write_json(folder / "jobs.json", jobs)
    command = [sys.executable, "-m", "tests.fake_cuda.worker", str(compiled(cache)), str(folder / "jobs.json")]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=500, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in starts}
