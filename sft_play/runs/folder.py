"""A run's folder, `runs/NAME/`: the name of every path, which files in a folder from elsewhere are taken, what an
evaluation left.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from sft_play.errors import DataError, HardwareError
from sft_play.files import json_rows, open_plain, read_json_lines, read_object, text_sha256
from sft_play.text import as_typed

OWN = "SFT_PLAY_OWN_FOLDER"
"""Variable that names, to the workers of a node, its own folder inside the run's (`RunFolder.of_node`)."""


OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
"""What sets the offline mode of the hub's libraries; the first one is the user's to set too."""


def runs_folder() -> Path:
    """Return the folder of all runs: `$RUNS_DIR`, or `runs` in the working folder."""
    return Path(os.environ.get("RUNS_DIR") or "runs")


def run_path(name: str) -> Path | None:
    """Return the folder of the run called `name` or standing in the folder `name`; `None` where there is no such
    run.
    """
    candidates = [runs_folder() / name] if "/" not in name else []
    return next((path for path in [*candidates, Path(name)] if (path / "config.json").is_file()), None)


def is_offline() -> bool:
    """Whether `HF_HUB_OFFLINE` says that only what is on this machine is used."""
    return os.environ.get(OFFLINE[0], "").lower() in ("1", "true", "yes", "on")


def accelerate_default() -> Path | None:
    """Return the file that `accelerate config` writes where no other is named; `None` where there is none."""
    path = hub_folder() / "accelerate" / "default_config.yaml"
    return path if path.is_file() else None


def hub_folder() -> Path:
    """Return where the hub's libraries keep what they download: `$HF_HOME`, or `~/.cache/huggingface`."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(caches, "huggingface")).expanduser()


def cache_folder() -> Path:
    """Return the folder of what can be made again: `$SFT_PLAY_CACHE`, or `~/.cache/sft_play`."""
    return Path(os.environ.get("SFT_PLAY_CACHE") or Path.home() / ".cache" / "sft_play")


def extensions_folder() -> Path:
    """Return where torch keeps the extensions that it compiles: each environment has its own, or the build of one clone
    would replace what the ranks of another are about to load.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    environment = text_sha256(sys.prefix)[:12]
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions" / f"sft_play-{environment}")


def require_home() -> None:
    """Let `~` be `$SFT_PLAY_CACHE` where this user has no home, as in a container; raise `HardwareError` without that
    variable.
    """
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        if not os.environ.get("USER"):
            os.environ["USER"] = f"user{os.getuid()}"  # torch asks for a name
    # `Path.home` raises for a user without one.
    home, cache = os.path.expanduser("~"), os.environ.get("SFT_PLAY_CACHE")  # noqa: PTH111
    place = Path(home, ".cache", "sft_play")
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    if not os.environ.get("HOME") and home == "~":
        problem = "there is no HOME, and this user has no entry in `/etc/passwd`"
    elif not Path(home).is_dir():
        problem = f"HOME is `{home}`, which is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = f"HOME is `{home}`, and this user may not write to `{there}`"
    else:
        return
    if not cache:
        hint = "export SFT_PLAY_CACHE=/a/folder HF_HOME=/a/folder/hub, which this user may write to; or set HOME"
        raise HardwareError(f"{problem}: there is no place for caches", place="environment", hint=hint)
    os.environ["HOME"] = str(Path(cache).absolute())


