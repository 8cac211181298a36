"""How one start on several machines ended, and what came first: each machine blames what it saw, often only that another had gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sft_play.cluster.board import last_words
from sft_play.cluster.session import Node, Session
from sft_play.errors import HardwareError, printable
from sft_play.launch.run_folder import is_finished, stop_code
from sft_play.launch.verdict import LOST, OUT_OF_MEMORY, Outcome

EARLIER_SECONDS = 12.0
"""A machine is noticed to be lost so long after it went: only an error that came before that can have been first."""
STOPPED = (130, 143)
Record = tuple[float, int, Mapping[str, Any], int]
"""When it came, rank, what it recorded, place of its machine."""


def judge(session: Session, ranks: Sequence[range]) -> Outcome:
    """Says how it ended. `ranks`: those of each machine, empty where no plan was made.

    The order of causes: after a request to stop, an error with a code from 1 to 5 (a save that failed), a run that was complete before, the
    request; a complete run, whatever another machine's connection did afterwards; an error that was recorded before a machine can have been
    lost; a lost machine; the earliest cause that is a rank's own (its error, its death, want of memory); a launcher that failed without a word
    of a rank; whatever is left.
    """
    nodes = session.nodes
    own = sorted((one for one in _known(nodes, ranks) if is_own(one[1], one[2])), key=lambda one: one[:2])
    permanent = next((one for one in own if is_permanent(int(one[2].get("code", 0)))), None)
    if permanent is None and (all(node.code == 0 for node in nodes) or (nodes[0].code == 0 and is_finished(session.run))):
        return Outcome(code=0)
    if session.asked in ("signal", "grow") and not any(node.lost or node.problem for node in nodes):
        return _asked(session, permanent)
    lost = sorted((node.ended_at or 0.0, place) for place, node in enumerate(nodes) if node.lost)
    first_lost = lost[0][0] - EARLIER_SECONDS if lost else float("inf")
    if own and own[0][0] < first_lost:
        _, rank, facts, place = own[0]
        return _rank_failed(nodes[place], rank, facts)
    if session.asked == "signal":
        return _asked(session, permanent)
    if lost:
        return _host_lost(nodes, [place for _, place in lost], ranks)
    if broken := next((node for node in nodes if node.problem), None):
        return Outcome(code=HardwareError.exit_code, message=f"error: host `{broken.host.name}`: {broken.problem}")
    if killed := _killed(nodes):
        return killed
    if all(node.code in (0, *STOPPED) for node in nodes):
        return Outcome(code=next(node.code for node in nodes if node.code), stop=_stop_facts(nodes))
    return _launcher_failed(nodes)


def is_permanent(code: int | None) -> bool:
    """Whether an exit code says that the same command would fail again."""
    return code is not None and 1 <= code <= 5


def _known(nodes: Sequence[Node], ranks: Sequence[range]) -> list[Record]:
    """Returns what ranks recorded, each once: on a disk that all see, every machine tells of every rank, and the plan says whose it is."""
    owners = {rank: place for place, own in enumerate(ranks) for rank in own}
    found: dict[int, Record] = {}
    for place, node in enumerate(nodes):
        for rank, (facts, at) in node.records.items():
            if rank not in found or at < found[rank][0]:
                found[rank] = at, rank, facts, owners.get(rank, place)
    return list(found.values())


def is_own(rank: int, facts: Mapping[str, Any]) -> bool:
    """Whether a rank's record tells of a failure of its own, not that another had gone or that it was asked to leave."""
    code = int(facts.get("code", 0))
    others = facts.get("blames") not in (None, rank) or facts.get("cause") in ("unreachable", "agent", "peer")
    return code not in (0, *STOPPED) and not others


def _rank_failed(node: Node, rank: int, facts: Mapping[str, Any]) -> Outcome:
    code, error = int(facts["code"]), str(facts.get("error") or "it failed").strip().removeprefix("error: ")
    # A rank whose loading process was killed cannot know what for; its launcher has seen the kernel's counters.
    seen_there = node.event.get("cause") == OUT_OF_MEMORY and node.event.get("rank") == rank
    short = facts.get("cause") == OUT_OF_MEMORY or seen_there
    how = "ran out of memory" if short else "failed first"
    message = f"error: host `{node.host.name}`: {error}\n\nrank {rank} (`{node.host.name}`) {how}; all hosts were stopped"
    if short:
        return Outcome(code=LOST, rank=rank, message=message, cause=OUT_OF_MEMORY, doing=facts.get("doing") or {})
    return Outcome(code=code, rank=rank, message=message, cause=facts.get("cause") or ("failed" if code != LOST else "killed"))


