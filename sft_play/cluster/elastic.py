"""Which machines a run goes on with: all of the inventory, or with `launch.elastic` those that are there and fit, and one that returns.

A machine that returns is taken at the next start, or once it is fit and a checkpoint has been published after that: then all ranks save, leave
and start again with it, so nothing is trained twice. The master is always one of them: it holds the run. A machine that answers but is not fit
(no environment, other versions, a lost GPU, a full disk) counts as missing, and is not tried again before something about it has changed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sft_play.cluster.facts import Facts, check, gather, shared_variables
from sft_play.cluster.ssh import is_here
from sft_play.cluster.task import Task, require_one_disk, require_unused_name
from sft_play.config.cluster import Host
from sft_play.errors import HardwareError, Problems, RetryableError, UserError, raise_all
from sft_play.launch.run_folder import raise_what_was_heard
from sft_play.runs.checkpoints import published, step_of
from sft_play.runs.folder import RunFolder

POLL_SECONDS = 10.0
"""How often a machine that is missing is asked whether it is there again."""
LOOK_SECONDS = 1.0
"""How often a new checkpoint is looked for when one is back."""
SAY_SECONDS = 30.0
CLOSE_SECONDS = 5.0
"""How long the end of the asking is waited for: a disk may hang."""
MOST_REFUSALS = 3
"""How often one command may fail to bring a machine what it needs before that machine is left out for good."""
Chosen = tuple[list[Host], dict[str, Facts]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why a machine was left out although it answered."""

    error: UserError
    facts: Facts | None
    """What it said of itself then; `None` when it has not answered since, or said something else."""
    times: int


class Muster:
    """The machines of one command: asked, judged, and those remembered that did not come up to a start."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._variables = shared_variables(task.shared)
        self._own: Facts | None = None
        """What the master said of itself last."""
        self._gpus: dict[str, int] = {}
        """The most GPUs that each machine has shown."""
        self._refused: dict[str, Refusal] = {}

    def for_start(self) -> Chosen:
        """Asks all machines once. Raises every reason when too few are there; with `launch.elastic` it says who is left out."""
        task, hosts = self.task, self.task.inventory.hosts
        if task.bounds is None:
            answers = gather(task.inventory, hosts, self._variables, task.run.name)
            found = {name: answer for name, answer in answers.items() if isinstance(answer, Facts)}
            there = [host for host in hosts if host.name in found]
            raise_all(
                [answer for answer in answers.values() if isinstance(answer, UserError)]
                + raised(lambda: check(task.inventory, found, shared=task.shared))
                + raised(lambda: require_one_disk(task, there, found))
                + raised(lambda: require_unused_name(task, there, found))
            )
            for host in hosts:
                self._note(host, found[host.name])
            return list(hosts), found
        answers = self.ask(hosts)
        chosen, missing = self._choose(answers)
        if not self._enough(chosen):
            raise_all(missing)
        for error in missing:
            print(f"left out: {error.message}", file=sys.stderr, flush=True)
        found = _facts_of(chosen, answers)
        require_unused_name(task, chosen, found)
        return chosen, found

    def for_restart(self, begun: float) -> Chosen:
        """Waits until enough machines are there and fit, at most `launch.join_seconds` from `begun` (monotonic) on.

        Raises `RetryableError` with who is missing.
        """
        patience, said, again = self.task.loaded.config.launch.join_seconds, 0.0, False
        while True:
            answers = self.ask(self.task.inventory.hosts, again=again)
            hosts, missing = self._choose(answers)
            if self._enough(hosts):
                return hosts, _facts_of(hosts, answers)
            names = ", ".join(f"`{host.name}`" for host in self.task.inventory.hosts if host not in hosts)
            waited = time.monotonic() - begun
            if waited > patience:
                raise RetryableError(
                    f"{names} did not come back within {patience:g} s (`launch.join_seconds`): {missing[0].message}",
                    hint='go on with fewer machines: CLUSTER_HOSTS="name name", or `launch.elastic: MIN:MAX` for the next time',
                )
            if time.monotonic() - said > SAY_SECONDS or not said:
                said = time.monotonic()
                print(
                    f"waiting for {names}, {patience - waited:.0f} s at most: {missing[0].message}", file=sys.stderr, flush=True
                )
            pause(POLL_SECONDS)
            again = True  # too few without them: what failed may do better now

    def ask(
        self, hosts: Sequence[Host], *, again: bool = False, over: threading.Event | None = None
    ) -> dict[str, Facts | UserError]:  # fmt: skip
        """Returns host name -> its facts, or why it cannot take part. `again`: also those whose last refusal still holds. Those that have not
        answered when `over` is set are not among them."""
        master = self.task.inventory.master
        answers = gather(self.task.inventory, hosts, self._variables, self.task.run.name, over=over)
        if isinstance(own := answers.get(master.name), Facts):
            self._own = own
        return {host.name: self._judged(host, answers[host.name], again=again) for host in hosts if host.name in answers}

    def refuse(self, host: Host, facts: Facts, error: UserError) -> None:
        """Remembers that a machine failed, and what it said of itself then."""
        before = self._refused.get(host.name)
        self._refused[host.name] = Refusal(
            error=error, facts=replace(facts, run_there=None), times=(before.times if before else 0) + 1
        )

    def _judged(self, host: Host, answer: Facts | UserError, *, again: bool) -> Facts | UserError:
        known = self._refused.get(host.name)
        if known is not None and known.times >= MOST_REFUSALS:
            return known.error
        if known is not None and not again and _itself(answer) == known.facts:
            return known.error
        if known is not None and _itself(answer) != known.facts:
            self._refused[host.name] = replace(known, facts=None)
        if isinstance(answer, UserError):
            return answer
        try:
            self._check(host, answer)
        except UserError as error:
            return error
        self._note(host, answer)
        return answer

    def _check(self, host: Host, facts: Facts) -> None:
        """Raises why a machine that answers cannot take part now."""
        master = self.task.inventory.master
        own = facts if host == master else self._own
        if own is None:
            raise HardwareError(f"host `{master.name}`, the master, has not answered", place=master.place or None)
        others = () if host == master else (host,)
        known = {master.name: own, host.name: facts}
        told = replace(
            self.task.inventory, hosts=(master if host == master else replace(master, gpus=None, interface=None), *others)
        )
        check(told, known, shared=self.task.shared)
        require_one_disk(self.task, [host], known)
        require_unused_name(self.task, [host], known)
        if host.gpus is None and facts.gpus < (had := self._gpus.get(host.name, 0)):
            raise HardwareError(
                f"host `{host.name}` had {had} GPU{'s' if had > 1 else ''}, and its driver shows {facts.gpus} now",
                place=host.place or None,
                hint="`nvidia-smi` and `dmesg` there say what became of it; `gpus` in the inventory makes do with fewer",
            )

    def _note(self, host: Host, facts: Facts) -> None:
        self._gpus[host.name] = max(self._gpus.get(host.name, 0), facts.gpus)
        if is_here(host):
            self._own = facts

    def _choose(self, answers: Mapping[str, Facts | UserError]) -> tuple[list[Host], list[UserError]]:
        """Returns the machines to start on, in the inventory's order, and why others cannot take part."""
        there = [host for host in self.task.inventory.hosts if isinstance(answers[host.name], Facts)]
        return there[: self.task.most], [answer for answer in answers.values() if isinstance(answer, UserError)]

    def _enough(self, hosts: Sequence[Host]) -> bool:
        return len(hosts) >= self.task.least and self.task.inventory.master in hosts


