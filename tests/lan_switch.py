"""A switch whose cables take time: TAP devices in the hosts' namespaces, joined by this process. For kernels without netem.

    python -m tests.lan_switch RATE_MBIT DELAY_MS KEEPER/ADDRESS ...

Makes `eth0` with its address in the network namespace of each KEEPER process, prints `up`, and passes frames on until it is ended: each
frame leaves its sender and enters its receiver at the rate, and arrives DELAY_MS (one way) later.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TAP, NO_INFO, WITH_HEADER = 0x2, 0x1000, 0x4000
CHECKSUM_TSO4_TSO6 = 0x1 | 0x2 | 0x4
"""Frames of 64 KB, as network cards take them from the kernel: a gigabit is then 2,000 frames a second."""
HEADER = 10
QUEUE_SECONDS = 0.2
"""What a receiver's port holds back before it drops."""
LONGEST_FRAME = 70_000


def tap(keeper: str, address: str) -> int:
    """Makes `eth0` in the namespace of `keeper` and returns its descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    own, theirs = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/proc/{keeper}/ns/net", os.O_RDONLY)
    try:
        assert libc.setns(theirs, 0) == 0, os.strerror(ctypes.get_errno())
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"eth0", TAP | NO_INFO | WITH_HEADER))
            fcntl.ioctl(device, TUNSETOFFLOAD, CHECKSUM_TSO4_TSO6)
            subprocess.run(["ip", "addr", "add", f"{address}/24", "dev", "eth0"], check=True, timeout=20)
            subprocess.run(["ip", "link", "set", "eth0", "up"], check=True, timeout=20)
        finally:
            assert libc.setns(own, 0) == 0
    finally:
        os.close(own)
        os.close(theirs)
    return device


class Switch:
    """Learns addresses, keeps frames until they are due."""

    def __init__(self, ports: list[int], rate: float, delay: float) -> None:
        self.ports, self.rate, self.delay = ports, rate, delay
        self.free_out, self.free_in = dict.fromkeys(ports, 0.0), dict.fromkeys(ports, 0.0)
        self.known: dict[bytes, int] = {}
        self.waiting: list[tuple[float, int, int, bytes]] = []
        self.count = 0

    def take(self, port: int, frame: bytes) -> None:
        """Books the time of a frame on its sender's cable and on its receivers'."""
        now = time.perf_counter()
        target, source = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
        self.known[source] = port
        self.free_out[port] = left = max(now, self.free_out[port]) + len(frame) / self.rate
        for other in [self.known[target]] if target in self.known else [one for one in self.ports if one != port]:
            if self.free_in[other] - now > QUEUE_SECONDS:
                continue
            # The receiver's cable carries the frame while the sender's does: it adds no time unless others send too.
            self.free_in[other] = max(left, self.free_in[other] + len(frame) / self.rate)
            self.count += 1
            heapq.heappush(self.waiting, (self.free_in[other] + self.delay, self.count, other, frame))

    def give(self) -> None:
        """Hands over what is due."""
        now = time.perf_counter()
        while self.waiting and self.waiting[0][0] <= now:
            _, _, port, frame = heapq.heappop(self.waiting)
            try:
                os.write(port, frame)
            except OSError:  # its queue is full, or its interface down: lost, as on a cable
                continue

    def run(self) -> None:
        poll = select.epoll()
        for port in self.ports:
            poll.register(port, select.EPOLLIN)
        while True:
            due = self.waiting[0][0] - time.perf_counter() if self.waiting else 0.05
            for port, _ in poll.poll(min(0.05, due) if due > 0.0005 else 0):
                for _ in range(64):
                    try:
                        self.take(port, os.read(port, LONGEST_FRAME))
                    except BlockingIOError:
                        break
            self.give()


def main(rate_mbit: str, delay_ms: str, *hosts: str) -> None:
    ports = [tap(*host.split("/")) for host in hosts]
    print("up", flush=True)
    Switch(ports, float(rate_mbit) * 1e6 / 8, float(delay_ms) / 1e3).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
