"""How many machines one launchers' store takes: they meet, share, beat, settle and start again. Nothing is trained.

    unshare --net sh -c 'ip link set lo up && python -m benchmarks.launchers machines=1000'

Each machine is a `Machines` with a connection of its own, as `make train-distributed` has it. Some processes stand
for all of them; node 0 has one to itself. torch asks DNS for the name of each machine that connects: `unshare --net`
(as root) is a network where that fails at once.
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
    """What all machines of a measurement have in common."""

    def __init__(self, count: int, port: int) -> None:
        self.count, self.port = count, port
        root = Path(__file__).parent.parent
        self.config, self.versions = (
            config_here(load_config(root / "configs" / "quickstart.yaml")),
            versions_here("cpu"),
        )

    def one(self, rank: int) -> Launcher:
        """Return a machine that is not open yet."""
        node = Node(rank=rank, count=self.count, master_port=self.port)
        return Launcher(node, host=f"h{rank}", run="many", patience=600, silent_seconds=300)

    def facts(self, ours: Launcher) -> Facts:
        """Return a machine's facts, as large as real ones."""
        return {
            "node": ours.name,
            "num_nodes": self.count,
            "resumed": False,
            "checkpoint": None,
            "command": {},
            "config": self.config,
            "versions": self.versions,
            "kind": "cuda",
            "devices": [asdict(card) for card in CARDS],
        }

    def meet(self, ours: Launcher) -> None:
        """Meet and share, as before each attempt."""
        assert (
            ours.meet(lambda _: self.facts(ours), compare_facts, lambda found: {"processes": len(found)})["processes"]
            == self.count
        )
        ours.share(
            "prepared", {"prepared": {"training data": "1000 rows, 0123456789ab"}}, agree, lambda _: {"port": self.port}
        )


def agree(_: Sequence[Facts]) -> list[UserError]:
    """Find nothing wrong."""
    return []


def measure(count: int, beating: int, processes: int = 4) -> dict[str, float]:
    """Return seconds of node 0, wall-clock and processor time, for each part of a run on `count` machines."""
    machines, found = Machines(count, free_port()), dict[str, float]()

    def timed(name: str, do: Callable[[], Any]) -> Any:
        wall, cpu = time.monotonic(), time.process_time()
        result = do()
        found[f"{name}, s"], found[f"{name}, CPU s"] = time.monotonic() - wall, time.process_time() - cpu
        return result

    ours = machines.one(0)
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
        for one in crowd:  # all are connected
            assert one.stdout is not None and one.stdout.readline() == "open\n"

        def go() -> None:
            for one in crowd:
                assert one.stdin is not None
                one.stdin.write("go\n")
                one.stdin.flush()
            machines.meet(ours)

        timed("meet and share", go)
        timed(f"beats of {beating} s", lambda: time.sleep(beating))
        assert ours.ended_elsewhere() is None
        timed("settle and follow", lambda: (ours.settle(LOST), ours.follow(lambda: {"again": True})))
        timed("meet again and share", lambda: machines.meet(ours))
        ours.settle(Outcome(code=1, message="error: enough"))
        timed("leave", ours.close)
        ended = [one.communicate(timeout=600)[0].split() for one in crowd]
        assert sum(map(len, ended)) == count - 1 and {code for codes in ended for code in codes} == {"1"}, ended
    finally:
        for one in crowd:
            one.kill()
    return found


def crowd(count: int, port: int, first: int, processes: int) -> list[int]:
    """Machines first + 1, first + 1 + processes, ..., a thread each once all are connected; return the codes with which
    the run ended for them.
    """
    machines, codes = Machines(count, port), list[int]()
    sys.setswitchinterval(
        0.2
    )  # hundreds of threads that wait for one interpreter lock would wake each other every 5 ms

    def ended(ours: Launcher) -> Outcome:
        while not isinstance(found := ours.ended_elsewhere(), Outcome):
            time.sleep(0.5)
        return found

    def machine(ours: Launcher) -> None:
        machines.meet(ours)
        assert ours.settle(ended(ours)).rank == LOST.rank
        ours.follow(dict)
        machines.meet(ours)
        codes.append(ended(ours).code)
        ours.close()

    with contextlib.redirect_stderr(io.StringIO()):
        mine = [machines.one(rank) for rank in range(first + 1, count, processes)]
        for one in mine:
            one.open()
        print("open", flush=True)
        sys.stdin.readline()
        threads = [threading.Thread(target=machine, args=(one,), daemon=True) for one in mine]
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
