"""`python -m sft_play COMMAND NAME=value ...`: a table of commands, dispatched by import; prints errors, returns exit codes."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import sys

from sft_play.config.call import Command
from sft_play.errors import UserError

COMMON = frozenset({"CONFIG", "JSON"})
LAUNCH = COMMON | {
    "SOURCE",
    "RUN_NAME",
    "NUM_GPUS",
    "NUM_NODES",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ACCELERATE_CONFIG",
    "TENSORBOARD_PORT",
    "WHY",
}
RUN = frozenset({"RUN", "JSON"})
SPINS = "1000"
"""Rounds for which a thread of torch's OpenMP (libgomp) waits with its core in use. By itself it takes 300,000 where there is a core for each
thread: once another program has one of them, every parallel region waits for a whole time slice (more than ten times slower with two
threads on two busy cores). 1,000 is what libgomp itself takes where threads outnumber cores."""


COMMANDS: dict[str, Command] = {
    "quickstart": Command("sft_play.quickstart:main", "fine-tune and score a small real model on this machine's CPU", LAUNCH),
    "config": Command("sft_play.config.call:show", "the resolved configuration, each key with its origin", COMMON | {"RUN"}),
    "plan": Command(
        "sft_play.launch.rehearse:main",
        "memory, batch, steps and time before training, with reasons",
        COMMON
        | {
            "HARDWARE",
            "NUM_GPUS",
            "NUM_NODES",
            "RUN",
            "DEEPSPEED_CONFIG",
            "ACCELERATE_CONFIG",
            "SCALE",
            "PRICE_PER_HOUR",
            "SOURCE",
            "WHY",
        },
    ),
    "data": Command(
        "sft_play.prepare:data", "read, check and cache the data as tokens; JSON=1 gives the manifests", COMMON | {"RUN"}
    ),
    "gpu-info": Command("sft_play.plan.commands:gpu_info", "the GPUs of this machine", frozenset({"JSON"}), overrides=False),
    "memory-check": Command(
        "sft_play.plan.commands:memory_check",
        "memory in use and free, and what CONFIG would need",
        COMMON | {"RUN", "NUM_GPUS", "SOURCE"},
    ),
    "doctor": Command("sft_play.doctor:main", "findings about this environment, each with its remedy", COMMON),
    "setup-accelerate": Command(
        "sft_play.launch.settings:main",
        "detect the hardware and write accelerate_configs/local.yaml",
        frozenset({"JSON", "NUM_GPUS", "NUM_NODES", "MIXED_PRECISION", "STRATEGY", "OUT"}),
        overrides=False,
    ),
    "train": Command("sft_play.launch.commands:train", "one process on the best device here", LAUNCH),
    "train-tb": Command("sft_play.tensorboard:train", "the same, with TensorBoard", LAUNCH),
    "train-distributed": Command("sft_play.launch.commands:train_distributed", "all GPUs, or NUM_GPUS processes", LAUNCH),
    "train-distributed-tb": Command("sft_play.tensorboard:train", "the same, with TensorBoard", LAUNCH),
    "train-deepspeed": Command(
        "sft_play.launch.commands:train_deepspeed", "the same under DeepSpeed ZeRO", LAUNCH | {"DEEPSPEED_CONFIG"}
    ),
    "train-deepspeed-tb": Command("sft_play.tensorboard:train", "the same, with TensorBoard", LAUNCH | {"DEEPSPEED_CONFIG"}),
    "train-fsdp": Command("sft_play.launch.commands:train_fsdp", "the same under FSDP2", LAUNCH),
    "resume": Command(
        "sft_play.launch.commands:resume", "continue from a run's newest valid checkpoint", (LAUNCH | {"RUN"}) - {"CONFIG"}
    ),
    "eval": Command(
        "sft_play.evaluation.evaluate:main",
        "score a run, a checkpoint or a plain MODEL, on its own rows or on DATA; BENCHMARKS= for standard ones",
        RUN | {"CHECKPOINT", "MODEL", "CONFIG", "DATA", "BENCHMARKS", "BENCHMARK_LIMIT"},
    ),
    "compare": Command(
        "sft_play.evaluation.compare:main",
        "RUNS side by side: configuration, speed, scores with paired intervals, where they differ most",
        frozenset({"RUNS", "METRIC", "ROWS", "DATA", "JSON"}),
        overrides=False,
    ),
    "inspect": Command(
        "sft_play.inspection:main",
        "samples of the prepared data with the loss mask visible; HTML=1 for a page with statistics and search",
        COMMON | {"RUN", "SPLIT", "ROWS", "SEARCH", "HTML", "OUT"},
    ),
    "infer": Command(
        "sft_play.infer:main",
        "chat with a RUN or any MODEL; PROMPT= for one answer, INPUT= and OUTPUT= for files",
        RUN | {"MODEL", "PROMPT", "INPUT", "OUTPUT", "CHECKPOINT"},
    ),
    "merge": Command("sft_play.export:main", "adapters merged into a model that any tool loads", RUN | {"OUT", "CHECKPOINT"}),
    "serve": Command(
        "sft_play.serve:main",
        "an OpenAI-compatible endpoint on 127.0.0.1, or HOST= with a token",
        RUN | {"MODEL", "HOST", "PORT", "CHECKPOINT"},
    ),
    "cluster-check": Command(
        "sft_play.cluster.preflight:main",
        "whether all machines of CLUSTER are ready for CONFIG: reachable, alike, connected; BENCH=1 trains some steps on each",
        COMMON | {"CLUSTER", "RUN", "MASTER_PORT", "BENCH"},
    ),
    "cluster-install": Command(
        "sft_play.cluster.install:main",
        "make the environment on every machine of CLUSTER",
        frozenset({"CLUSTER", "JSON"}),
        overrides=False,
    ),
    "train-cluster": Command(
        "sft_play.cluster.train:main",
        "one run over all machines of CLUSTER, started from here over SSH",
        COMMON | {"CLUSTER", "RUN_NAME", "RUN", "MASTER_PORT", "DEEPSPEED_CONFIG"},
    ),
    "cluster-status": Command(
        "sft_play.cluster.status:main",
        "what runs on each machine of CLUSTER, and how far it is",
        frozenset({"CLUSTER", "RUN", "JSON"}),
        overrides=False,
    ),
    "cluster-logs": Command(
        "sft_play.cluster.status:logs",
        "a rank's log, gathered on the first machine; FOLLOW=1 follows it",
        frozenset({"CLUSTER", "RUN", "RANK", "FOLLOW", "JSON"}),
        overrides=False,
    ),
    "cluster-stop": Command(
        "sft_play.cluster.status:stop",
        "save and stop RUN on all machines of CLUSTER",
        frozenset({"CLUSTER", "RUN", "JSON"}),
        overrides=False,
    ),
    "slurm": Command(
        "sft_play.schedulers.slurm:main",
        "an sbatch script for CONFIG, from the plan; SUBMIT=1 submits it",
        COMMON | {"HARDWARE", "NUM_GPUS", "NUM_NODES", "RUN_NAME", "OUT", "SUBMIT", "DEEPSPEED_CONFIG"},
    ),
    "kubernetes": Command(
        "sft_play.schedulers.kubernetes:main",
        "manifests for CONFIG, from the plan",
        COMMON | {"HARDWARE", "NUM_GPUS", "NUM_NODES", "RUN_NAME", "OUT", "DEEPSPEED_CONFIG"},
    ),
    "runs": Command(
        "sft_play.launch.runs:main",
        "the list of runs: state, steps, scores, speed, memory, time, cost; SORT=-tokens_per_second WHERE='method=lora' CSV=1",
        frozenset({"JSON", "CSV", "SORT", "WHERE", "PRICE_PER_HOUR"}),
        overrides=False,
    ),
    "report": Command(
        "sft_play.report.page:main", "one HTML file with everything that a RUN left", RUN | {"OUT"}, overrides=False
    ),
    "card": Command("sft_play.report.card:main", "the hub's model card of a RUN", RUN | {"CHECKPOINT", "OUT"}, overrides=False),
    "push": Command(
        "sft_play.report.card:push",
        "a RUN's model to the hub as REPO: shows what would go; YES=1 uploads it, PRIVATE=0 publicly",
        RUN | {"CHECKPOINT", "REPO", "YES", "PRIVATE"},
        overrides=False,
    ),
    "ui": Command(
        "sft_play.report.server:main",
        "all runs in a browser, live, on 127.0.0.1, or HOST= with a token",
        frozenset({"HOST", "PORT", "JSON"}),
        overrides=False,
    ),
    "watch": Command(
        "sft_play.launch.watch:main",
        "the live panel of a RUN until it ends; lines where there is no terminal",
        RUN,
        overrides=False,
    ),
    "profile": Command(
        "sft_play.profile:main",
        "where the time of some steps goes: of a RUN with `train.profile`, or of a few steps of CONFIG",
        LAUNCH | {"RUN"},
    ),
    "sweep": Command(
        "sft_play.sweep:main",
        "a run for each combination of values in SWEEP, planned first, ranked at the end; SLURM=1 for a job array",
        COMMON | {"SWEEP", "RUN_NAME", "NUM_GPUS", "PRICE_PER_HOUR", "SLURM", "SUBMIT", "HARDWARE", "NUM_NODES"},
    ),
    "stop": Command("sft_play.launch.runs:stop", "save and stop a RUN", RUN, overrides=False),
    "logs": Command(
        "sft_play.launch.runs:logs", "the log of a rank; FOLLOW=1 follows it", RUN | {"RANK", "FOLLOW"}, overrides=False
    ),
    "stamp": Command(
        "sft_play.stamps:main",
        "what made a RUN, a checkpoint or a model, or what differs between A and B",
        RUN | {"A", "B", "CHECKPOINT"},
        overrides=False,
    ),
    "bench": Command(
        "sft_play.bench:main",
        "measure this machine and some training steps, so that the forecast is right",
        COMMON | {"NUM_GPUS"},
    ),
    "soak": Command(
        "sft_play.soak:main",
        "kill -9 a training KILLS times at random moments, continue each time, compare with an undisturbed run",
        COMMON | {"KILLS", "STRATEGY", "SEED", "RUN_NAME", "OUT"},
    ),
    "tensorboard": Command(
        "sft_play.tensorboard:start",
        "curves of all runs",
        frozenset({"JSON", "RUN", "HOST", "TENSORBOARD_PORT"}),
        overrides=False,
    ),
    "tensorboard-stop": Command(
        "sft_play.tensorboard:stop", "end the TensorBoard that this project started", frozenset({"JSON"}), overrides=False
    ),
    "init": Command(
        "sft_play.init:main",
        "a Makefile, the presets and the examples in an empty folder, where SFT-Play is installed without a clone",
        frozenset(),
        overrides=False,
    ),
    "help": Command("sft_play.__main__:show_help", "this list", frozenset(), overrides=False),
}


MAKEFILE_TARGETS = {
    "install": "a virtual environment with the pinned packages; every target makes it when needed",
    "test": "the suite on a CPU; TESTS=tests/unit for a part",
    "check": "the fast part of the suite, with lint, types and layers",
    "test-all": "the long tests too",
    "test-gpu": "the tests that need a GPU",
    "audit": "known holes in the pinned packages, by pip-audit",
    "accept-gpu": "on one GPU, offline, within 25 minutes: what works, how exactly, how fast; STEPS=8-12 for a part",
    "bench-training": "training compared with transformers' Trainer and TRL",
    "bench-evaluation": "answers a second compared with plain `generate`",
    "bench-saving": "what a checkpoint costs",
    "bench-preparation": "rows prepared a second compared with a plain `datasets.map`",
    "render": "write every rendered file again",
    "format": "format the code",
}
"""Of the Makefile itself -> what the user reads in `make help`."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns the exit code of contract section 7; under make, which has its own, it ends make."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # libgomp reads it when torch is loaded, here or in a worker
    if "--from-make" not in arguments:
        return _run(arguments)
    from sft_play.launch.process import end_make

    try:
        code = _run(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    return end_make(code)


def _run(arguments: list[str]) -> int:
    try:
        from sft_play.config.command_line import parse_call
        from sft_play.launch.process import console_may_go, ended_by_signals
        from sft_play.runs.folder import forget_consent, give_consent

        forget_consent()
        if arguments == ["--version"]:
            print(f"sft-play {importlib.metadata.version('sft-play')}")
            return 0
        if arguments[:1] == ["help"] and arguments[1:2] and arguments[1] in COMMANDS:
            return show_command(arguments[1])
        if arguments[:1] and arguments[0] in COMMANDS and {"-h", "--help"}.intersection(arguments[1:]):
            return show_command(arguments[0])
        call = parse_call(arguments or ["help"], COMMANDS, targets=MAKEFILE_TARGETS)
        if call.trusts_code:
            give_consent("model")
        module, function = COMMANDS[call.command].target.split(":")
        with contextlib.ExitStack() as stack:
            if "RUN_NAME" in COMMANDS[call.command].options:  # a training
                stack.enter_context(console_may_go())
                stack.enter_context(ended_by_signals())
            return int(getattr(importlib.import_module(module), function)(call))
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
    except SystemExit as stop:  # a stop that came while no worker lived to be told of it
        if name := getattr(stop, "signal", None):
            print(f"stopped by {name}", file=sys.stderr)
        raise
    except BrokenPipeError:  # `make config | head`: the reader has gone; as shells do, say that the command did not end by itself
        sys.stderr.close()
        return 141


def show_help(_: object) -> int:
    """Prints every command with one line."""
    width = max(map(len, COMMANDS)) + 2
    print("make COMMAND NAME=value ..., or sft-play COMMAND NAME=value ...\n")
    for name, command in COMMANDS.items():
        print(f"  {name:<{width}}{command.help}")
    print("\nonly make, in a clone\n")
    for name, text in MAKEFILE_TARGETS.items():
        print(f"  {name:<{width}}{text}")
    print("\n`sft-play COMMAND --help` and docs/launching.md list the variables of each command")
    return 0


def show_command(name: str) -> int:
    """Prints what a command does and the variables that it takes."""
    from sft_play.config.call import command_help

    print(command_help(name, COMMANDS[name]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
