"""Whether another rank's machine can be reached, whatever its Python is busy with.

Each rank listens at a port of its own. The kernel answers there, even while Python's lock is held for half a minute by a large read or write;
a machine that is off, or whose cable is cut, answers nothing. Nothing is ever read or sent.
"""

from __future__ import annotations

import contextlib
import socket

from sft_play.launch.network import address_towards

SECONDS = 4.0
"""Within which a machine that is there answers: time for a lost packet to be sent again."""
WAITING = 128


class Door:
    """A port of this rank that others may knock at."""

    def __init__(self, towards: str) -> None:
        """`towards`: a host name or address; the door is at this machine's address on the way there. Raises `OSError` or `UserError`."""
        self._socket = socket.create_server((address_towards(towards, 9), 0), backlog=WAITING)
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def clear(self) -> None:
        """Forgets who has knocked."""
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()


def answers(address: tuple[str, int]) -> bool:
    """Whether the machine at an address answers, if only by refusing."""
    try:
        socket.create_connection(address, timeout=SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
