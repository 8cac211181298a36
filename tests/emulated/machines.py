"""From a machine that a driver double describes to the runs of its workers, as the commands make them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.__main__ import COMMANDS
from sft_play.config.call import parse_call
from sft_play.files import write_json
from sft_play.launch.attempt import worker_arguments, write_launch_files
from sft_play.launch.environment import worker_environment
from sft_play.launch.job import job_of, read_options
from sft_play.model.resolve import resolve_model
from sft_play.plan.plan import CommandStrategy, Plan
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared
from tests.conftest import ROOT, on_machine
from tests.fake_cuda.guard import compiled
from tests.training_runs import make_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A run that is ready for its worker, and what the launch would give to it."""

    plan: Plan
    environment: Mapping[str, str]
    arguments: Sequence[str]
    """Of `accelerate launch`."""
    run: RunFolder


STRATEGIES: Mapping[str, CommandStrategy] = {"train": "single", "train-distributed": "auto", "train-fsdp": "fsdp2"}


def ready(path: Path, command: str, words: Sequence[str], environment: Mapping[str, str]) -> list[Start]:
    """Do what `make COMMAND WORDS` does before its workers start, with prepared rows; return one start per rank."""
    with on_machine(environment):
        call = parse_call([command, *words], COMMANDS)
        options, loaded = read_options(call, call.load_config(), STRATEGIES[command])
        job = job_of(call, loaded, options)
        run = RunFolder(path)
        path.mkdir(parents=True)
        prepared = Prepared(
            model=resolve_model(loaded.config.model),
            train=make_rows(path / "rows", 24, seed=1),
            validation=make_rows(path / "held-out", 6, seed=2),
        )
        prepared.save(run.prepared)
        plan = job.plan(prepared)
        write_launch_files(job, plan, run)
        variables = worker_environment(
            plan, job.node, os.environ, cpu_threads=1, devices=job.hardware.devices
        ).variables
    world = {name: str(plan.world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")} if plan.world_size > 1 else {}
    ranks = [{**variables, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(plan.world_size)]
    arguments = worker_arguments(run, job.node, plan=plan)[3:]
    return [Start(plan=plan, environment=rank if world else variables, arguments=arguments, run=run) for rank in ranks]


def steps(
    starts: Mapping[str, Sequence[Start]], cache: Path | None = None, **world: str
) -> dict[str, list[dict[str, Any]]]:
    """Run the workers, each a child of one process; return what each rank reports.

    With `cache`, the folder of the guard, they run on fake GPUs one after another; without it, together on this
    machine's devices.
    """
    jobs = [
        {
            "run": str(start.run.path),
            "arguments": list(start.arguments),
            "environment": {**start.environment, **world},
            "report": str(start.run.path / f"report-{rank}.json"),
        }
        for ranks in starts.values()
        for rank, start in enumerate(ranks)
    ]
    path = next(iter(starts.values()))[0].run.path.parent / "jobs.json"
    write_json(path, jobs)
    command = [sys.executable, "-m", "tests.fake_cuda.worker", str(path), *([str(compiled(cache))] if cache else [])]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=500,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    reports = iter([json.loads(Path(job["report"]).read_text(encoding="utf-8")) for job in jobs])
    return {name: [next(reports) for _ in ranks] for name, ranks in starts.items()}


def together(starts: Sequence[Start]) -> list[dict[str, Any]]:
    """Run the ranks of one run on this machine's devices; return what each reports. Their store is in this process, as
    torchrun's is.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return steps({"": starts}, **(world if len(starts) > 1 else {}))[""]