def raised(judge: Callable[[], None]) -> list[UserError]:
    """Returns what `judge` raises, problem by problem, so that it is told together with what others raise."""
    try:
        judge()
    except UserError as error:
        return list(error.problems) if isinstance(error, Problems) else [error]
    return []


def _itself(answer: Facts | UserError) -> Facts | UserError:
    """Returns a machine's facts without the run's folder there: our own failed start may have left it, and it is no change of the machine."""
    return replace(answer, run_there=None) if isinstance(answer, Facts) else answer


def _facts_of(hosts: Sequence[Host], answers: Mapping[str, Facts | UserError]) -> dict[str, Facts]:
    return {host.name: facts for host in hosts if isinstance(facts := answers[host.name], Facts)}


def pause(seconds: float) -> None:
    """Waits; a signal that comes meanwhile ends the command."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        raise_what_was_heard()
        time.sleep(min(0.2, max(0.0, until - time.monotonic())))


class Returning:
    """Asks for machines that are missing, beside the training, until one is fit to take part and a checkpoint has come after that."""

    def __init__(self, muster: Muster, missing: Sequence[Host], run: RunFolder, say: Callable[[str], None]) -> None:
        self.muster, self.missing, self.run, self._say = muster, list(missing), run, say
        self.back: list[Host] = []
        self._over = threading.Event()
        self._ready = False
        self._thread = threading.Thread(target=self._watch, name="returning", daemon=True)
        if self.missing:
            self.begin()

    def begin(self) -> None:
        """Begins to ask."""
        self._thread.start()

    def _watch(self) -> None:
        newest = 0
        while not self._over.wait(LOOK_SECONDS if self.back else POLL_SECONDS):
            if not self.back:
                newest, self.back = self._step(), self._fit()
                if self.back and not self._over.is_set():
                    self._say(f"\n{self._names()} answers again; it is taken in after the next checkpoint")
            elif self._step() > newest:
                names, self.back = self._names(), self._fit()  # it may have gone again, or fallen sick
                if self.back:
                    self._ready = True
                    return
                if not self._over.is_set():
                    self._say(f"\n{names} cannot be taken in any more")

    def _fit(self) -> list[Host]:
        """Returns those that could take part now."""
        try:
            answers = self.muster.ask(self.missing, over=self._over)
        except UserError:  # this machine's own disk: the run itself will say so
            return []
        return [host for host in self.missing if isinstance(answers.get(host.name), Facts)]

    def _names(self) -> str:
        return ", ".join(f"`{host.name}`" for host in self.back)

    def _step(self) -> int:
        found = published(self.run)
        return step_of(found[0]) if found else 0

    def wanted(self) -> bool:
        """Whether one is back and fit, and a checkpoint was published after that."""
        return self._ready

    def close(self) -> None:
        """Asks no more, and leaves nothing behind: returns within a second, whatever a machine that is asked just then does."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
