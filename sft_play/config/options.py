"""The variables of commands that are no keys: what each means, for `sft-play COMMAND --help` and for docs/launching.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sft_play.config.call import CommandRow

VARIABLES: Mapping[str, str] = {
    "CONFIG": "a YAML file, or a preset's name",
    "RUN": "a run's name or folder",
    "CLUSTER": "an inventory of machines, which `CLUSTER_HOSTS=...` and the like change for one call, see [home cluster](home-cluster.md)",
    "RUN_NAME": "the run's name: letters, digits, `_ . + = -`",
    "MODEL": "a model of the hub or a folder, instead of a run, see [evaluation](evaluation.md)",
    "CHECKPOINT": "`best`, `last` or `step-000040` (`step-40`, `40`) instead of the final model; `eval` takes `base` too",
    "DATA": "rows to score that are not the run's, see [evaluation](evaluation.md)",
    "NUM_GPUS": "processes on this machine",
    "NUM_NODES": "number of machines, see [several machines](#several-machines-by-hand)",
    "NODE_RANK": "which of them this one is, from 0",
    "MASTER_ADDR": "the address of node 0",
    "MASTER_PORT": "its port, 29500; on one machine a free port is chosen",
    "ACCELERATE_CONFIG": "a file of accelerate, see [below](#an-accelerate-config-of-your-own)",
    "DEEPSPEED_CONFIG": "a JSON of DeepSpeed, see [below](#a-deepspeed-json-of-your-own)",
    "HARDWARE": "plan for that hardware instead of this machine's, see [planning](planning.md)",
    "SOURCE": "where the memory's figures come from: `formula`, `trace` or `probe`, see [planning](planning.md)",
    "SCALE": "figures by number of devices, such as `1..4,8`, see [forecast](forecast.md)",
    "PRICE_PER_HOUR": "of one machine, for the cost of the run, see [forecast](forecast.md)",
    "WHY": "`1`: training and `resume` show the plan with its reasons, and the launch with its variables; `plan` shows reasons unless it is `0`",
    "TENSORBOARD_PORT": "instead of 6006; the next free port if taken",
    "MIXED_PRECISION": "answer for `setup-accelerate`: `no`, `bf16` or `fp16`",
    "STRATEGY": "answer for `setup-accelerate`; what `soak` trains with",
    "RANK": "whose log is shown (rank 0's)",
    "FOLLOW": "`1`: what is added to the log is shown too, until the run ends",
    "BENCH": "`1`: train some steps on each machine by itself, speed and memory beside the plan, see [cluster](cluster.md)",
    "KILLS": "how often `soak` kills, see [reliability](reliability.md)",
    "SEED": "what the moments of `soak` are drawn from",
    "PROMPT": "one question, see [use](use.md)",
    "INPUT": "a file of questions",
    "OUTPUT": "the file for the answers",
    "OUT": "what is written: the merged model's folder, the file of `setup-accelerate`, the page of `inspect`, the table of `soak`, "
    "the script of `slurm`, the folder for the manifests of `kubernetes`",
    "HOST": "where a server listens: 127.0.0.1 unless given; `serve` then wants a token, see [security](security.md), and "
    "`tensorboard` takes this machine only",
    "PORT": "of `serve`",
    "A": "a run, checkpoint or model (`NAME`, `NAME@step-000040`, `NAME@model`, a folder) whose stamp `stamp` compares",
    "B": "with that of this one",
    "BENCHMARKS": "tasks of lm-evaluation-harness",
    "BENCHMARK_LIMIT": "samples of each task",
    "SPLIT": "which rows `inspect` shows: `train` or `validation`",
    "SEARCH": "only rows with these words",
    "HTML": "`1`: as a page, see [data](data.md)",
    "SUBMIT": "`1`: hand the script to `sbatch`, see [Slurm](slurm.md)",
    "RUNS": "the runs that are compared",
    "METRIC": "by which score",
    "ROWS": "how many answers or rows are shown",
    "JSON": "`1`: JSON on stdout instead of text",
}
"""Name -> meaning, as docs/launching.md has it."""
LINK = re.compile(r"\[[^]]*\]\((#?)([^)]*)\)")


def command_help(name: str, about: str, row: CommandRow) -> str:
    """Returns what `sft-play NAME --help` prints."""
    taken = [option for option in VARIABLES if option in row.options]
    lines = [f"sft-play {name} NAME=value ...", "", f"  {about}", ""]
    width = max(map(len, [*taken, "SECTION_KEY"])) + 2
    lines += [f"  {option:<{width}}{LINK.sub(_place, VARIABLES[option])}" for option in taken]
    if row.overrides:
        lines.append(f"  {'SECTION_KEY':<{width}}any key of docs/configuration.md: `TRAIN_BATCH_SIZE=1` is `train.batch_size: 1`")
    return "\n".join(lines if taken or row.overrides else [*lines, "  it takes no variables"])


def _place(link: re.Match[str]) -> str:
    return f"docs/{'launching.md#' if link[1] else ''}{link[2]}"


def render_tables(commands: Mapping[str, CommandRow]) -> str:
    """Returns both tables of variables of docs/launching.md: by command, and by meaning."""
    alike: dict[tuple[frozenset[str], bool], list[str]] = {}
    for name, row in commands.items():
        alike.setdefault((row.options, row.overrides), []).append(name)
    lines = ["| command | variables |", "|---|---|"]
    for (options, overrides), names in alike.items():
        words = [f"`{option}`" for option in VARIABLES if option in options] + (["keys"] if overrides else [])
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {', '.join(words) or 'none'} |")
    lines += ["", "| name | meaning |", "|---|---|", *(f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items())]
    return "\n".join(lines)
