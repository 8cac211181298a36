"""Namespaces as the machines of a home: each with separate files and an sshd; commands are typed on the first."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play.runs.folder import RunFolder
from tests.lan import Lan, Typed, command_line, lan
from tests.waiting import until

OWN = ("runs", "cache", "project", "models")


class Home(Typed):
    """Machines with separate project folders, runs, caches and models; commands are typed on the first."""

    def __init__(self, net: Lan, folder: Path, model: Path) -> None:
        super().__init__(net, folder)
        data = self.own(0, "models")
        shutil.copytree(model, data / "tiny")
        rows = [{"prompt": f"say {i}", "completion": "I say " + "so " * (i % 7) + f"{i} now"} for i in range(24)]
        (data / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        seen = folder / "lan" / "models"
        self.config = folder / "demo.yaml"
        self.config.write_text(
            f"model: {{name: {seen / 'tiny'}, max_seq_len: 64}}\ntuning: {{mode: lora}}\ndata: {{train_path:"
            f" {seen / 'rows.jsonl'}}}\ntrain: {{global_batch_size: 6, max_steps: 4, save_steps: 2, logging_steps: 1,"
            " lr_scheduler_type: constant}\n"
        )
        self.write_inventory()

    def own(self, k: int, name: str) -> Path:
        """Return the path of a folder of machine `k`, separate or shared."""
        path = self.folder / "lan" / name
        return self.net.hosts[k].private.get(path, path)

    def write_inventory(self, hosts: Mapping[str, Mapping[str, Any]] | None = None, **defaults: str) -> None:
        """Write the inventory that commands are given."""
        common = {"folder": str(self.folder / "lan" / "project"), **defaults}
        self.inventory = self.net.inventory(self.folder / "home.yaml", hosts, defaults=common)

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Type a command on the first machine; options as `Typed.launch`."""
        return self.launch(0, *words, f"CLUSTER={self.inventory}", **options)

    def train(self, name: str, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Type `train-cluster` for a new run."""
        return self.start("train-cluster", f"CONFIG={self.config}", f"RUN_NAME={name}", *words, **options)

    def resume(self, name: str, *words: str) -> str:
        """Resume a run to its end, and return the output."""
        return self.type("train-cluster", f"RUN={name}", *words)

    def type(self, *words: str, code: int = 0) -> str:
        """Type a command and waits for its end; return what it has printed."""
        self.start(*words)
        return self.finish(code)

    def run(self, name: str, k: int = 0) -> RunFolder:
        """Return a run as machine `k` sees it."""
        return RunFolder(self.own(k, "runs") / name)

    def until_step(self, name: str, step: int) -> None:
        """Wait until that many optimizer steps have been logged."""
        path = self.run(name).metrics
        self.until(lambda: path.is_file() and any(f'"step": {step},' in line for line in path.read_text().splitlines()))

    def working(self, k: int) -> list[str]:
        """Return the command lines of all our processes on machine `k`."""
        commands = [" ".join(command_line(pid)) for pid in self.net.pids(k)]
        return [words[:200] for words in commands if "sft_play" in words or "types.ModuleType" in words]

    def all_free(self, *machines: int, seconds: float = 5) -> None:
        """Wait until nothing of ours runs on these machines."""
        until(
            lambda: not any(map(self.working, machines)),
            seconds=seconds,
            explanation=lambda: list(map(self.working, machines)),
        )


@contextlib.contextmanager
def home(folder: Path, model: Path, nodes: int = 3, *, own: Sequence[str] = OWN) -> Iterator[Home]:
    """Yield machines that have the folders `own` each for itself."""
    with lan(folder / "lan", nodes=nodes, private=[folder / "lan" / name for name in own]) as net:
        yield Home(net, folder, model)
