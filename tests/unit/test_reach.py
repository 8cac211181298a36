"""A door that the kernel answers at, whatever the process that opened it is busy with."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from sft_play.training.reach import Door, answers

OPENS = "from sft_play.training.reach import Door; door = Door('127.0.0.1'); print(door.address[1], flush=True); input()"


def test_a_frozen_process_and_a_closed_port_answer() -> None:
    with subprocess.Popen([sys.executable, "-c", OPENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            os.kill(process.pid, signal.SIGSTOP)
            assert answers(("127.0.0.1", port))
        finally:
            process.kill()
    assert answers(("127.0.0.1", port)), "it refuses: the machine is there"


def test_who_has_knocked_is_forgotten() -> None:
    door = Door("127.0.0.1")
    assert door.address[0] == "127.0.0.1"
    for _ in range(300):  # more than may wait
        assert answers(door.address)
        door.clear()


def test_what_no_kernel_answers_for_is_gone() -> None:
    """A listener whose queue is full drops what knocks, as a dead machine does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()[:2]
        with socket.create_connection(address), socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(address)
            assert not answers(address)