class _Inside:
    """A path inside a run's folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunFolder, owner: type[RunFolder]) -> Path:
        return run.path / self.name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run's folder; creates nothing by itself."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def typed(self) -> str:
        """What to type after `RUN=` in this folder: the run's name where that finds it, else its folder."""
        by_name = run_path(self.name)
        if by_name and self.path.exists() and by_name.samefile(self.path):
            return as_typed(self.name)
        return as_typed(self.path if "/" in str(self.path) else self.path.absolute())

    @property
    def again(self) -> str:
        """A name for a run that repeats this one; a folder may be called what no run is."""
        return f"{re.sub(r'[^A-Za-z0-9_.+=-]+', '-', self.name)[:100].lstrip('_.+=-') or 'run'}-again"

    config = _Inside("config.json")
    """The resolved configuration: `{"config": ..., "origins": ...}`."""
    plan = _Inside("plan.json")

    @property
    def prepared(self) -> Path:
        """What preparation found out about model and data (`runs.prepared.Prepared`), on this machine."""
        own = Path(os.environ.get(OWN) or self.path)
        return (own if self.path in own.parents else self.path) / "prepared.json"

    def of_node(self, rank: int) -> RunFolder:
        """Return the folder for what a node other than 0 has of its own where all share this one: the model and data as
        it finds them.
        """
        return RunFolder(self.path / "nodes" / str(rank) / self.name)

    stamp = _Inside("stamp.json")
    accelerate = _Inside("accelerate.yaml")
    deepspeed = _Inside("deepspeed.json")
    events = _Inside("events.jsonl")
    """What happened to the run as a whole: started, resumed, finished, failed; one JSON object a line."""

    @property
    def tries(self) -> Path:
        """What `schedulers.entry` counts, beside the folder: a launch that ends before its workers start takes the
        folder away.
        """
        return self.path.with_name(f".{self.name}.tries.json")

    metrics = _Inside("metrics.jsonl")
    training_metrics = _Inside("training_metrics.json")
    logs = _Inside("logs")
    phase = _Inside("logs/phase.json")
    """What rank 0 is doing, for those who watch: `{"phase": ...}`."""

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.log"

    def rank_exit(self, rank: int) -> Path:
        """Where a worker records its own exit code and error, since torchrun turns every failure into 1."""
        return self.logs / f"exit-rank{rank}.json"

    def bad_rows(self, rank: int) -> Path:
        """The rows of a rank in a step whose loss or gradient was no number."""
        return self.logs / f"bad-rows-rank{rank}.json"

    def rank_stack(self, rank: int) -> Path:
        """The stacks of a rank that made no step, of each time it was asked."""
        return self.logs / f"stack-rank{rank}.txt"

    def rank_collectives(self, rank: int) -> Path:
        """The collective operations of a rank that made no step, as torch's flight recorder has them."""
        return self.logs / f"collectives-rank{rank}.json"

    def rank_holdings(self, rank: int) -> Path:
        """What a rank really held: elements of parameters, gradients, optimizer states; rows trained and scored."""
        return self.logs / f"holdings-rank{rank}.json"

    tensorboard = _Inside("tb")
    profile = _Inside("profile")
    """Traces of profiled ranks, each with its summary."""
    checkpoints = _Inside("checkpoints")

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    best = _Inside("checkpoints/best")
    last = _Inside("checkpoints/last")
    report = _Inside("report.html")
    """The page that `make report` and the end of a run write."""
    model = _Inside("model")
    """The final (or best) weights with tokenizer, template and stamp."""

    def evaluation(self, step: int, data: str | None = None) -> Path:
        """Where scores and answers are; `data` names rows that are not the run's own validation rows."""
        return self.path / "eval" / (f"step-{step:06d}" + (f"-{data}" if data else ""))


# A folder from elsewhere gives only plain files that really are in it: data, a model, a run. A link in it must not
# bring in others.


WILD = "*?["


def require_inside(files: Iterable[Path], root: Path) -> None:
    """Raise `DataError` for a file that a link leads out of `root`. Links into the hub's own cache, beside its
    snapshots, are its way.

    Data come from strangers as folders and archives, and a link of theirs (`rows.jsonl -> /home/me/.ssh/id_ed25519`)
    would be trained on.
    """
    base = root.resolve()
    folders: dict[Path, Path] = {}
    for file in files:
        if file.parent not in folders:
            folders[file.parent] = file.parent.resolve()
        folder = folders[file.parent]
        target = file.resolve() if file.is_symlink() else folder / file.name
        if not target.is_relative_to(base) and not _in_hub_cache(base, target):
            raise DataError(
                f"is a link to `{target}`, which is outside of the folder",
                place=str(file),
                hint=(
                    "put a copy of that file in its place, if it belongs there (`cp -rL FOLDER COPY` copies a folder"
                    " of links)"
                ),
            )


