"""What the launchers of several machines do together (`launch/membership.py` says who they are): meet, share, settle
the first cause, and what follows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from sft_play.errors import RetryableError, UserError, raise_all
from sft_play.launch.environment import VARIABLE, port_is_free
from sft_play.launch.membership import GRACE_SECONDS, POLL_SECONDS, Given, Membership, errors_from_json
from sft_play.launch.node import Standings
from sft_play.launch.process import stop_code
from sft_play.launch.store import REFUSED, StoreGone, Waiting, list_words, pause, print_line
from sft_play.launch.verdict import LOST, Outcome

Judge = Callable[[Sequence[Given]], list[UserError]]
"""What a step's objects, in order of machines, are refused for."""
Answer = Callable[[Sequence[Given]], Given]
"""What node 0 makes of them for all machines."""

OF_ATTEMPT = ("resumed", "checkpoint")
"""Facts of an attempt: a latecomer is not compared by them."""
PEER_SECONDS, LONGEST_RANK = 10.0, 9
"""How much longer than `launch.silent_seconds` the cause of a connection that was lost may take to be known."""


class Rendezvous(Membership):
    """This machine's part in a run on several. `open`, then for each attempt `meet`, `share`, `settle` and `follow`; at
    last `close`.
    """

    def own_addresses(self) -> list[str]:
        """Return this machine's own addresses on the way to others."""
        if self.node.rank:
            return [self._mine["address"]]
        return [self._seats[node_rank]["master"] for node_rank in self.members if node_rank]

    def workers_port(self) -> int:
        """Node 0: return a port for the workers' store of this attempt, MASTER_PORT + 1 + attempt or the next that is
        free.
        """
        first = self.node.master_port + 1 + self.attempt
        return next((port for port in range(first, min(first + 100, 65536)) if port_is_free(port)), first)

    # ---- Before the workers start

    def meet(self, facts: Callable[[], Given], judge: Judge, answer: Answer) -> Given:
        """Give this machine's facts and return node 0's answer to those of all members of the attempt; `members` says
        who they are.

        Raise what node 0 refuses them for, the same on each, and `RetryableError` for machines that do not come, or
        leave.
        """
        found = (
            self._meet_as_other(facts, judge)
            if self.node.rank
            else self._meet_as_node_0(_plain(facts()), judge, answer)
        )
        self._seats |= {int(node_rank): seat for node_rank, seat in found["seats"].items()}
        self.members = sorted(map(int, found["seats"]))
        return dict(found["answer"])

    def share(self, step: str, given: Given, judge: Judge, answer: Answer) -> Given:
        """Give an object and return node 0's answer when all members have given theirs. Raise what they are refused
        for.
        """
        if self.node.rank:
            self._give(step, given)
            return self._wait(step)
        here, waiting = {0: _plain(given)}, Waiting()
        while missing := [node_rank for node_rank in self.members if node_rank not in here]:
            self._raise_end()
            here |= self._gather_given(step, missing)
            waiting.report(f"waiting for {self.names(missing)} to be ready")
            pause(POLL_SECONDS)
        found = [here[node_rank] for node_rank in self.members]
        if errors := judge(found):
            raise self._refuse(errors)
        made = _plain(answer(found))
        self._connection.set(f"{self.attempt}/{step}/all", made)
        return made

    def _give(self, step: str, given: Given) -> None:
        name = f"{self.attempt}/{step}"
        self._connection.set(f"{name}/{self.node.rank}", given, listed=(name, self.node.rank))

    def _meet_as_node_0(self, facts: Given, judge: Judge, answer: Answer) -> Given:
        """Node 0's part of a meeting: each machine is compared with this one when it comes, and all of them once
        something is wrong.
        """
        here, differing, refused = {0: facts}, set[int](), set[int]()
        waiting, differ_since = Waiting(), 0.0
        while True:
            self._raise_end()
            if refused != (refused := self._connection.ask(lambda raw: node_ranks_in(raw, REFUSED))):
                who = ", ".join(f"node {node_rank}" for node_rank in sorted(refused))
                print_line(
                    f"{who} came with another RUN_NAME or `{VARIABLE}`, and was refused; its own output says which"
                )
            for node_rank, given in self._gather_given("facts", set(range(1, self.node.count)) - here.keys()).items():
                print_line(f"{self.names([node_rank])} has come")
                here[node_rank] = given
                differing |= {node_rank} if judge([facts, given]) else set()
            for node_rank in [node_rank for node_rank in here if node_rank and self._is_silent(node_rank)]:
                del here[node_rank]
                differing.discard(node_rank)
                self._connection.delete(f"{self.attempt}/facts/{node_rank}")
                print_line(f"{self.names([node_rank])} has gone; waiting for it to come again")
            missing = [node_rank for node_rank in range(self.node.count) if node_rank not in here]
            differ_since = (differ_since or time.monotonic()) if differing else 0.0
            if differing and (not missing or time.monotonic() - differ_since > GRACE_SECONDS):
                raise self._refuse(judge([here[node_rank] for node_rank in sorted(here)]))
            if not differing and not missing:
                break
            who = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            if waiting.seconds > self.patience:
                raise self._refuse(
                    [
                        RetryableError(
                            f"{who} of {self.node.count} did not come to port {self.node.master_port} within {self.patience:g} s"
                            f" (`launch.join_seconds`); there are: {self.names(sorted(here))}",
                            hint=f"start the same command there with MASTER_ADDR={self.node.master_address} and its own NODE_RANK; each of them says"
                            " why it waits",
                        )
                    ]
                )
            waiting.report(f"waiting for {who}, up to {self.patience:g} s; here: {self.names(sorted(here))}")
            pause(POLL_SECONDS)
        made = _plain(answer([here[node_rank] for node_rank in sorted(here)]))
        found = {
            "seats": {str(node_rank): self._seats[node_rank] if node_rank else self._mine for node_rank in here},
            "answer": made,
            "first": facts,
        }
        self._connection.set(f"{self.attempt}/facts/all", found)
        return found

    def _gather_given(self, step: str, wanted: Iterable[int]) -> dict[int, Given]:
        """Node 0: return what machines of these ranks have given in a step, whoever of them has."""

        def do(raw: Any) -> dict[int, Given]:
            found = {}
            for node_rank in sorted(set(wanted) & node_ranks_in(raw, f"{self.attempt}/{step}")):
                given = self._connection.read(raw, f"{self.attempt}/{step}/{node_rank}")
                if self._watch(raw, node_rank) and given is not None:
                    self._silent[self._watched[node_rank]] = 0.0  # a sign of life, of a machine too whose link was cut
                    found[node_rank] = given
            return found

        return dict(self._connection.ask(do))

    def _meet_as_other(self, give: Callable[[], Given], judge: Judge) -> Given:
        """Another machine's part of a meeting; one that comes too late, and could take part, waits for the next with
        its facts of then.
        """
        while True:
            facts = give()
            self.attempt = self._connection.get("attempt") or 0
            found = self._connection.get(f"{self.attempt}/facts/all")
            late = found is not None
            if found is None:
                self._taking_part = True
                self._give("facts", facts)
                found = self._wait("facts")
            if found["seats"].get(str(self.node.rank), {}).get("session") == self._mine["session"]:
                return dict(found)
            self._taking_part, first = False, found["first"]
            behind = first.get("checkpoint") and not facts.get("checkpoint")  # it does not see the run's, now or later
            later = {key: first[key] for key in OF_ATTEMPT if late and not behind and key in first}
            raise_all(judge([first, facts | later]))
            self._wait_for_next()

    def _wait_for_next(self) -> None:
        """Wait until the run, which trains without this machine, starts again. Raise that it did not."""
        waiting = Waiting()
        while (self._connection.get("attempt") or 0) == self.attempt:
            if waiting.seconds > self.patience:
                raise RetryableError(
                    f"the run has begun without {self.name}, and did not start again within {self.patience:g} s",
                    place=self.node.master,
                    hint="where it should be one of the run's machines, compare NUM_NODES and NODE_RANK with node 0's",
                )
            waiting.report("the run trains without this machine, and takes it in when it starts again")
            pause(POLL_SECONDS)

    def _wait(self, step: str) -> Given:
        """Return what node 0 made of a step."""
        waiting = Waiting()
        while True:
            if (
                found := self._connection.get(f"{self.attempt}/{step}/all")
            ) is not None:  # before the end: that may have followed
                return dict(found)
            self._raise_end()
            waiting.report("waiting for the other nodes")
            self._pause_as_one_of_many()

    def _pause_as_one_of_many(self) -> None:
        pause(max(POLL_SECONDS, self.node.count / 1000))  # a thousand machines ask a thousand times a second

    def _raise_end(self) -> None:
        """Raise how the attempt ended, before its workers were started."""
        if (end := self._reason_of_end) is None:
            return
        if "errors" in end:
            raise_all(errors_from_json(end["errors"]))
        hint = "its own output says why, if it could still say anything; the same command on every node starts again"
        who = self.names([end["lost"] if "lost" in end else end["node"]])
        raise RetryableError(f"{who} has left, or cannot be reached any more, before the workers started", hint=hint)

    # ---- While they train, and after

    def share_standings(self, mine: Standings | None) -> Standings | None:
        """Take where this machine's ranks stand, all quiet for too long (`None`: they are not). On node 0, which
        settles it for all, return where the ranks of all machines stand once that is so on each of them. Never waits.
        """
        self._standing = mine
        return self._standings if mine else None

    def ended_elsewhere(self, *, stopping: bool = False) -> Outcome | int | None:
        """Return how the attempt ended on another machine: an outcome, or the signal with which all were asked to stop;
        `None` while it runs.

        `stopping`: this machine was asked to stop, which the others then learn.
        """
        if stopping and self._reason_of_end is None and not self._node_0_is_gone():
            self._post_end({"stop": 15})
        if (end := self._reason_of_end) is not None:
            return int(end["stop"]) if "stop" in end else self._outcome(end)
        if not self._node_0_is_gone():
            return None
        store = self._connection
        how = "has left" if store.broken else f"has not answered for {time.monotonic() - store.heard:.0f} s"
        return self._unreachable(0, how)

    def _outcome(self, end: Given) -> Outcome:
        if "lost" in end:
            return self._unreachable(end["lost"], f"has been silent for {end['seconds']} s")
        if "errors" in end:
            error = errors_from_json(end["errors"])[0]
            return Outcome(code=error.exit_code, message=error.render())
        return Outcome(**end["outcome"])

    def _unreachable(self, node_rank: int, how: str) -> Outcome:
        first, name = sum(self.ranks_by_node[: self.members.index(node_rank)]), self.names([node_rank])
        host = name.partition(" (")[2].removesuffix(")")
        text = f"error: rank {first} ({host}) cannot be reached: {name} {how}; all ranks were stopped"
        hint = "see whether that machine is on and its network is up; what it still wrote is in its own output"
        return Outcome(code=LOST, rank=first, message=f"{text}\n\nhint: {hint}", cause="unreachable")

    def settle(self, outcome: Outcome) -> Outcome:
        """Return how the attempt ended: the same on every machine, by the one that saw the first cause.

        A machine whose ranks all did their work has nothing to settle; one whose ranks only lost a connection waits for
        the cause.
        """
        if outcome.code == 0:
            return outcome
        until = time.monotonic() + self.silent_seconds + PEER_SECONDS
        while outcome.cause == "peer" and time.monotonic() < until and self.ended_elsewhere() is None:
            time.sleep(POLL_SECONDS)
        found = self.ended_elsewhere()
        if isinstance(found, Outcome):
            return found
        end = self._post_end({"outcome": asdict(replace(outcome, host=self.host))})
        if "stop" not in end:
            return self._outcome(end)
        if outcome.cause in ("peer", "killed", "agent"):  # the others had left before it
            return Outcome(code=stop_code(int(end["stop"])), stop=outcome.stop)
        return outcome

    def follow(self, decide: Callable[[], Given]) -> Given | None:
        """Return what node 0 decides after the end of an attempt; `None` where node 0 does not answer. Ends the
        attempt.
        """
        if self._node_0_is_gone():
            return None
        name = f"{self.attempt}/next"
        try:
            if self.node.rank == 0:
                found = decide()
                self._connection.set(name, found)
            while self.node.rank and (found := self._connection.get(name)) is None:
                self._pause_as_one_of_many()
            self.members = []
            self._standing = self._standings = None  # before the beat belongs to the next attempt
            self.attempt += 1
            if self.node.rank == 0 and found.get("again"):
                self._connection.set("attempt", self.attempt)
        except StoreGone:
            return None
        return dict(found)


def _plain(value: Given) -> Given:
    """Return a value as the others read it."""
    return dict(json.loads(json.dumps(value, allow_nan=False)))


def node_ranks_in(raw: Any, name: str) -> set[int]:
    """Return the ranks that words in the store name; what a stranger wrote there may be anything: `²` is a digit, and
    no number.
    """
    return {
        int(word) for word in list_words(raw, name) if len(word) <= LONGEST_RANK and word.isascii() and word.isdecimal()
    }