def _host_lost(nodes: Sequence[Node], places: Sequence[int], ranks: Sequence[range]) -> Outcome:
    """Names the machines that have gone. One that was lost with all others means that this machine's own cable is the likely cause."""
    first = nodes[places[0]]
    names = ", ".join(f"`{nodes[place].host.name}` ({nodes[place].host.address})" for place in places)
    which = f"host{'s' if len(places) > 1 else ''} {names} disappeared: {first.lost}"
    here = [str(rank) for place in places for rank in (ranks[place] if place < len(ranks) else ())]
    own = f"; {'ranks' if len(here) > 1 else 'rank'} {', '.join(here)} ran there" if here else ""
    all_others = len(places) == len(nodes) - 1 > 1
    hint = (
        "all others are lost, so this machine's own link may be the cause"
        if all_others
        else "is it on, plugged in, and not asleep?"
    )
    text = f"error: {which}{own}; all other hosts were stopped\n\nhint: {hint}"
    return Outcome(code=LOST, rank=int(here[0]) if here else None, message=text, cause="unreachable")


def _killed(nodes: Sequence[Node]) -> Outcome | None:
    """What a launcher says of a rank of its own that left no record: it was killed, or froze. The earliest."""
    found = []
    for node in nodes:
        event, error = node.event, str(node.event.get("error") or "")
        own = event.get("rank") is not None and event["rank"] not in node.records and "noticed by rank" not in error
        if (
            event.get("event") == "failed"
            and event.get("cause") != "peer"
            and (own or "frozen" in error or "made no step" in error)
        ):
            found.append((float(node.ended_at or 0.0), node))
    if not found:
        return None
    _, node = min(found, key=lambda one: one[0])
    text = str(node.event["error"]).removeprefix("error: ")
    return Outcome(
        code=int(node.event["code"]),
        rank=node.event.get("rank"),
        message=f"error: host `{node.host.name}`: {text}",
        cause=OUT_OF_MEMORY if node.event.get("cause") == OUT_OF_MEMORY else "killed",
    )


def _launcher_failed(nodes: Sequence[Node]) -> Outcome:
    """A launcher that ended before its workers, or that only lost its peers. What node 0 has said stands on the console already."""
    failed = sorted((node for node in nodes if node.code), key=lambda node: (not is_permanent(node.code), node.ended_at or 0.0))
    first = failed[0]
    code = first.code if first.code is not None and first.code > 0 else LOST
    same = nodes[0].code == first.code and last_words(first.words)[:200] == last_words(nodes[0].words)[:200]
    if first is nodes[0] or same:
        return Outcome(code=code, message="")
    words = last_words(first.words) or f"its launcher ended with code {first.code}"
    return Outcome(code=code, message=f"error: host `{first.host.name}`: {words.removeprefix('error: ')}")


def _asked(session: Session, permanent: Record | None) -> Outcome:
    """How a stop on request went: a failure to save comes before the request, unless the workers were killed at once."""
    if not session.stop.at_once:
        if permanent is not None:
            return _rank_failed(session.nodes[permanent[3]], permanent[1], permanent[2])
        if any(is_permanent(node.code) for node in session.nodes):
            return _launcher_failed(session.nodes)
    return _stopped(session)


def _stopped(session: Session) -> Outcome:
    number = session.stop.signals[0] if session.stop.signals else 15
    return Outcome(code=stop_code(number), stop=_stop_facts(session.nodes))


def _stop_facts(nodes: Sequence[Node]) -> Mapping[str, Any]:
    event = nodes[0].event
    return (
        {key: event.get(key) for key in ("signal", "step", "phase", "saved", "note")} if event.get("event") == "stopped" else {}
    )


def strays(nodes: Sequence[Node]) -> str:
    """Returns a line about processes that could not be ended; empty where there are none."""
    left = [f"{node.left} on `{node.host.name}`" for node in nodes if node.left]
    return f"warning: processes that could not be killed: {printable(', '.join(left))}" if left else ""
