"""Measure how many machines a launchers' store serves: they meet, share, beat, settle and restart, without training.

    unshare --net sh -c 'ip link set lo up && python -m benchmarks.launchers machines=1000'

Each machine is a `Machines` with a separate connection, as in `make train-distributed`. A few processes simulate all of
them; node 0 has its own process. torch asks DNS for the name of each machine that connects: `unshare --net` (as root)
is a network in which that fails at once.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import options_of
from sft_play.config.load import load_config
from sft_play.errors import UserError
from sft_play.launch.agreement import compare_facts, config_here, versions_here
from sft_play.launch.environment import Node, free_port
from sft_play.launch.machines import Facts
from sft_play.launch.machines import Machines as Launcher
from sft_play.launch.verdict import Outcome
from sft_play.plan.hardware import Device

LOST = Outcome(
    code=75, rank=1, cause="killed", message="error: rank 1 was killed by SIGKILL; all other ranks were stopped"
)
CARDS = tuple(
    Device(name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 10**9, free_bytes=79 * 10**9, bf16=True, number=k)
    for k in range(8)
)


class Machines:
    """The machines of a measurement, with their common facts."""

    def __init__(self, count: int, port: int) -> None:
        self.count, self.port = count, port
        root = Path(__file__).parent.parent
        self.config, self.versions = (
            config_here(load_config(root / "configs" / "quickstart.yaml")),
            versions_here("cpu"),
        )

    def launcher(self, rank: int) -> Launcher:
        """Return the launcher of a machine, not open yet."""
        node = Node(rank=rank, count=self.count, master_port=self.port)
        return Launcher(node, host=f"h{rank}", run="many", patience=600, silent_seconds=300)

    def facts(self, ours: Launcher) -> Facts:
        """Return a machine's facts, as large as real ones."""
        return {
            "node": ours.name,
            "nodes": {"NUM_NODES": self.count},
            "run": {"run": "started"},
            "gpus": {"GPUs": "there"},
            "versions": self.versions,
            "command": {},
            "config": self.config,
            "devices": [asdict(card) for card in CARDS],
        }

    def meet(self, ours: Launcher) -> None:
        """Meet and share, as before each attempt."""
        assert (
            ours.meet(lambda _: self.facts(ours), compare_facts, lambda facts: {"processes": len(facts)})["processes"]
            == self.count
        )
        ours.share(
            "prepared", {"prepared": {"training data": "1000 rows, 0123456789ab"}}, agree, lambda _: {"port": self.port}
        )


def agree(_: Sequence[Facts]) -> list[UserError]:
    """Find no error."""
    return []


def measure(count: int, beating: int, processes: int = 4) -> dict[str, float]:
    """Return node 0's wall-clock and CPU seconds for each part of a run on `count` machines."""
    machines, figures = Machines(count, free_port()), dict[str, float]()

    def timed(name: str, do: Callable[[], Any]) -> Any:
        wall, cpu = time.monotonic(), time.process_time()
        result = do()
        figures[f"{name}, s"], figures[f"{name}, CPU s"] = time.monotonic() - wall, time.process_time() - cpu
        return result

    ours = machines.launcher(0)
    ours.open()
    crowd = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.launchers",
                "crowd",
                str(count),
                str(machines.port),
                str(k),
                str(processes),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for k in range(processes)
    ]
    try:
        for process in crowd:  # all are connected
            assert process.stdout is not None and process.stdout.readline() == "open\n"

        def go() -> None:
            for process in crowd:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            machines.meet(ours)

        timed("meet and share", go)
        timed(f"beats of {beating} s", lambda: time.sleep(beating))
        assert ours.ended_elsewhere() is None
        timed("settle and follow", lambda: (ours.settle(LOST), ours.follow(lambda: {"again": True})))
        timed("meet again and share", lambda: machines.meet(ours))
        ours.settle(Outcome(code=1, message="error: enough"))
        timed("leave", ours.close)
        ended = [process.communicate(timeout=600)[0].split() for process in crowd]
        assert sum(map(len, ended)) == count - 1 and {code for codes in ended for code in codes} == {"1"}, ended
    finally:
        for process in crowd:
            process.kill()
    return figures


def crowd(count: int, port: int, first: int, processes: int) -> list[int]:
    """Simulate machines first + 1, first + 1 + processes, ..., in a thread each, and return their runs' exit codes."""
    machines, codes = Machines(count, port), list[int]()
    # Hundreds of threads that wait for the interpreter lock would wake each other every 5 ms.
    sys.setswitchinterval(0.2)

    def ended(ours: Launcher) -> Outcome:
        while not isinstance(outcome := ours.ended_elsewhere(), Outcome):
            time.sleep(0.5)
        return outcome

    def machine(ours: Launcher) -> None:
        machines.meet(ours)
        assert ours.settle(ended(ours)).rank == LOST.rank
        ours.follow(dict)
        machines.meet(ours)
        codes.append(ended(ours).code)
        ours.close()

    with contextlib.redirect_stderr(io.StringIO()):
        mine = [machines.launcher(rank) for rank in range(first + 1, count, processes)]
        for launcher in mine:
            launcher.open()
        print("open", flush=True)
        sys.stdin.readline()
        threads = [threading.Thread(target=machine, args=(launcher,), daemon=True) for launcher in mine]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return codes


if __name__ == "__main__":
    if sys.argv[1:2] == ["crowd"]:
        print(*crowd(*map(int, sys.argv[2:])))
    else:
        numbers, _ = options_of(sys.argv[1:], machines=100, beating=10)
        with contextlib.redirect_stderr(io.StringIO()):
            figures = measure(numbers["machines"], numbers["beating"])
        print(json.dumps({name: round(value, 2) for name, value in figures.items()}, indent=2))
