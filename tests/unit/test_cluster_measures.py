"""What `cluster-check` reads and measures within its time: files up to a deadline, lines of any speed by a transfer that fits them."""

from __future__ import annotations

import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from sft_play.cluster import own_files, probe, probe_network
from sft_play.cluster.check import as_json, report
from sft_play.cluster.examined import Examined, Pair, Seen, Wanted
from sft_play.cluster.findings_network import network_findings
from sft_play.cluster.measures import sum_megabytes
from sft_play.cluster.own_files import wanted_of
from sft_play.config.cluster import Host, Inventory
from sft_play.config.load import load_config
from sft_play.config.schema import Config
from sft_play.files import file_sha256

HERE = Host(name="a", address="192.168.1.10")


class Line:
    """A listener behind a line of some speed: it answers as the probe's does, as late as that line would."""

    def __init__(self, mbit: float) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.mbit, self.counts = mbit, list[int]()
        self.port: int = self.server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self.server.accept()
        with connection:
            while kind := connection.recv(1):
                if kind == b"b":
                    left = count = struct.unpack("<Q", connection.recv(8, socket.MSG_WAITALL))[0]
                    began = time.monotonic()
                    while left:
                        left -= len(connection.recv(min(left, 1 << 20)))
                    self.counts.append(count)
                    time.sleep(max(0.0, count * 8 / 1e6 / self.mbit - (time.monotonic() - began)))
                connection.sendall(kind)


@pytest.mark.parametrize(("mbit", "transfers"), [(1, (1, 1)), (50, (2, 4))])
def test_a_transfer_is_as_long_as_the_line_is_fast(mbit: float, transfers: tuple[int, int]) -> None:
    """About half a second: 16 MiB would take two minutes at 1 Mbit/s."""
    line = Line(mbit)
    found = probe_network.reach("127.0.0.1", line.port, 16, 5)
    line.server.close()
    assert mbit / 4 < found["mbit"] <= mbit * 1.01
    assert transfers[0] <= len(line.counts) <= transfers[1]
    assert line.counts[0] == 1 << 16
    assert sum(line.counts) * 8 / 1e6 / mbit < 1.2


def test_a_fast_line_gets_the_whole_of_it() -> None:
    line = Line(1e6)
    found = probe_network.reach("127.0.0.1", line.port, 1, 5)
    line.server.close()
    assert line.counts == [1 << 16, 1 << 18, 1 << 20]
    assert found["mbit"] > 10


def test_a_file_that_is_not_read_in_time_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}")
    absent = str(tmp_path / "absent")
    assert probe.files([str(path), absent], 5) == {str(path): file_sha256(path), absent: None}
    assert probe.files([str(path), absent], 0) == {absent: None}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A configuration whose data are a folder with a small file and one that is too large to compare."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "small.jsonl").write_text("{}")
    with (data / "large.jsonl").open("wb") as stream:
        stream.truncate(700 * 10**6)
    path = tmp_path / "demo.yaml"
    path.write_text(f"model: {{name: builtin}}\ndata: {{train_path: {data}/*.jsonl}}\n")
    return load_config(path, (), {}).config


def test_what_is_too_large_is_told_and_the_rest_compared(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = wanted_of(config, 29500, 60)
    assert wanted.sources == {str(tmp_path / "data" / "small.jsonl"): file_sha256(tmp_path / "data" / "small.jsonl")}
    assert (wanted.left_files, wanted.left_bytes, wanted.more_left) == (1, 700 * 10**6, False)
    inventory = Inventory(hosts=(HERE,), network=None, ssh_config=None, path=Path("c.yaml"))
    text = list(report(Examined(hosts={}), inventory, wanted, {}))
    assert "data not compared: 0.7 GB in 1 file; after `make data` the prepared rows are compared, by their fingerprint" in text
    told = as_json(Examined(hosts={}), inventory, wanted, {})["not_compared"]
    assert told == {"files": 1, "bytes": 700 * 10**6, "more": False}
    monkeypatch.setattr(own_files, "MOST_SOURCES", 0)
    assert wanted_of(config, 29500, 60).left_files == 2
    none = wanted_of(config, 29500, -1)
    assert (none.sources, none.more_left) == ({}, True), "no time: not even listed"


def test_pairs_for_which_no_time_was_left_are_named() -> None:
    hosts = {name: Seen(Host(name=name, address=f"192.168.1.{k}")) for k, name in enumerate("abcd", start=10)}
    hosts["d"].lost = "reach: no answer within 20 s"
    measured = {("a", "b"), ("b", "a")}
    pairs = [Pair(x, y, None, None, 940.0 if (x, y) in measured else None) for x in hosts for y in hosts if x != y]
    pairs[pairs.index(next(one for one in pairs if (one.source, one.target) == ("c", "a")))].error = "timed out"
    inventory = Inventory(hosts=tuple(seen.host for seen in hosts.values()), network=None, ssh_config=None, path=Path("c.yaml"))
    findings = network_findings(Examined(hosts=hosts, pairs=pairs), inventory, Wanted(port=29500))
    left = {name: [one.text for one in some if one.id == "not-measured"] for name, some in findings.items()}
    text = "the speed from it to {} was not measured: no time was left"
    assert left == {"a": [text.format("`c`")], "b": [text.format("`c`")], "c": [text.format("`b`")], "d": []}
    assert {one.severity for some in findings.values() for one in some if one.id == "not-measured"} == {"warning"}


@pytest.mark.parametrize(("mbit", "size"), [(940.0, 8), (100.0, 8), (50.0, 4), (5.0, 0.25), (0.01, 0.0625)])
def test_the_sum_fits_the_slowest_line(mbit: float, size: float) -> None:
    """Three machines; a second a sum, where 64 KiB do not take longer."""
    hosts = {name: Seen(Host(name=name, address=name)) for name in "abc"}
    pairs = [Pair("a", "b", None, 0.2, 940.0), Pair("b", "c", None, 0.2, mbit), Pair("c", "a", "timed out")]
    assert sum_megabytes(Examined(hosts=hosts, pairs=pairs)) == size


def test_without_pairs_the_sum_is_whole() -> None:
    assert sum_megabytes(Examined(hosts={"a": Seen(HERE)})) == 8
