"""What is known of a run that was stopped on request: by whom, where, and what is saved."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sft_play.launch.run_folder import record_event, stop_code
from sft_play.runs.checkpoints import newest_valid
from sft_play.runs.folder import RunFolder


def stop_of(failed: Sequence[tuple[int, Mapping[str, Any]]], silent: Sequence[int], lost: int | None) -> Mapping[str, Any] | None:
    """Returns the record of the worker that left first, when it left because it was asked to; `None` when another cause came first.

    `failed`: the records of workers that did not finish, the earliest first; `lost`: the rank that was seen to go first. A rank that
    went without a word made its parent ask the others to stop.
    """
    if failed and int(failed[0][1]["code"]) in (130, 143) and lost not in silent:
        return failed[0][1]
    return None


def facts(run: RunFolder, signals: Sequence[int], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what the event `stopped` keeps: `signal`, `step` (the last that ended) and `saved`, the newest complete checkpoint.

    Its files are compared by size alone: whoever saved it has read it back, `make resume` compares every byte, and to read a large one
    takes longer than a scheduler waits.
    """
    told = [record["stop"] for record in records if "stop" in record]
    name = signal.Signals(signals[0]).name if signals else told[0]["signal"] if told else None
    newest, damaged = newest_valid(run, sizes_only=True)
    notes = [str(record["note"]) for record in records if "note" in record][:1] + [f"damaged: {reason}" for reason in damaged]
    return {
        "signal": name,
        "step": max((int(one["step"]) for one in told), default=None),
        "phase": told[0]["phase"] if told else None,
        "saved": newest.name if newest else None,
        "note": "; ".join(notes) or None,
    }


def describe(stop: Mapping[str, Any]) -> str:
    """Returns the line that says how a run was stopped and what is saved."""
    saved, step = stop.get("saved"), stop.get("step")
    after = f" after step {step}" if step else ""
    whole = f"checkpoint {saved} is whole" if saved else "there is no whole checkpoint"
    note = f"; {stop['note']}" if stop.get("note") else ""
    return f"stopped by {stop.get('signal') or 'a signal'}{after}; {whole}{note}"


@contextlib.contextmanager
def stop_recorded(run: RunFolder, node_rank: int) -> Iterator[None]:
    """Records a stop that comes in the body while no worker lives; one that comes while workers live is their launcher's to tell."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as stop:
        number = signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM
        with contextlib.suppress(OSError):  # a full disk must not hide that the run was stopped
            record_event(run, "stopped", node_rank=node_rank, code=stop_code(number), **facts(run, (number,), ()))
        raise
