"""How a launch ended, by the workers' records, the agent's log, what the launcher observed first, and the standings of
ranks that hang.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sft_play.files import is_full, is_gone, is_read_only, tail, write_text
from sft_play.launch.liveness import Beat
from sft_play.launch.process import stop_code
from sft_play.launch.run_folder import exit_records
from sft_play.runs.checkpoints import newest_valid
from sft_play.runs.folder import RunFolder, folder_gone

LOST = 75
PATTERNS = {
    # torch 2.13, distributed/elastic/multiprocessing/errors: each failed rank, negative for a signal, first last.
    "exit": re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+)"),
    # Python 3.11, subprocess.CalledProcessError of a single process.
    "death": re.compile(r"died with <Signals\.(\w+): \d+>"),
    # torch 2.13, TCPStore.cpp: machines whose agents did not come.
    "missing": re.compile(r"Timed out after (\d+) seconds waiting for clients\. (\d+)/(\d+) clients joined"),
    # torch 2.13, socket.cpp: taken since it was found free.
    "port": re.compile(r"EADDRINUSE|[Aa]ddress already in use"),
    # torch 2.13, ProcessGroupNCCL.cpp: before it aborts a rank whose collective operation failed or never ended.
    "watchdog": re.compile(
        r"(?i)watchdog thread terminated with exception: .*|to dump debug info, due to collective timeout.*"
    ),
    # The same, where the rank's own GPU has failed.
    "own fault": re.compile(r"(?i)CUDA error|Cuda failure|unhandled cuda error"),
    # libstdc++, and bitsandbytes 0.50, which exits with 1: memory that ran out in C++.
    "native": re.compile(
        r"terminate called after throwing an instance of 'std::bad_alloc'|Error out of memory at line \d+ in file \S+"
    ),
}
"""Messages of other programs that are parsed, since neither records nor exit codes have the fact.

The first four are in the log of `accelerate launch`, the others in that of a rank.
"""
WORDS_BYTES = 200_000
"""Length of the end of a rank's log that is searched: stacks of all threads may follow the reason of an abort."""

