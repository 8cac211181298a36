"""A run's folder, `runs/NAME/`: its paths, the files that are accepted from a foreign folder, and the results of
evaluations.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from sft_play.errors import DataError, HardwareError
from sft_play.files import json_rows, open_plain, read_json_lines, read_object, typed_path
from sft_play.text import as_typed

OWN = "SFT_PLAY_OWN_FOLDER"
"""Variable with which a node's workers find its own folder inside the run's (`RunFolder.of_node`)."""


OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
"""Variables of the offline mode of the hub's libraries; users set the first one too."""


def runs_folder() -> Path:
    """Return the folder of all runs: `$RUNS_DIR`, or `runs` in the working folder."""
    return typed_path(os.environ.get("RUNS_DIR") or "runs")


def run_path(name: str) -> Path | None:
    """Return the folder of the run with the name or the path `name`, or `None`."""
    candidates = [runs_folder() / name] if "/" not in name else []
    return next((path for path in [*candidates, Path(name)] if (path / "config.json").is_file()), None)


def model_folder(name: str) -> Path:
    """Return the folder that a model or an adapter names; of a run, also where all runs have been moved since."""
    path = typed_path(name)
    if path.is_absolute() and not path.exists():
        for count in (2, 3):  # `RUN/model`, `RUN/checkpoints/step-000040`
            place = runs_folder().joinpath(*path.parts[-count:])
            if place.is_dir() and (runs_folder() / path.parts[-count] / "plan.json").is_file():
                return place.absolute()
    return path


def hint_gone(name: str) -> str:
    """Return a hint for a model's folder that is not here."""
    folder = Path(name)
    if folder.is_absolute() and folder.name in ("model", "merged"):
        run = folder.parent.name
        return (
            f"it was the model of the run `{run}`: give that run its name and place again; for a new run, MODEL_NAME="
        )
    return "paths count from the folder in which you typed the command"


def meant_run(name: str) -> str:
    """Return a hint with the run whose name is like `name`, to put before another hint; empty if there is none."""
    runs = [path.parent.name for path in runs_folder().glob("*/config.json")]
    return f"did you mean the run `{close[0]}`? " if (close := get_close_matches(name, runs, n=1, cutoff=0.75)) else ""


def meant_model(name: str) -> str:
    """Return the same for a model, with the folder that `RUN/merged` leads to if it is in `RUNS_DIR`."""
    folder = runs_folder() / name
    return f"did you mean `{folder}`? " if "/" in name and folder.is_dir() else meant_run(name)


def is_offline() -> bool:
    """Return whether `HF_HUB_OFFLINE` restricts the hub's libraries to files on this machine."""
    return os.environ.get(OFFLINE[0], "").lower() in ("1", "true", "yes", "on")


def accelerate_default() -> Path | None:
    """Return the default file of `accelerate config`, or `None` if there is none."""
    path = hub_folder() / "accelerate" / "default_config.yaml"
    return path if path.is_file() else None


def hub_folder() -> Path:
    """Return the folder of the hub's libraries: `$HF_HOME`, or `~/.cache/huggingface`."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return typed_path(os.environ.get("HF_HOME") or str(Path(caches, "huggingface")))


def hub_cache() -> Path:
    """Return the hub's cache of models: `$HF_HUB_CACHE`, or `hub` in `hub_folder`."""
    return typed_path(os.environ.get("HF_HUB_CACHE") or str(hub_folder() / "hub"))


def cache_folder() -> Path:
    """Return the cache folder: `$SFT_PLAY_CACHE`, or `~/.cache/sft_play`."""
    return typed_path(os.environ.get("SFT_PLAY_CACHE") or str(Path.home() / ".cache" / "sft_play"))


