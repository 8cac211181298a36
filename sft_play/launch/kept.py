"""How a run was launched and planned, as a resume needs it: from `events.jsonl` and `plan.json`, else from the copy `launch-nodeN.json`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sft_play.errors import CheckpointError
from sft_play.files import read_json, write_json
from sft_play.launch.run_folder import has_started, read_events
from sft_play.plan.plan import Plan
from sft_play.runs.checkpoints import newest_valid
from sft_play.runs.folder import RunFolder

NEEDED = frozenset({"command", "num_gpus", "num_nodes", "deepspeed", "fsdp"})
"""Facts without which a launch cannot be repeated (`resume.launch_facts`)."""
_told: set[str] = set()
"""Notes that this process has printed."""


def keep_launch(run: RunFolder, node_rank: int, facts: Mapping[str, Any], plan: Plan, *, anew: bool) -> None:
    """Writes this node's `launch-nodeN.json`: the facts of the run's first launch and of this one, and its plan. Raises `OSError`.

    `anew`: this is the run's first launch.
    """
    known = [] if anew else _of_events(run, node_rank, NEEDED) or _of_copy(run, node_rank)
    write_json(run.launch(node_rank), {"first": known[0] if known else dict(facts), "last": dict(facts), "plan": asdict(plan)})


def first_launch(run: RunFolder, *, needed: Set[str] = frozenset({"command"})) -> dict[str, Any]:
    """Returns the facts of the run's first launch that has those `needed`.

    Raises `CheckpointError` where they are lost, and for a run that never started.
    """
    return _launches(run, 0, needed)[0]


def last_launch(run: RunFolder, node_rank: int) -> dict[str, Any]:
    """Returns the facts of the launch that a user last asked for, on this node where nodes share the folder.

    Raises `CheckpointError` where they are lost, and for a run whose workers never started.
    """
    return _launches(run, node_rank, NEEDED)[-1]


def kept_facts(run: RunFolder) -> dict[str, Any]:
    """Returns the facts of the run's last attempt by its copy; empty where there is none."""
    return next(iter(reversed(_of_copy(run, 0))), {})


def last_plan(run: RunFolder) -> Plan:
    """Returns the run's last plan; says so where it is the copy's. Raises `CheckpointError` where neither can be read."""
    try:
        return Plan.load(run.plan)
    except CheckpointError as error:
        for path in _copies(run, 0):
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
                plan = Plan.from_json(read_json(path)["plan"])
                _tell(f"note: {run.plan} is missing or damaged; its copy in `{path.name}` is taken")
                return plan
        if not run.plan.exists() and not has_started(run):
            raise never_started(run) from None
        raise _lost(run, run.plan, error.message) from error


def never_started(run: RunFolder) -> CheckpointError:
    """Returns the error for a run whose workers were never started."""
    return CheckpointError(
        f"`{run.name}` never started, so there is nothing to go on from", hint="start it again under another RUN_NAME"
    )


def _launches(run: RunFolder, node_rank: int, needed: Set[str]) -> list[dict[str, Any]]:
    if found := _of_events(run, node_rank, needed):
        return found
    if found := _of_copy(run, node_rank):
        _tell(f"note: {run.events} is missing or damaged; `{run.launch(0).name}` says how the run was launched")
        return found
    if not has_started(run):
        raise never_started(run)
    raise _lost(run, run.events, "it is missing or damaged, so how the run was launched is unknown")


def _of_events(run: RunFolder, node_rank: int, needed: Set[str]) -> list[dict[str, Any]]:
    found = [
        event for event in read_events(run) if event["event"] in ("started", "resumed") and _has(event.get("launch"), needed)
    ]
    own = [event for event in found if event.get("node", 0) == node_rank]
    return [dict(event["launch"]) for event in own or found]


def _of_copy(run: RunFolder, node_rank: int) -> list[dict[str, Any]]:
    for path in _copies(run, node_rank):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            copy = read_json(path)
            if _has(copy["first"], NEEDED) and _has(copy["last"], NEEDED):
                return [copy["first"], copy["last"]]
    return []


def _copies(run: RunFolder, node_rank: int) -> list[Path]:
    own = run.launch(node_rank)
    return [own, *sorted(path for path in run.path.glob("launch-node*.json") if path != own)]


def _tell(note: str) -> None:
    """Says it once in a command, which asks several times."""
    if note not in _told:
        print(note, file=sys.stderr)
    _told.add(note)


def _has(facts: object, needed: Set[str]) -> bool:
    return isinstance(facts, dict) and facts.keys() >= needed


def _lost(run: RunFolder, path: Path, why: str) -> CheckpointError:
    newest = newest_valid(run, sizes_only=True)[0]
    there = f"; `{newest.name}` is there" if newest else ""
    copy = run.launch(0).name
    return CheckpointError(
        f"{why}{there}",
        place=str(path),
        hint=f"put it back from a backup, or put `{copy}` there, which the same command writes for a run of another RUN_NAME when it starts",
    )