Standings = Mapping[str, Mapping[str, Any]]
"""Rank -> what `standing` returns."""
Cause = Literal[
    "out_of_memory",
    "killed",
    "frozen",
    "hang",
    "unreachable",
    "not_joined",
    "failed",
    "agent",
    "peer",
    "port",
]
OUT_OF_MEMORY: Cause = "out_of_memory"
PEER: Cause = "peer"
"""Cause of a rank that only lost its connection to another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a launch ended."""

    code: int
    """Exit code, as in `docs/launching.md`."""
    rank: int | None = None
    """The rank that failed first."""
    host: str = ""
    """Host of that rank in a run on several machines."""
    message: str = ""
    """The error for the user; empty on success."""
    what: str = ""
    """What happened, without consequences, where that is not the first line of the message."""
    cause: Cause | None = None
    """Why a rank was lost (code 75); otherwise `None`."""
    doing: Mapping[str, Any] = field(default_factory=dict)
    """The rank's activity: `phase`, `step`, `micro_step`, `rows`; empty if it is not known."""
    stop: Mapping[str, Any] = field(default_factory=dict)
    """Facts of a stop on request: `signal`, `step`, `saved`, `note`."""
    late_stop: int = 0
    """The exit code of a stop that was asked for when the training was complete (`code` is 0): nothing else follows."""

    @property
    def first_line(self) -> str:
        """What happened, without consequences."""
        return self.what or self.message.strip().partition("\n")[0].removeprefix("error: ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What the launcher observed itself before it ended all ranks."""

    cause: Cause
    rank: int | None
    text: str = ""
    """A line for the user; empty if the records and the agent's log say more."""
    lines: tuple[str, ...] = ()
    """Further lines: where each rank stands."""
    hint: str = ""


def outcome_of(
    run: RunFolder,
    ranks: range,
    *,
    agent_code: int,
    agent_log: str,
    signals: tuple[int, ...] = (),
    loss: Loss | None = None,
    memory_kill: str | None = None,
    log_starts: Mapping[int, int] | None = None,
) -> Outcome:
    """Return how the workers ended, from their records, the agent's log and what the launcher observed first.

    `log_starts` maps ranks to the length of their logs before this attempt. Causes take precedence in this order: a
    missing run folder; what made the launcher end all ranks (a frozen or hanging rank); a worker that reported that
    memory ran out, unless another had a permanent error before; a worker that never joined the others; an error that no
    lost peer explains (codes 2, 4, 5), or that was observed first; a worker that a signal killed (the others then only
    lost their peer), for lack of memory if `memory_kill` is evidence of that; the earliest permanent error (codes 1 to
    5), a worker without a record, the earliest lost peer, a stop on request. A worker that NCCL's watchdog ended has
    only lost its peer.
    """
    records = exit_records(run, ranks)
    failed = sorted((record for record in records.values() if record["code"]), key=lambda record: record["time"])
    silent = [rank for rank in ranks if rank not in records]
    if not failed and not silent:
        return Outcome(code=0, late_stop=stop_code(signals[0]) if signals else 0)
    if silent and is_gone(run.path):
        return Outcome(code=3, message=folder_gone(run).render())
    permanent = [record for record in failed if 1 <= record["code"] <= 5]
    if signals:
        return _asked_to_stop(run, signals, failed, permanent, silent)
    if loss and loss.text and not (loss.cause == "agent" and memory_kill):
        return _observed(run, loss)
    causes = {OUT_OF_MEMORY, "killed"} if memory_kill else {OUT_OF_MEMORY}  # killed: a process that loads data
    short = [record for record in failed if record.get("cause") in causes]
    if short and (not permanent or short[0]["time"] <= permanent[0]["time"]):
        return _recorded(run, {**short[0], "cause": OUT_OF_MEMORY})
    seen_first = loss.rank if loss and loss.cause == "failed" else None
    absent = [] if memory_kill else [r for r in failed if r.get("cause") == "not_joined" and r.get("blames") in silent]
    sure = [*absent, *(r for r in permanent if r["code"] not in (1, 3) or r["rank"] == seen_first)]
    if sure:
        return _recorded(run, sure[0])
    logs = {rank: tail(run.rank_log(rank), WORDS_BYTES, since=(log_starts or {}).get(rank, 0)) for rank in silent}
    peers = {rank: words for rank, text in logs.items() if (words := _lost_its_peer(text))}
    alone = [rank for rank in silent if rank not in peers]
    shortages = [(rank, shortage[0]) for rank, text in logs.items() if (shortage := PATTERNS["native"].search(text))]
    if shortages:
        return _vanished(run, shortages[0][0], "ended", f"its log says `{shortages[0][1]}`")
    if killed := _killed(ranks, alone, agent_log, loss):
        return _vanished(run, *killed, memory_kill)
    # A single worker, or the parent of all, got a signal; a rank without a record would be the cause instead.
    asked = bool(failed) and failed[0]["code"] in (130, 143) and not (loss and loss.rank in silent)
    if asked and (seen_first is not None or not peers):
        return Outcome(code=failed[0]["code"], stop=stop_facts(run, (), failed))
    if not permanent and alone and (failed or agent_code < 0):
        return _vanished(run, alone[0], "vanished without a record", memory_kill)
    if not permanent and peers and all(r["code"] in (130, 143) for r in failed):  # torchrun asked the others to leave
        rank, words = next(iter(peers.items()))
        return _recorded(run, {"rank": rank, "code": LOST, "error": words, "cause": PEER})
    return _recorded(run, (permanent or failed)[0]) if failed else _never_began(run, ranks, agent_code, agent_log)


Records = Sequence[Mapping[str, Any]]


def _asked_to_stop(
    run: RunFolder, signals: tuple[int, ...], failed: Records, permanent: Records, silent: Sequence[int]
) -> Outcome:
    """Return how workers ended after this launcher was asked to stop."""
    if permanent and len(signals) == 1:
        return _recorded(run, permanent[0])
    if silent and is_read_only(run.path):  # nothing was saved, and no rank could record that
        return _vanished(run, silent[0], "was asked to stop, and its last steps could not be saved", None)
    return Outcome(code=stop_code(signals[0]), stop=stop_facts(run, signals, failed))


def _killed(ranks: range, alone: Sequence[int], agent_log: str, loss: Loss | None) -> tuple[int, str] | None:
    """Return a rank without a record that a signal killed, and a description."""
    others, _, root_cause = agent_log.partition("Root Cause")
    codes = [
        (int(rank), int(code)) for rank, code in PATTERNS["exit"].findall(root_cause) + PATTERNS["exit"].findall(others)
    ]
    for rank, code in codes:
        if rank in alone and code < 0 and -code != signal.SIGTERM:  # torchrun ends the others by SIGTERM
            return rank, f"was killed by {signal.Signals(-code).name}"
    if (death := PATTERNS["death"].search(agent_log)) and ranks.start in alone:
        return ranks.start, f"was killed by {death[1]}"
    # Where the others do not leave in time, torchrun never reports which rank failed.
    if not codes and loss and loss.rank is not None and loss.rank in alone:
        return loss.rank, "was killed by a signal"
    return None


def _lost_its_peer(log: str) -> str | None:
    """Return the message of NCCL's watchdog if it ended a log's rank because of another rank, otherwise `None`."""
    match = PATTERNS["watchdog"].search(log)
    return None if match is None or PATTERNS["own fault"].search(log, match.start(), match.end() + 1000) else match[0]


def _error(record: Mapping[str, Any]) -> str:
    return str(record.get("error") or "").rstrip()


def _who(rank: int) -> str:
    """Return a rank of this machine with the machine's name."""
    return f"rank {rank} ({socket.gethostname()})"


def _recorded(run: RunFolder, record: Mapping[str, Any]) -> Outcome:
    """Return the outcome from a rank's record of its end, or of the rank that made it leave."""
    rank, error, cause, log = record["rank"], _error(record), record.get("cause"), run.rank_log(record["rank"])
    if "blames" in record:
        what = error.removeprefix("error: ")
        text = f"error: {what}; all ranks were stopped\n\nhint: noticed by rank {rank}; its log: {log}"
        return Outcome(code=LOST, rank=record["blames"], message=text, what=what, cause=cause)
    if cause == PEER:  # the rank that failed ran on another machine, or its record would count instead
        why = f"{_who(rank)} lost its connection to another rank; the machine of that rank says why"
        text = f"{error}\n\n{why}; the log of rank {rank}: {log}; docs/troubleshooting.md#nccl-timeout"
        what = f"rank {rank} lost its connection to another rank ({error.partition(chr(10))[0][:100]})"
        return Outcome(code=record["code"], rank=rank, message=text, what=what, cause=PEER)
    text = (
        f"{error}\n\n{_who(rank)} {'ran out of memory' if cause == OUT_OF_MEMORY else 'failed first'}; its log: {log}"
    )
    facts = {key: record[key] for key in ("what", "cause", "doing") if key in record and record["code"] == LOST}
    return Outcome(code=record["code"], rank=rank, message=text, **facts)


def _observed(run: RunFolder, loss: Loss) -> Outcome:
    """Return the outcome by what the launcher observed."""
    log = f"the log of rank {loss.rank}: {run.rank_log(loss.rank)}" if loss.rank is not None else f"logs: {run.logs}"
    hint = f"{loss.hint}; {log}" if loss.hint else log
    text = "\n".join([f"error: {loss.text}; all ranks were stopped", *loss.lines])
    return Outcome(code=LOST, rank=loss.rank, message=f"{text}\n\nhint: {hint}", what=loss.text, cause=loss.cause)


def _vanished(run: RunFolder, rank: int, how: str, memory_kill: str | None) -> Outcome:
    """Return the outcome for a rank without a record.

    It counts as lost, whatever the signal, unless memory or a full or read-only disk is known to be the cause.
    """
    full = is_full(run.path)
    if memory_kill is None and (full or is_read_only(run.path)):
        problem = "no space is left on the disk" if full else "Read-only file system"
        hint = f"`df` and `dmesg` say more; the last checkpoint is as it was; then: make resume RUN={run.typed}"
        return Outcome(code=3, rank=rank, message=f"error: {run.path}: {problem}; {_who(rank)} {how}\n\nhint: {hint}")
    why = " (nothing shows that memory was short; see `dmesg`)" if "SIGKILL" in how else ""
    why = f" because memory ran out ({memory_kill})" if memory_kill else why
    what, cause = f"{_who(rank)} {how}{why}", OUT_OF_MEMORY if memory_kill else "killed"
    text = f"error: {what}; all other ranks were stopped\n\nhint: its log: {run.rank_log(rank)}"
    return Outcome(code=LOST, rank=rank, message=text, what=what, cause=cause)


def _never_began(run: RunFolder, ranks: range, agent_code: int, agent_log: str) -> Outcome:
    missing = PATTERNS["missing"].search(agent_log)
    if missing:
        seconds, joined, all_of_them = missing.groups()
        text = (
            f"error: only {joined} of {all_of_them} nodes joined within {seconds} s; this one starts ranks"
            f" {ranks.start} to {ranks.stop - 1}"
        )
        hint = "the launchers have met, but not their ranks: open the ports from MASTER_PORT on between the nodes"
        return Outcome(code=LOST, message=f"{text}\n\nhint: {hint}", cause="not_joined")
    if PATTERNS["port"].search(agent_log):
        text = "error: the port on which the workers meet was taken by another process after it had been found free"
        hint = "type the same command again; if you set MASTER_PORT, try another"
        return Outcome(code=LOST, message=f"{text}\n\nhint: {hint}", cause="port")
    words = "\n".join(deque(agent_log.splitlines(), maxlen=15))
    text = (
        f"error: the workers did not start (accelerate launch returned {agent_code}); {launcher_log(run, ranks.start)}"
        f" ends with\n{words}"
    )
    return Outcome(code=1, message=text)


def launcher_log(run: RunFolder, first_rank: int) -> Path:
    """Return the log of `accelerate launch` and torchrun; each node has its own, since nodes may share a disk."""
    return run.logs / ("launcher.log" if first_rank == 0 else f"launcher-from-rank{first_rank}.log")


def stop_facts(run: RunFolder, signals: Sequence[int], records: Records) -> dict[str, Any]:
    """Return the fields of the event `stopped`: `signal`, `step` (the last complete one), `saved` (the newest complete
    checkpoint) and others.

    The checkpoint's files are compared only by size: the worker read them back after saving, `make resume` compares
    every byte, and reading a large one takes longer than a scheduler waits.
    """
    stops = [record["stop"] for record in records if "stop" in record]
    name = signal.Signals(signals[0]).name if signals else stops[0]["signal"] if stops else None
    newest, damaged = newest_valid(run, sizes_only=True)
    notes = [str(record["note"]) for record in records if "note" in record][:1] + [
        f"damaged: {reason}" for reason in damaged
    ]
    return {
        "signal": name,
        "step": max((int(stop["step"]) for stop in stops), default=None),
        "saved": newest.name if newest else None,
        "note": "; ".join(notes) or None,
    }


def describe_stop(stop: Mapping[str, Any]) -> str:
    """Return a line about how a run was stopped and what is saved."""
    saved, step = stop.get("saved"), stop.get("step")
    after = f" after step {step}" if step else ""
    whole = f"checkpoint {saved} is complete" if saved else "there is no complete checkpoint"
    note = f"; {stop['note']}" if stop.get("note") else ""
    return f"stopped by {stop.get('signal') or 'a signal'}{after}; {whole}{note}"


CAUSE_VARIABLE = "SFT_PLAY_CAUSE_FILE"
"""Variable that names the file for a loss's cause; the script of `make slurm` sets it."""


def write_cause(outcome: Outcome) -> None:
    """Write why a rank was lost, in a word, to the file of `CAUSE_VARIABLE`; ignore a file that cannot be written."""
    path = os.environ.get(CAUSE_VARIABLE)
    if path and outcome.cause:
        with contextlib.suppress(OSError):
            write_text(Path(path), f"{outcome.cause}\n")


FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line \d+ in (?P<function>\S+)', re.MULTILINE)
MAIN = re.compile(r"sft_play/train\.py$")
COLLECTIVE = re.compile(r"/torch/distributed/|/accelerate/utils/operations\.py$|/deepspeed/comm/")


def main_frames(stacks: str) -> list[tuple[str, str]]:
    """Return (file, function) of each frame of the training thread, innermost first; empty if it is not found."""
    for thread in re.split(r"\n(?=Thread |Current thread )", stacks):
        frames = [(match["file"], match["function"]) for match in FRAME.finditer(thread)]
        if any(MAIN.search(file) for file, _ in frames):
            return frames
    return []


def standing(beat: Beat, quiet: float, stacks: str) -> dict[str, Any]:
    """Return where a rank without progress stands: its position (`at`), whether it `waits` for other ranks (`None` if
    unknown), and descriptions.

    `quiet` is in seconds, `stacks` is the dump of its threads.
    """
    frames = main_frames(stacks)
    inner = f", at {frames[0][1]} ({'/'.join(frames[0][0].split('/')[-2:])})" if frames else ""
    begun = f", {beat.collectives} collective operations begun" if beat.collectives is not None else ""
    return {
        "host": beat.host,
        "quiet": quiet,
        "at": list(beat.at()),
        "collectives": beat.collectives,
        "waits": any(COLLECTIVE.search(file) for file, _ in frames) if frames else None,
        "where": beat.where(),
        "stuck": f"{begun}{inner}",
    }


def culprits(standings: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the ranks that keep the others waiting; empty if unknown.

    These are ranks that are behind, otherwise those that have begun fewer collective operations (under NCCL ranks wait
    for the GPU, outside torch.distributed), otherwise those that do not wait.
    """
    if len(standings) < 2:
        return list(standings)
    for key in ("at", "collectives"):
        places = {rank: facts[key] for rank, facts in standings.items() if facts[key] is not None}
        if len(places) == len(standings) and min(places.values()) != max(places.values()):
            return [rank for rank, place in places.items() if place == min(places.values())]
    working = [rank for rank, facts in standings.items() if facts["waits"] is False]
    return working if len(working) < len(standings) else []


def hang(standings: Mapping[int, Mapping[str, Any]], run: RunFolder) -> Loss:
    """Return the loss when no rank makes progress: which ranks keep the others waiting, and a line for each."""
    blamed, quiet = culprits(standings), min(facts["quiet"] for facts in standings.values())
    lines = []
    for rank, facts in sorted(standings.items()):
        waits = " waiting for other ranks" if facts["waits"] and rank not in blamed else ""
        lines.append(f"  rank {rank} ({facts['host']}): {facts['where']}{waits}{facts['stuck']}")
    who = "rank" if len(blamed) == 1 else "ranks"
    names = ", ".join(f"{rank} ({standings[rank]['host']})" for rank in blamed)
    text = f"{who} {names} made no step for {quiet:.0f} s" if blamed else f"no rank made a step for {quiet:.0f} s"
    hint = f"`launch.hang_seconds` is the patience; stacks of all threads: {run.logs}/stack-rank*.txt; "
    hint += "docs/troubleshooting.md#hangs-after-initialized"
    if any(facts["collectives"] is not None for facts in standings.values()):
        hint += f"; collective operations: {run.logs}/collectives-rank*.json"
    return Loss(cause="hang", rank=blamed[0] if len(blamed) == 1 else None, text=text, lines=tuple(lines), hint=hint)
