"""The layout of a run's folder, `runs/NAME/`. Every path of it has its name here and nowhere else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

OWN = "SFT_PLAY_OWN_FOLDER"
"""Variable that names, to the workers of a node, its own folder inside the run's (`RunFolder.of_node`)."""


def runs_folder() -> Path:
    """Returns the folder of all runs: `$RUNS_DIR`, or `runs` in the working folder."""
    return Path(os.environ.get("RUNS_DIR") or "runs")


def run_path(name: str) -> Path | None:
    """Returns the folder of the run called `name` or standing in the folder `name`; `None` where there is no such run."""
    candidates = [runs_folder() / name] if "/" not in name else []
    return next((path for path in [*candidates, Path(name)] if (path / "config.json").is_file()), None)


def accelerate_default() -> Path | None:
    """Returns the file that `accelerate config` writes where no other is named; `None` where there is none."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = Path(os.environ.get("HF_HOME") or Path(caches, "huggingface"), "accelerate", "default_config.yaml").expanduser()
    return path if path.is_file() else None


def cache_folder() -> Path:
    """Returns the folder of what can be made again: `$SFT_PLAY_CACHE`, or `~/.cache/sft_play`."""
    return Path(os.environ.get("SFT_PLAY_CACHE") or Path.home() / ".cache" / "sft_play")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run's folder; creates nothing by itself."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration: `{"config": ..., "origins": ...}`."""
        return self.path / "config.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def prepared(self) -> Path:
        """What preparation found out about model and data (`runs.prepared.Prepared`), on this machine."""
        own = Path(os.environ.get(OWN) or self.path)
        return (own if self.path in own.parents else self.path) / "prepared.json"

    def of_node(self, rank: int) -> RunFolder:
        """Returns the folder for what a node other than 0 has of its own where all share this one: the model and data as it finds them."""
        return RunFolder(self.path / "nodes" / str(rank) / self.name)

    @property
    def stamp(self) -> Path:
        return self.path / "stamp.json"

    @property
    def accelerate(self) -> Path:
        return self.path / "accelerate.yaml"

    @property
    def deepspeed(self) -> Path:
        return self.path / "deepspeed.json"

    @property
    def events(self) -> Path:
        """What happened to the run as a whole: started, resumed, finished, failed; one JSON object a line."""
        return self.path / "events.jsonl"

    @property
    def tries(self) -> Path:
        """What `launch.tries` counts, beside the folder: a launch that ends before its workers start takes the folder away."""
        return self.path.with_name(f".{self.name}.tries.json")

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def training_metrics(self) -> Path:
        return self.path / "training_metrics.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

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

    @property
    def tensorboard(self) -> Path:
        return self.path / "tb"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def random_states(self, step: int) -> Path:
        """Random states of ranks that do not see rank 0's run folder, at the step of a checkpoint of rank 0's."""
        return self.path / "random" / f"step-{step:06d}"

    @property
    def best(self) -> Path:
        return self.checkpoints / "best"

    @property
    def last(self) -> Path:
        return self.checkpoints / "last"

    @property
    def model(self) -> Path:
        """The final (or best) weights with tokenizer, template and stamp."""
        return self.path / "model"

    def evaluation(self, step: int, data: str | None = None) -> Path:
        """Where scores and answers are; `data` names rows that are not the run's own validation rows."""
        return self.path / "eval" / (f"step-{step:06d}" + (f"-{data}" if data else ""))
