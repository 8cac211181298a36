"""Rules of the `slurm` section: what becomes part of a batch script can hold nothing that sbatch or a shell would read otherwise. No effects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from sft_play.config.rule import Origins, problem
from sft_play.config.schema import Config
from sft_play.config.types import shown
from sft_play.config.yaml_source import Node
from sft_play.errors import HUB_LOGIN, UserError, without_tokens

NAME = re.compile(r"[\w.,@:+/-]+")
"""A name of the cluster's (partition, account, ...), or several between commas."""
CONSTRAINT = re.compile(r"[\w.,@:+/&|*()\[\]-]+")
MEMORY = re.compile(r"[0-9]+[KMGT]?")
TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?|(\d+)(?::(\d+)(?::(\d+))?)?)", re.ASCII)
"""`days-hours[:minutes[:seconds]]`, `minutes[:seconds]` or `hours:minutes:seconds`: what sbatch takes."""
ARRAY = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%[1-9]\d*)?", re.ASCII)
RANGE = re.compile(r"(\d+)-(\d+)(?::(\d+))?", re.ASCII)
OPTION = re.compile(r"--([a-z][a-z0-9-]*)(=[^\"\\]+)?")
OF_KEYS: Mapping[str, str] = {
    "partition": "slurm.partition", "account": "slurm.account", "qos": "slurm.qos", "time": "slurm.time", "mem": "slurm.memory",
    "constraint": "slurm.constraint", "array": "slurm.array", "signal": "slurm.warning_seconds", "cpus-per-task": "slurm.cpus_per_gpu",
    "nodes": "NUM_NODES", "gpus-per-node": "NUM_GPUS", "job-name": "RUN_NAME", "output": "OUT",
}  # fmt: skip
"""Options of sbatch -> the key or variable that sets them here."""
OURS = frozenset({
    "ntasks", "ntasks-per-node", "ntasks-per-gpu", "gpus", "gpus-per-task", "gpus-per-socket", "gres", "cpus-per-gpu", "requeue", "no-requeue",
    "open-mode", "export", "export-file", "get-user-env", "error", "input", "chdir", "wrap", "parsable", "test-only", "wait", "overcommit",
    "no-kill", "kill-on-invalid-dep", "hold", "help", "usage", "version", "ignore-pbs", "clusters", "quiet", "verbose",
})  # fmt: skip
"""Options that the script decides, or that are for whoever types `sbatch`."""
TYPED_THERE = frozenset({"hold", "wait", "clusters", "test-only", "parsable", "quiet", "verbose", "kill-on-invalid-dep"})


def seconds_of(time: str) -> int | None:
    """Returns the seconds of a time as sbatch reads it; `None` where it is none."""
    match = TIME.fullmatch(time)
    if not match:
        return None
    days, hours, minutes, seconds, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match.group(1) is not None:
        return days * 86400 + hours * 3600 + minutes * 60 + seconds
    if match.group(7) is not None:
        return first * 3600 + second * 60 + third
    return first * 60 + second


