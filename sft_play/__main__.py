"""`python -m sft_play COMMAND NAME=value ...`: a table of commands, dispatched by import; prints errors, returns exit
codes.
"""

from __future__ import annotations

import sft_play.isolation  # noqa: F401 - before anything else is imported

# isort: split
import contextlib
import errno
import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from sft_play.config.call import Call, Command, OtherEnvironment
from sft_play.errors import HardwareError, UserError, configured
from sft_play.files import NO_ROOM, UNWRITABLE, disk_problem, typed_path

PROCESSES = "JSON SOURCE NUM_GPUS NUM_NODES NODE_RANK MASTER_ADDR MASTER_PORT TENSORBOARD_PORT WHY"
LAUNCH = f"CONFIG {PROCESSES} RUN_NAME ACCELERATE_CONFIG"
SPINS = "1000"
"""Rounds for which a thread of torch's OpenMP (libgomp) spins. Its default is 300,000 if there is a core for each
thread: when another program uses one of them, every parallel region waits for a complete time slice (more than ten
times slower with two threads on two busy cores). 1,000 is its default when threads outnumber cores.
"""


COMMANDS: dict[str, Command] = {
    "quickstart": Command(
        "sft_play.quickstart:main", "fine-tune and score a small real model on this machine's CPU", LAUNCH
    ),
    "config": Command(
        "sft_play.config.call:show", "the resolved configuration, each key with its origin", "CONFIG RUN JSON"
    ),
    "plan": Command(
        "sft_play.launch.rehearse:main",
        "memory, batch, steps and time before training, with reasons",
        "CONFIG RUN JSON SOURCE NUM_GPUS NUM_NODES ACCELERATE_CONFIG DEEPSPEED_CONFIG HARDWARE PRICE_PER_HOUR WHY",
    ),
    "data": Command(
        "sft_play.prepare:data",
        "read, check and cache the data as tokens; JSON=1 gives the manifests",
        "CONFIG RUN JSON",
    ),
    "gpu-info": Command("sft_play.plan.commands:gpu_info", "the GPUs of this machine", "JSON", overrides=False),
    "memory-check": Command(
        "sft_play.plan.commands:memory_check",
        "memory in use and free, and what CONFIG would need",
        "CONFIG RUN JSON SOURCE NUM_GPUS",
    ),
    "doctor": Command("sft_play.doctor:main", "findings about this environment, each with its remedy", "CONFIG JSON"),
    "setup-accelerate": Command(
        "sft_play.launch.settings:main",
        "detect the hardware and write accelerate_configs/local.yaml",
        "JSON NUM_GPUS NUM_NODES MIXED_PRECISION OUT STRATEGY",
        overrides=False,
    ),
    "train": Command("sft_play.launch.commands:train", "one process on the best device here", LAUNCH),
    "train-tb": Command("sft_play.tensorboard:train", "the same, with TensorBoard", LAUNCH),
    "train-distributed": Command("sft_play.launch.commands:train", "all GPUs, or NUM_GPUS processes", LAUNCH),
    "train-distributed-tb": Command("sft_play.tensorboard:train", "the same, with TensorBoard", LAUNCH),
    "train-deepspeed": Command(
        "sft_play.launch.commands:train", "the same under DeepSpeed ZeRO", f"{LAUNCH} DEEPSPEED_CONFIG"
    ),
    "train-deepspeed-tb": Command(
        "sft_play.tensorboard:train", "the same, with TensorBoard", f"{LAUNCH} DEEPSPEED_CONFIG"
    ),
    "train-fsdp": Command("sft_play.launch.commands:train", "the same under FSDP2", LAUNCH),
    "resume": Command(
        "sft_play.launch.commands:resume", "continue from a run's newest valid checkpoint", f"RUN {PROCESSES}"
    ),
    "eval": Command(
        "sft_play.evaluation.evaluate:main",
        "score a run, a checkpoint or a plain MODEL, on its own rows or on DATA",
        "CONFIG RUN JSON MODEL CHECKPOINT DATA",
    ),
    "compare": Command(
        "sft_play.evaluation.compare:main",
        "RUNS side by side: configuration, speed, scores with paired intervals, where they differ most",
        "JSON DATA METRIC ROWS RUNS",
        overrides=False,
    ),
    "inspect": Command(
        "sft_play.inspection:main",
        "samples of the prepared data with the loss mask visible; HTML=1 for a page with statistics and search",
        "CONFIG RUN JSON HTML OUT ROWS SEARCH SPLIT",
    ),
    "infer": Command(
        "sft_play.infer:main",
        "chat with a RUN or any MODEL; PROMPT= for one answer, INPUT= and OUTPUT= for files",
        "RUN JSON MODEL CHECKPOINT INPUT OUTPUT PROMPT SYSTEM",
    ),
    "merge": Command(
        "sft_play.model.use:main",
        "adapters merged into a model that any tool loads",
        "RUN JSON CHECKPOINT OUT",
        overrides=False,
    ),
    "serve": Command(
        "sft_play.serve.server:main",
        "an OpenAI-compatible endpoint on 127.0.0.1, or HOST= with a token",
        "RUN JSON MODEL CHECKPOINT HOST PORT",
        overrides=False,
    ),
    "cluster-check": Command(
        "sft_play.cluster.check:main",
        "whether all machines of CLUSTER are ready for CONFIG: reachable, alike, connected",
        "CONFIG RUN JSON CLUSTER CLUSTER_HOSTS MASTER_PORT",
    ),
    "cluster-install": Command(
        "sft_play.cluster.bring:install_all",
        "make the environment on every machine of CLUSTER",
        "JSON CLUSTER CLUSTER_HOSTS",
        overrides=False,
    ),
    "train-cluster": Command(
        "sft_play.cluster.train:main",
        "one run over all machines of CLUSTER, started from here over SSH",
        "CONFIG RUN JSON CLUSTER CLUSTER_HOSTS RUN_NAME MASTER_PORT DEEPSPEED_CONFIG",
    ),
    "cluster-status": Command(
        "sft_play.cluster.train:status",
        "the runs of each machine of CLUSTER",
        "JSON CLUSTER CLUSTER_HOSTS",
        overrides=False,
    ),
    "cluster-logs": Command(
        "sft_play.cluster.train:logs",
        "the log of a rank, from its machine; FOLLOW=1 follows it",
        "RUN JSON CLUSTER CLUSTER_HOSTS FOLLOW RANK",
        overrides=False,
    ),
    "cluster-stop": Command(
        "sft_play.cluster.train:stop",
        "save and stop RUN on all machines of CLUSTER",
        "RUN JSON CLUSTER CLUSTER_HOSTS",
        overrides=False,
    ),
    "slurm": Command(
        "sft_play.schedulers.slurm:main",
        "an sbatch script for CONFIG, from the plan; SUBMIT=1 submits it",
        "CONFIG JSON RUN_NAME NUM_GPUS NUM_NODES DEEPSPEED_CONFIG HARDWARE OUT SUBMIT PRICE_PER_HOUR WHY",
    ),
    "kubernetes": Command(
        "sft_play.schedulers.kubernetes:main",
        "manifests for CONFIG, from the plan",
        "CONFIG JSON RUN_NAME NUM_GPUS NUM_NODES DEEPSPEED_CONFIG HARDWARE OUT PRICE_PER_HOUR WHY",
    ),
    "runs": Command(
        "sft_play.launch.runs:main",
        "the list of runs: state, steps, scores, speed, memory, time, cost",
        "JSON PRICE_PER_HOUR",
        overrides=False,
    ),
    "report": Command(
        "sft_play.report.page:main", "one HTML file with everything that a RUN left", "RUN JSON OUT", overrides=False
    ),
    "card": Command(
        "sft_play.report.card:main", "the hub's model card of a RUN", "RUN JSON CHECKPOINT OUT", overrides=False
    ),
    "push": Command(
        "sft_play.report.card:push",
        "a RUN's model to the hub as REPO: shows what would go; YES=1 uploads it, PRIVATE=0 publicly",
        "RUN JSON CHECKPOINT MERGED PRIVATE REPO YES",
        overrides=False,
    ),
    "ui": Command(
        "sft_play.report.server:main",
        "all runs in a browser, live, on 127.0.0.1, or HOST= with a token",
        "JSON HOST PORT",
        overrides=False,
    ),
    "watch": Command(
        "sft_play.launch.panel:main",
        "the live panel of a RUN until it ends; lines without a terminal",
        "RUN JSON",
        overrides=False,
    ),
    "profile": Command(
        "sft_play.profile:main",
        "where the time of some steps goes: of a RUN with `train.profile`, or of a few steps of CONFIG",
        f"{LAUNCH} RUN",
    ),
    "sweep": Command(
        "sft_play.sweep:main",
        "a run for each combination of values in SWEEP, planned first, ranked at the end; SLURM=1 for a job array",
        "CONFIG JSON RUN_NAME NUM_GPUS NUM_NODES HARDWARE PRICE_PER_HOUR SLURM SUBMIT SWEEP",
    ),
    "stop": Command("sft_play.launch.runs:stop", "save and stop a RUN", "RUN JSON", overrides=False),
    "logs": Command(
        "sft_play.launch.runs:logs", "the log of a rank; FOLLOW=1 follows it", "RUN JSON FOLLOW RANK", overrides=False
    ),
    "stamp": Command(
        "sft_play.stamps:main",
        "what made a RUN, a checkpoint or a model, or what differs between A and B",
        "RUN JSON CHECKPOINT A B",
        overrides=False,
    ),
    "bench": Command(
        "sft_play.bench:main",
        "some steps of CONFIG: speed and memory compared with the plan, and measurements for the next forecast",
        "CONFIG JSON NUM_GPUS",
    ),
    "tensorboard": Command(
        "sft_play.tensorboard:start", "curves of all runs", "JSON TENSORBOARD_PORT", overrides=False
    ),
    "tensorboard-stop": Command(
        "sft_play.tensorboard:stop", "end the TensorBoard that this project started", "JSON", overrides=False
    ),
    "init": Command(
        "sft_play.init:main",
        "a Makefile, presets, examples and documents in an empty folder, where SFT-Play is installed without a clone",
        "",
        overrides=False,
    ),
    "help": Command("sft_play.__main__:show_help", "this list", "", overrides=False),
}


