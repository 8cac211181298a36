"""Measure the CPU time of logging in a run, in which every second block of steps is logged at every step.

    python -m benchmarks.watching [steps=140] [block=1]

It trains quickstart's model on rows of one length through `python -m sft_play train`, with TensorBoard.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import MODEL, options_of
from sft_play.files import read_json, write_json
from sft_play.launch.attempt import worker_arguments
from sft_play.launch.environment import Node, free_port, loopback_interface, worker_environment
from sft_play.launch.node import WORKER_MODULE
from sft_play.plan.hardware import cpu_threads
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder

BLOCK = "WATCHING_BLOCK"
"""Environment variable of the worker: steps per block."""


def main(arguments: Sequence[str]) -> int:
    """Train and print medians of the blocks' CPU seconds per step; return 1 if logging costs more than 1 %."""
    options, _ = options_of(arguments, steps=140, block=1)
    with tempfile.TemporaryDirectory() as folder:
        rows, config = Path(folder) / "rows.jsonl", Path(folder) / "watched.yaml"
        row = {"completion": "one two three four five " * 20}
        rows.write_text("".join(json.dumps({"prompt": f"{number:04}"} | row) + "\n" for number in range(1000)))
        train = {"max_steps": 1, "warmup_steps": 0, "logging_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
        train |= {"global_batch_size": 2}
        settings = {
            "extends": str(Path("configs/quickstart.yaml").absolute()),
            "model": {"name": MODEL},
            "train": train,
            "data": {"sources": [{"path": str(rows)}], "validation": []},
        }
        write_json(config, settings)
        words = [f"CONFIG={config}", "RUN_NAME=watched"]
        command, places = [sys.executable, "-m", "sft_play", "train"], os.environ | {"RUNS_DIR": folder}
        subprocess.run([*command, *words], env=places, check=True, stdout=subprocess.DEVNULL)
        run, node = RunFolder(Path(folder) / "watched"), Node(master_port=free_port(), interface=loopback_interface())
        plan = replace(Plan.load(run.plan), steps=options["steps"])
        plan.save(run.plan)
        resolved = read_json(run.config)
        resolved["config"]["train"]["max_steps"] = options["steps"]
        write_json(run.config, resolved)
        variables = dict(worker_environment(plan, node, os.environ, cpu_threads=cpu_threads()).variables)
        variables[BLOCK] = str(options["block"])
        words = ["benchmarks.watching" if word == WORKER_MODULE else word for word in worker_arguments(run, node)]
        subprocess.run(words, env=variables, check=True)
        blocks = read_json(run.path / "watching.json")
    on, off = (median(blocks[name][1:]) for name in ("on", "off"))  # the first of each warms up
    print(
        json.dumps(
            {"on, CPU s a step": round(on, 4), "off, CPU s a step": round(off, 4), "ratio": round(on / off, 4)},
            indent=2,
        )
    )
    return int(on / off > 1.01)


def work() -> None:
    """Run the worker, and record the CPU time of each block."""
    from transformers import TrainerCallback

    from sft_play import train
    from sft_play.training.faults import end
    from sft_play.training.trainer import SftTrainer

    block, seconds, make = int(os.environ[BLOCK]), {"on": list[float](), "off": list[float]()}, SftTrainer.__init__

    class Blocks(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.spent, self.on = time.process_time(), True

        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step and state.global_step % block == 0:
                now = time.process_time()
                seconds["on" if self.on else "off"].append((now - self.spent) / block)
                self.spent, self.on = now, not self.on
                state.logging_steps = 1 if self.on else 10**9

        def on_train_end(self, args: Any, *_: Any, **__: Any) -> None:
            write_json(Path(args.output_dir) / "watching.json", seconds)

    @wraps(make)
    def initialise(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        self.add_callback(Blocks())

    SftTrainer.__init__ = initialise  # type: ignore[method-assign]
    end(train.main())


if __name__ == "__main__":
    if BLOCK in os.environ:
        work()
    else:
        sys.exit(main(sys.argv[1:]))