def require_home() -> None:
    """Make `~` mean `$SFT_PLAY_CACHE` for a user without a home, as in a container. Raise `HardwareError` without that
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
    # `Path`'s questions raise below a folder that this user may not enter.
    there = next(folder for folder in (place, *place.parents) if os.path.exists(folder))  # noqa: PTH110
    if not os.environ.get("HOME") and home == "~":
        problem = "there is no HOME, and this user has no entry in `/etc/passwd`"
    elif not os.path.isdir(home):  # noqa: PTH112
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
    """Paths inside a run's folder; does not create anything."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def typed(self) -> str:
        """The word to type after `RUN=`: the run's name if that finds it, else its folder."""
        by_name = run_path(self.name)
        if by_name and self.path.exists() and by_name.samefile(self.path):
            return as_typed(self.name)
        return as_typed(self.path if "/" in str(self.path) else self.path.absolute())

    @property
    def again(self) -> str:
        """A valid name for a run that repeats this one, whatever its folder is called."""
        return f"{re.sub(r'[^A-Za-z0-9_.+=-]+', '-', self.name)[:100].lstrip('_.+=-') or 'run'}-again"

    config = _Inside("config.json")
    """The resolved configuration: `{"config": ..., "origins": ...}`."""
    plan = _Inside("plan.json")

    @property
    def prepared(self) -> Path:
        """Facts about model and data (`runs.prepared.Prepared`), as prepared on this machine."""
        own = Path(os.environ.get(OWN) or self.path)
        return (own if self.path in own.parents else self.path) / "prepared.json"

    def of_node(self, rank: int) -> RunFolder:
        """Return the folder of a node other than 0 inside a shared run folder, for its own view of model and data."""
        return RunFolder(self.path / "nodes" / str(rank) / self.name)

    stamp = _Inside("stamp.json")
    accelerate = _Inside("accelerate.yaml")
    deepspeed = _Inside("deepspeed.json")
    events = _Inside("events.jsonl")
    """Events of the complete run (started, resumed, finished, failed), one JSON object per line."""

    metrics = _Inside("metrics.jsonl")
    training_metrics = _Inside("training_metrics.json")
    logs = _Inside("logs")
    phase = _Inside("logs/phase.json")
    """What rank 0 is doing, for observers: `{"phase": ...}`."""

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.log"

    def rank_exit(self, rank: int) -> Path:
        """A worker's own exit code and error, since torchrun turns every failure into 1."""
        return self.logs / f"exit-rank{rank}.json"

    def bad_rows(self, rank: int) -> Path:
        """A rank's rows in a step whose loss or gradient was not finite."""
        return self.logs / f"bad-rows-rank{rank}.json"

    def rank_stack(self, rank: int) -> Path:
        """Stacks of a rank that made no step, one for each request."""
        return self.logs / f"stack-rank{rank}.txt"

    def rank_collectives(self, rank: int) -> Path:
        """Collective operations of a rank that made no step, from torch's flight recorder."""
        return self.logs / f"collectives-rank{rank}.json"

    def rank_holdings(self, rank: int) -> Path:
        """A rank's real elements of parameters, gradients and optimizer states, and its trained and scored rows."""
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
    """The page written by `make report` and at the end of a run."""
    model = _Inside("model")
    """The final (or best) weights with tokenizer, template and stamp."""

    def evaluation(self, step: int, data: str | None = None) -> Path:
        """Return the folder of scores and answers; `data` names rows other than the run's validation rows."""
        return self.path / "eval" / (f"step-{step:06d}" + (f"-{data}" if data else ""))


# Of a foreign folder (data, a model, a run) only plain files inside it are accepted; a link must not lead to other
# files.


WILD = "*?["


def require_inside(files: Iterable[Path], root: Path) -> None:
    """Raise `DataError` for a file that is a link out of `root`. Links from snapshots into the hub's own cache are
    accepted. Data come from strangers as folders and archives, and the target of their link (`rows.jsonl ->
    /home/me/.ssh/id_ed25519`) would be trained on.
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
    """Raise `DataError` for a file directly in a model's or a run's folder that is a pipe, a device, or a link out of
    it.

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
    """Return the parts of a pattern before the first with a wildcard."""
    parts = pattern.parts
    first = next((number for number, part in enumerate(parts) if any(mark in part for mark in WILD)), len(parts) - 1)
    return Path(*parts[:first])


def _in_hub_cache(base: Path, target: Path) -> bool:
    """Return whether `base` is (in) a snapshot of the hub's cache and `target` is a blob of the same repository."""
    return any(
        folder.name == "snapshots" and target.parent == folder.parent / "blobs" for folder in (base, *base.parents)
    )


# Consent: code of a model or a metric only runs if this command's words or a YAML file of this user allow it. A run may
# be a copy of somebody else's, with its author's `config.json`.


What = Literal["model", "metrics"]
CONSENT = "SFT_PLAY_CONSENT"
"""Variable that passes the user's consent to a command's processes; a command ignores it in its own environment."""


def forget_consent() -> None:
    """Discard consent in the environment, which may come from an image or a profile and would apply to every model."""
    os.environ.pop(CONSENT, None)