def require_plain(folder: Path) -> None:
    """Raise `DataError` for a file directly in a model's or a run's folder that is a pipe or a device, or that leads
    out of it.

    Each is read, hashed and perhaps copied to what is published: `LICENSE.txt -> /home/me/.ssh/id_ed25519`,
    `a.safetensors -> /dev/zero`.
    """
    files = [path for path in sorted(folder.iterdir()) if not path.is_dir()]
    for path in files:
        if path.exists() and not path.is_file():
            raise DataError(
                "is not a plain file",
                place=str(path),
                hint="a model is made of plain files: remove it, or fetch the model again",
            )
    require_inside(files, folder)


def root_of(pattern: Path) -> Path:
    """Return the folder that a pattern begins with: its parts before the first with a wildcard."""
    parts = pattern.parts
    first = next((number for number, part in enumerate(parts) if any(mark in part for mark in WILD)), len(parts) - 1)
    return Path(*parts[:first])


def _in_hub_cache(base: Path, target: Path) -> bool:
    """Whether `base` is (in) a snapshot of the hub's cache, and `target` one of the same repository's blobs."""
    return any(
        folder.name == "snapshots" and target.parent == folder.parent / "blobs" for folder in (base, *base.parents)
    )


# Whose code may run: a model's or a metric's, only where the words of this command or a YAML of this user's say so. A
# run can be a copy of somebody else's, and its `config.json` says what its author wished.


What = Literal["model", "metrics"]
CONSENT = "SFT_PLAY_CONSENT"
"""Tells the processes that a command starts what its user said; a command forgets what its own environment says."""


def forget_consent() -> None:
    """Forget what the environment says: it may be that of an image or a profile, and would hold for every model."""
    os.environ.pop(CONSENT, None)


def give_consent(*what: What) -> None:
    """Note for this command's processes what code the user lets run."""
    os.environ[CONSENT] = ",".join(sorted({*what, *filter(None, os.environ.get(CONSENT, "").split(","))}))


def may_run(what: What) -> bool:
    """Whether the user of this command lets the code of a model, or of metrics, run."""
    return what in os.environ.get(CONSENT, "").split(",")


def is_strangers(path: Path) -> bool:
    """Whether a file may be somebody else's: in the folder of a run, a checkpoint or a trained model, or in a cache.

    A run has events, the others a stamp.
    """
    path = path.resolve()
    marks = (folder / name for folder in path.parents for name in ("stamp.json", "events.jsonl"))
    caches = (cache_folder(), hub_folder())
    return any(map(os.path.lexists, marks)) or any(path.is_relative_to(cache.resolve()) for cache in caches)


def folder_gone(run: RunFolder, missing: Sequence[Path] = ()) -> HardwareError:
    """Return the error of a run whose folder, or files of whose launcher, were there when it started."""
    names = ", ".join(f"`{path.name}`" for path in missing)
    gone = (
        f"of the run's folder {names} {'is' if len(missing) == 1 else 'are'} gone"
        if missing and run.path.is_dir()
        else "the run's folder is gone"
    )
    return HardwareError(
        f"{gone}: was it moved or deleted while it trained?",
        place=str(run.path),
        hint=(
            f"where it was moved, put it back, then: make resume RUN={run.typed} (or, as it is now: make resume"
            " RUN=FOLDER)"
        ),
    )


# What an evaluation left in its folder: scores, answers, benchmarks. Whoever shows or compares them reads it here.


SCORES = "scores.json"
PREDICTIONS = "predictions.jsonl"
BENCHMARKS = "benchmarks.json"
ANSWER: Mapping[str, Any] = {
    "row": int,
    "prompt": str,
    "answer": str,
    "reference": str | None,
    "scores": Mapping[str, float | None],
}
"""Types of what a row of them says."""
WHOLE_BYTES, LARGEST_METRICS_BYTES = 4 * 2**20, 2**30
SPACED_ROWS = 6_000
LISTS, NUMBERS = ("rank_", "node_"), frozenset({float, int, bool, type(None)})
"""How figures of each rank or machine are named, and what they are; other figures are numbers."""
TRAINING, EVALUATION = b'"kind": "train"', b'"kind": "eval"'
INTERVAL = frozenset({"mean", "low", "high", "n"})
LEAST_ROWS = 20
"""Of fewer rows a percentile bootstrap's interval is too narrow to decide by: by 9 % at 20, by 47 % at 4 (sqrt((n-1)/n)
z/t, Hesterberg 2015, "What Teachers Should Know About the Bootstrap").
"""


