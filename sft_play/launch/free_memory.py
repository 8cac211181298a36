"""Waits, before another attempt, until the driver has taken back the GPU memory of the last one's processes.

Else the next workers would run out of it, and the micro-batch would be halved for the rest of the run.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from sft_play.launch.stopping import say
from sft_play.plan.detect import detect
from sft_play.plan.hardware import GIB, Hardware

WAIT_SECONDS = 60.0
LOOK_SECONDS = 0.5
SLACK = 0.02
"""Share of a card's memory that may be missing: other programs (a display) come and go."""


def wait_until_free(before: Hardware, devices: Collection[int]) -> None:
    """Returns when as much is free on these devices as `before` the run, or after `WAIT_SECONDS`, and says what it waits for.

    Raises `HardwareError` where a card does not answer any more.
    """
    deadline, told = time.monotonic() + WAIT_SECONDS, False
    while held := _held(before, detect(), devices):
        words = ", ".join(f"{size / GIB:.1f} GiB on cuda:{index}" for index, size in held.items())
        if time.monotonic() > deadline:
            say(
                f"warning: {words} still held after {WAIT_SECONDS:.0f} s; going on\n\nhint: `nvidia-smi` shows the programs that hold it"
            )
            return
        if not told:
            say(f"waiting until the memory of the processes that have ended is free: {words}")
        told = True
        time.sleep(LOOK_SECONDS)


def _held(before: Hardware, now: Hardware, devices: Collection[int]) -> dict[int, int]:
    """Returns index -> bytes that were free before and are not now; nothing where the driver has gone meanwhile."""
    if now.kind != before.kind:
        return {}
    pairs = enumerate(zip(before.devices, now.devices, strict=False))
    missing = {index: then.free_bytes - card.free_bytes for index, (then, card) in pairs if index in devices}
    return {index: size for index, size in missing.items() if size > SLACK * before.devices[index].memory_bytes}