def give_consent(*what: What) -> None:
    """Record for this command's processes which code the user allows to run."""
    os.environ[CONSENT] = ",".join(sorted({*what, *filter(None, os.environ.get(CONSENT, "").split(","))}))


def may_run(what: What) -> bool:
    """Return whether the user of this command allows code of a model, or of metrics, to run."""
    return what in os.environ.get(CONSENT, "").split(",")


def is_strangers(path: Path) -> bool:
    """Return whether a file may be somebody else's: in a cache, or in the folder of a run (which has events), a
    checkpoint or a trained model (which have a stamp).
    """
    path = path.resolve()
    marks = (folder / name for folder in path.parents for name in ("stamp.json", "events.jsonl"))
    caches = (cache_folder(), hub_folder())
    return any(map(os.path.lexists, marks)) or any(path.is_relative_to(cache.resolve()) for cache in caches)


def folder_gone(run: RunFolder) -> HardwareError:
    """Return the error for a run whose folder is missing while it trains."""
    return HardwareError(
        "the run's folder is gone: was it moved or deleted while it trained?",
        place=str(run.path),
        hint=f"if it was moved, move it back, then: make resume RUN={run.typed}",
    )


# Results of an evaluation: scores and answers.


SCORES = "scores.json"
PREDICTIONS = "predictions.jsonl"
ANSWER: Mapping[str, Any] = {
    "row": int,
    "place": str,
    "prompt": str,
    "answer": str,
    "reference": str | None,
    "scores": Mapping[str, float | None],
}
"""Types of a row of answers."""
WHOLE_BYTES, LARGEST_METRICS_BYTES = 4 * 2**20, 2**30
SPACED_ROWS = 6_000
LISTS, NUMBERS = ("rank_", "node_"), frozenset({float, int, bool, type(None)})
"""Prefix of figures per rank or machine, and their type; other figures are numbers."""
TRAINING, EVALUATION = b'"kind": "train"', b'"kind": "eval"'
INTERVAL = frozenset({"mean", "low", "high", "n"})
LEAST_ROWS = 20
"""With fewer rows the interval of a percentile bootstrap is too narrow: by 9 % at 20 and 47 % at 4 (sqrt((n-1)/n) z/t,
Hesterberg 2015, "What Teachers Should Know About the Bootstrap").
"""


def metrics_of(scores: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the scores of answers: metric -> `mean`, `low`, `high`, `n`, in the order of the file."""
    from sft_play.config.reader import misfit  # imports PyYAML, which the doctor must not need

    return {
        name: value
        for name, value in scores.items()
        if isinstance(value, dict)
        and value.keys() >= INTERVAL
        and misfit(value, dict.fromkeys(INTERVAL, float | None)) is None
    }


def read_scores(folder: Path) -> dict[str, Any] | None:
    """Return an evaluation's scores, with `settings` in any case, or `None` if none was finished or its answers are
    missing.
    """
    scores = read_object(folder / SCORES)
    if not scores or (scores.get("answers") and not (folder / PREDICTIONS).is_file()):
        return None
    settings = scores.get("settings")
    return scores | {"settings": settings if isinstance(settings, dict) else {}}


def of_memory(settings: Mapping[str, Any]) -> str | None:
    """Return what to know of scores on rows that were trained, or `None`."""
    trained = settings.get("rows_trained", 0)
    if trained is None:
        return "how many of these rows were trained is not known: the cache has lost the training rows"
    if type(trained) is int and trained:
        were = "was" if trained == 1 else "were"
        return f"{trained:,} of these rows {were} trained: such scores show memory and not skill"
    return None


def read_predictions(folder: Path) -> list[dict[str, Any]]:
    """Return the answers of an evaluation in the order of the file; empty for one that measured only the loss."""
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
    """Return the rows of `metrics.jsonl`; of a file above `WHOLE_BYTES` all evaluations and `SPACED_ROWS` other rows,
    including the last.
    """
    with contextlib.suppress(OSError), open_plain(path) as stream:
        content = stream.read(LARGEST_METRICS_BYTES)
        return measured(json_rows(_spaced(content) if len(content) > WHOLE_BYTES else content.split(b"\n")))
    return []


def measured(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the valid rows of metrics, each with its known figures only."""
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
    """Return a short name for data other than the run's own, from the file's name and its rows, so that no two share a
    folder.
    """
    stem = (
        re.sub(r"[^\w.+=-]+", "-", Path(path.partition(":")[2] or path).name.partition(".")[0]).strip("-._") or "data"
    )
    return f"{stem[:40]}-{fingerprint[:8]}"