def _carried(time: str, seconds: int) -> str | None:
    """Returns what was meant by a time with 60 or more minutes or seconds behind a larger unit, `None` for any other.

    Slurm adds them up: `25:99` ends a job after 26 minutes and 39 seconds. `seconds`: what it makes of it.
    """
    match = TIME.fullmatch(time)
    assert match, "the caller has read it"
    _, _, minutes, rest, first, second, third = match.groups()
    if not any(part and int(part) >= 60 for part in (minutes, rest, second, third)):
        return None
    days, hours = divmod(seconds // 3600, 24) if match.group(1) is not None else (0, seconds // 3600)
    clock = f"{hours:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    if second is None or third is not None:
        return f"did you mean `{f'{days}-' if match.group(1) is not None else ''}{clock}`?"
    longer = int(first) * 60 + int(second)
    return f"did you mean `{longer // 60:02}:{longer % 60:02}:00` (hours:minutes:seconds) or `{seconds // 60}:{seconds % 60:02}` (minutes:seconds)?"


def indices(config: Config, origins: Origins) -> Iterator[UserError]:
    """Ranges of an array that sbatch would refuse: those that run backwards, or without a step."""
    array = config.slurm.array
    for low, high, step in RANGE.findall(array) if array and ARRAY.fullmatch(array) else ():
        text = f"`slurm.array` is `{_shown(str(array))}`, "
        if int(high) < int(low):
            yield problem(
                origins, "slurm.array", f"{text}whose range `{low}-{high}` runs backwards", f"did you mean `{high}-{low}`?"
            )
        elif step and not int(step):
            yield problem(
                origins,
                "slurm.array",
                f"{text}whose range `{low}-{high}` has a step of 0",
                f"`{low}-{high}:2` is every second index",
            )


def names(config: Config, origins: Origins) -> Iterator[UserError]:
    """Names, amounts and indices, each as sbatch takes it."""
    slurm = config.slurm
    expected: dict[str, tuple[str | None, re.Pattern[str], str]] = {
        "slurm.partition": (slurm.partition, NAME, "the name of a partition, as `sinfo -s` lists them"),
        "slurm.account": (slurm.account, NAME, "the name of an account"),
        "slurm.qos": (slurm.qos, NAME, "the name of a quality of service"),
        "slurm.gpu_type": (slurm.gpu_type, NAME, "the cluster's name of a GPU, such as `h100`"),
        "slurm.constraint": (slurm.constraint, CONSTRAINT, "features without blanks, such as `ib&h100`"),
        "slurm.memory": (slurm.memory, MEMORY, "a number with `K`, `M`, `G` or `T`, such as `200G`"),
        "slurm.array": (slurm.array, ARRAY, "indices such as `0-3`, `1,5,7` or `1-10%1`"),
    }
    for key, (text, pattern, words) in expected.items():
        if text is not None and not pattern.fullmatch(text):
            yield problem(origins, key, f"`{key}` is `{_shown(text)}`; expected {words}")


def times(config: Config, origins: Origins) -> Iterator[UserError]:
    """The job's time, and room in it for the warning before its end."""
    slurm = config.slurm
    seconds = seconds_of(slurm.time)
    if seconds and (hint := _carried(slurm.time, seconds)):
        text = f"`slurm.time` is `{_shown(slurm.time)}`; expected less than 60 minutes beside hours, and less than 60 seconds beside minutes"
        yield problem(origins, "slurm.time", text, hint)
    elif not seconds:
        text = f"`slurm.time` is `{_shown(slurm.time)}`; expected a time as sbatch takes it"
        yield problem(origins, "slurm.time", text, "`24:00:00`, `2-12` (days-hours) or `90` (minutes)")
    elif seconds <= slurm.warning_seconds:
        key = "slurm.time" if origins.get("slurm.warning_seconds", "default") == "default" else "slurm.warning_seconds"
        text = (
            f"`slurm.warning_seconds` is {slurm.warning_seconds}, and the job ends after {seconds} s (`slurm.time: {slurm.time}`)"
        )
        yield problem(origins, key, text, "ask for more time: the run saves and leaves when it is warned")


def setup(config: Config, origins: Origins) -> Iterator[UserError]:
    """Lines for the shell: any, but for control characters and tokens."""
    for index, line in enumerate(config.slurm.setup):
        name = f"slurm.setup[{index}]"
        if _controls(line.replace("\n", "").replace("\t", "")):
            yield problem(origins, "slurm.setup", f"`{name}` holds a control character")
        elif without_tokens(line) != line:
            hint = f"{HUB_LOGIN} keeps the hub's token in a file that only you can read; a line such as `source ~/.tokens` reads others"
            yield problem(origins, "slurm.setup", f"`{name}` holds what looks like an access token", hint)


def options(config: Config, origins: Origins) -> Iterator[UserError]:
    """Further options: one each, and none that is decided elsewhere."""
    for index, text in enumerate(config.slurm.options):
        name = f"slurm.options[{index}]"
        match = OPTION.fullmatch(text)
        if not match or _controls(text):
            hint = "a long option each: `--exclusive`, `--mail-type=END`; values hold no quotes and no backslash"
            yield problem(origins, "slurm.options", f"`{name}` is `{_shown(text)}`; expected an option of sbatch", hint)
        elif match.group(1) in OF_KEYS:
            hint = f"set `{OF_KEYS[match.group(1)]}`"
            yield problem(origins, "slurm.options", f"`{name}` is `{_shown(text)}`, which has a setting of its own", hint)
        elif match.group(1) in OURS:
            typed = match.group(1) in TYPED_THERE
            hint = (
                f"type it when you submit: `sbatch --{match.group(1)} SCRIPT`"
                if typed
                else "leave it away: the script needs its own"
            )
            yield problem(origins, "slurm.options", f"`{name}` is `{_shown(text)}`, which is not for the script", hint)


def _controls(text: str) -> bool:
    """Whether a text holds anything that ends a line or moves a terminal's cursor."""
    return any(ord(letter) < 32 or 127 <= ord(letter) < 160 or letter in "\u2028\u2029" for letter in text)


def _shown(text: str) -> str:
    return shown(Node(text))


RULES = (names, indices, times, setup, options)