def metrics_of(scores: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the scores of answers: metric -> `mean`, `low`, `high`, `n`, in the order of the file."""
    from sft_play.config.reader import misfit  # reads YAML, which the doctor must do without

    return {
        name: value
        for name, value in scores.items()
        if isinstance(value, dict)
        and value.keys() >= INTERVAL
        and misfit(value, dict.fromkeys(INTERVAL, float | None)) is None
    }


def read_scores(folder: Path) -> dict[str, Any] | None:
    """Return an evaluation's scores; `None` where none was finished, or its answers are gone."""
    scores = read_object(folder / SCORES)
    return scores if scores and (not scores.get("answers") or (folder / PREDICTIONS).is_file()) else None


def read_benchmarks(folder: Path) -> dict[str, Any] | None:
    """Return what standard benchmarks found for these weights; `None` where none was run."""
    from sft_play.config.reader import misfit

    benchmarks = read_object(folder / BENCHMARKS)
    return benchmarks if benchmarks and misfit(benchmarks, Benchmarks) is None else None


class Figure(TypedDict):
    value: float


class Task(TypedDict):
    metrics: Mapping[str, Figure]


class Benchmarks(TypedDict):
    tasks: Mapping[str, Task]
    requests: Mapping[str, Mapping[str, Any]]


"""Types of what they leave."""


def read_predictions(folder: Path) -> list[dict[str, Any]]:
    """Return the answers of an evaluation, in the order of the file; none where it was loss only."""
    from sft_play.config.reader import misfit

    path = folder / PREDICTIONS
    if not path.is_file():
        return []
    return [
        row
        for row in read_json_lines(path)
        if row.keys() >= {"row", "prompt", "answer"} and misfit(row, ANSWER) is None
    ]


def metric_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`; of a file above `WHOLE_BYTES` every evaluation and `SPACED_ROWS` other rows,
    the last among them.
    """
    with contextlib.suppress(OSError), open_plain(path) as stream:
        content = stream.read(LARGEST_METRICS_BYTES)
        return measured(json_rows(_spaced(content) if len(content) > WHOLE_BYTES else content.split(b"\n")))
    return []


def measured(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of metrics that are ours, each with its figures; what else it says is left out."""
    return [
        {name: value for name, value in row.items() if name == "kind" or _is_figure(name, value)}
        for row in rows
        if type(row.get("step")) is int and type(row.get("kind", "")) is str
    ]


def _is_figure(name: str, value: Any) -> bool:
    if name.startswith(LISTS):
        return type(value) is list and all(map(_is_number, value))
    return _is_number(value)


def _is_number(value: Any) -> bool:
    return type(value) in NUMBERS and (type(value) is not int or abs(value) < 2**63)


def _spaced(content: bytes) -> list[bytes]:
    inside = [part * len(content) // SPACED_ROWS for part in range(SPACED_ROWS)] + [content.rfind(TRAINING)]
    at = content.find(EVALUATION)
    while at >= 0:
        inside.append(at)
        at = content.find(EVALUATION, at + 1)
    starts = sorted({content.rfind(b"\n", 0, max(0, at)) + 1 for at in inside})
    return [content[start : content.find(b"\n", start)] for start in starts]


def data_name(path: str, fingerprint: str) -> str:
    """Return a short name for other data than a run's own: of the file, and of its rows, so that no two share a
    folder.
    """
    stem = (
        re.sub(r"[^\w.+=-]+", "-", Path(path.partition(":")[2] or path).name.partition(".")[0]).strip("-._") or "data"
    )
    return f"{stem[:40]}-{fingerprint[:8]}"