MAKEFILE_TARGETS = {
    "install": "a virtual environment with the pinned packages; every target makes it when needed",
    "install-unsloth": "Unsloth and what it pins, in an environment next to it that `tuning.backend: unsloth` uses",
    "test-ci": "all of the suite but the long tests, as CI runs it",
    "test-oldest": "a part of the suite with the oldest libraries that are supported",
    "test": "the suite on a CPU, some minutes; TESTS=tests/unit for a part",
    "check": "the fast part of the suite, with lint, types and layers",
    "test-all": "the long tests too",
    "test-gpu": "the tests that need a GPU",
    "audit": "known holes in the pinned packages, by pip-audit",
    "accept-gpu": "on one GPU, offline, in SECONDS=600: what works, how exactly, how fast; STEPS=8-12 for a part",
    "bench-training": "training compared with transformers' Trainer and TRL",
    "bench-evaluation": "answers a second compared with plain `generate`",
    "bench-saving": "what a checkpoint costs",
    "bench-preparation": "rows prepared a second compared with a plain `datasets.map`",
    "render": "write every rendered file again",
    "format": "format the code",
}
"""Targets of the Makefile only -> their text in `make help`."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code (`docs/launching.md`)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read by libgomp when torch is loaded, here or in a worker
    try:
        return _answer(arguments)
    except OtherEnvironment as other:
        words = [str(other.python), "-m", "sft_play", *arguments]
    if arguments == sys.argv[1:]:
        sys.stdout.flush()
        os.execv(words[0], words)
    return subprocess.call(words)  # the program that called this one continues after it


def _answer(arguments: list[str]) -> int:
    out = None
    try:
        from sft_play.config.call import command_help, parse_call
        from sft_play.launch.process import console_may_go, end_by_signals
        from sft_play.runs.folder import forget_consent, give_consent

        forget_consent()
        if arguments == ["--version"]:
            print(f"sft-play {importlib.metadata.version('sft-play')}")
            return 0
        first, second, *_ = *arguments, "", ""
        asked = first if {"-h", "--help"}.intersection(arguments[1:]) else second if first == "help" else ""
        if asked in COMMANDS:
            print(command_help(asked, COMMANDS[asked]))
            return 0
        call = parse_call(arguments or ["help"], COMMANDS, targets=MAKEFILE_TARGETS)
        configured[:] = call.configuration_words()
        if call.trusts_code:
            give_consent("model")
        out = typed_path(call.options["OUT"]) if "OUT" in call.options else None
        with contextlib.ExitStack() as stack:
            if {"RUN_NAME", "NODE_RANK"} & COMMANDS[call.command].options:  # a training
                stack.enter_context(console_may_go())
                stack.enter_context(end_by_signals())
            return _dispatch(call)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
    except SystemExit as stop:  # a stop while no worker was running
        if name := getattr(stop, "signal", None):
            print(f"stopped by {name}", file=sys.stderr)
        raise
    except BrokenPipeError:
        # `make config | head`: the reader has gone; return the code of a process that SIGPIPE ended.
        sys.stderr.close()
        return 141
    except OSError as error:
        problem = _path_problem(error, out)
        if problem is None:
            raise
        print(problem.render(), file=sys.stderr)
        return problem.exit_code


def _path_problem(error: OSError, out: Path | None) -> UserError | None:
    """Return the error for a user's mistake about a path (a name that is too long, an `OUT` that cannot be written, a
    working folder that is gone) or for a disk that is full or may not be used, or `None`.
    """
    if error.filename is None and error.errno == errno.ENOENT:  # of `os.getcwd`
        return UserError("the working folder has been removed", hint="`cd` to a folder that exists")
    if error.filename is None and error.errno in NO_ROOM:
        with Path(os.devnull).open("wb") as nowhere:  # or the rest of the output would fail again at exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return HardwareError(f"the output cannot be written: {disk_problem(error)}")
    if error.errno == errno.ENAMETOOLONG:
        return UserError(f"`{str(error.filename)[:80]}...` is longer than a file's name or path may be")
    if out is not None and Path(error.filename or "") in (out, *out.parents):
        text = f"`{error.filename}` cannot be written: {error.strerror}"
        return UserError(text, place="OUT", hint="OUT= takes another place")
    if error.filename is not None and error.errno in NO_ROOM | UNWRITABLE:
        return HardwareError(f"`{error.filename}` cannot be read or written: {error.strerror}")
    return None


def _dispatch(call: Call) -> int:
    from sft_play.runs.folder import require_home

    if call.command != "help":
        require_home()
        Path.cwd()  # raises where it has been removed
    module, function = COMMANDS[call.command].target.split(":")
    code = int(getattr(importlib.import_module(module), function)(call))
    sys.stdout.flush()
    return code


def show_help(_: object) -> int:
    """Print a line for every command."""
    width = max(map(len, COMMANDS)) + 2
    print("make COMMAND NAME=value ..., or sft-play COMMAND NAME=value ...\n")
    for name, command in COMMANDS.items():
        print(f"  {name:<{width}}{command.help}")
    print("\nonly make, in a clone\n")
    for name, text in MAKEFILE_TARGETS.items():
        print(f"  {name:<{width}}{text}")
    print("\n`sft-play COMMAND --help` and docs/launching.md list the variables of each command")
    return 0


if __name__ == "__main__":
    sys.exit(main())
