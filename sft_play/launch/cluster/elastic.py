"""Which machines a run goes on with: all of the inventory, or with `launch.elastic` those that are there, and one that returns.

A machine that returns is taken at the next start, or once it answers and a checkpoint has been published after that: then all ranks save, leave
and start again with it, so nothing is trained twice. The master is always one of them: it holds the run.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from sft_play.config.cluster import Host, Inventory
from sft_play.errors import RetryableError, UserError, raise_all
from sft_play.launch.cluster.agent import hosts_that_answer
from sft_play.launch.cluster.facts import Facts, gather
from sft_play.launch.cluster.task import Task
from sft_play.launch.run_folder import raise_what_was_heard
from sft_play.runs.checkpoints import published, step_of
from sft_play.runs.folder import RunFolder

POLL_SECONDS = 10.0
"""How often a machine that is missing is asked whether it is there again."""
SAY_SECONDS = 30.0


def choose(task: Task, answers: Mapping[str, Facts | UserError]) -> tuple[list[Host], list[UserError]]:
    """Returns the machines to start on, in the inventory's order, and why others cannot be asked."""
    there = [host for host in task.inventory.hosts if isinstance(answers[host.name], Facts)]
    missing = [answer for answer in answers.values() if isinstance(answer, UserError)]
    return there[: task.most], missing


def hosts_for_start(task: Task, variables: Mapping[str, str]) -> tuple[list[Host], dict[str, Facts]]:
    """Asks all machines once. Raises every reason when too few are there; with `launch.elastic` it says who is left out."""
    answers = gather(task.inventory, task.inventory.hosts, variables)
    hosts, missing = choose(task, answers)
    if len(hosts) < task.least or task.inventory.master not in hosts:
        raise_all(missing)
    for error in missing:
        print(f"left out: {error.message}", file=sys.stderr, flush=True)
    return hosts, {name: answer for name, answer in answers.items() if isinstance(answer, Facts)}


def hosts_for_restart(task: Task, variables: Mapping[str, str]) -> tuple[list[Host], dict[str, Facts]]:
    """Waits until enough machines are there again, at most `launch.join_seconds`. Raises `RetryableError` with who is missing."""
    begun, said = time.monotonic(), 0.0
    patience = task.loaded.config.launch.join_seconds
    while True:
        answers = gather(task.inventory, task.inventory.hosts, variables)
        hosts, missing = choose(task, answers)
        if len(hosts) >= task.least and task.inventory.master in hosts:
            return hosts, {name: answer for name, answer in answers.items() if isinstance(answer, Facts)}
        names = ", ".join(f"`{host.name}`" for host in task.inventory.hosts if host not in hosts)
        waited = time.monotonic() - begun
        if waited > patience:
            raise RetryableError(
                f"{names} did not come back within {patience:g} s (`launch.join_seconds`): {missing[0].message}",
                hint='go on with fewer machines: CLUSTER_HOSTS="name name", or `launch.elastic: MIN:MAX` for the next time',
            )
        if time.monotonic() - said > SAY_SECONDS or not said:
            said = time.monotonic()
            print(f"waiting for {names}, {patience - waited:.0f} s at most: {missing[0].message}", file=sys.stderr, flush=True)
        pause(POLL_SECONDS)


def pause(seconds: float) -> None:
    """Waits; a signal that comes meanwhile ends the command."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        raise_what_was_heard()
        time.sleep(min(0.2, max(0.0, until - time.monotonic())))


class Returning:
    """Asks for machines that are missing, beside the training, until one answers."""

    def __init__(self, inventory: Inventory, missing: Sequence[Host], run: RunFolder, say: Callable[[str], None]) -> None:
        self.inventory, self.missing, self.run, self._say = inventory, list(missing), run, say
        self.back: list[Host] = []
        self._over = threading.Event()
        self._newest: int | None = None
        self._looked = 0.0
        if self.missing:
            threading.Thread(target=self._ask, name="returning", daemon=True).start()

    def _ask(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            answers = hosts_that_answer(self.inventory, self.missing)
            back = [host for host in self.missing if answers[host.name]]
            if back:
                self._newest = self._step()
                self.back = back
                names = ", ".join(f"`{host.name}`" for host in back)
                self._say(f"\n{names} answers again; it is taken in after the next checkpoint")
                return

    def _step(self) -> int:
        found = published(self.run)
        return step_of(found[0]) if found else 0

    def wanted(self) -> bool:
        """Whether one is back, and a checkpoint was published after that."""
        if not self.back or time.monotonic() - self._looked < 1:
            return False
        self._looked = time.monotonic()
        return self._newest is not None and self._step() > self._newest

    def close(self) -> None:
        """Asks no more."""
        self._over.set()
