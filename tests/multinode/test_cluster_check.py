"""`make cluster-check` on three machines with links of 1 Gb/s: what is well is said to be, and each planted fault is
found.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.lan import Lan, Typed, lan
from tests.places import question_rows
from tests.programs import need
from tests.waiting import until

BESIDE_THE_POINT = {"disk-low", "shared-memory", "memory-low", "open-files", "slow-network", "latency"}
"""What a small or busy machine may be warned of in any test."""
QUIET = 3
"""Processes of a host on which nothing happens: its keeper, what that sleeps by, and sshd."""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lan]:
    folder = tmp_path_factory.mktemp("check")
    with lan(folder, nodes=3, private=[folder / "data"]) as made:
        for host in made.hosts:
            (host.private[folder / "data"] / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 20)
        copy_project(folder / "project")
        yield made


def copy_project(folder: Path) -> None:
    """Makes a project that nobody edits while machines are compared."""
    shutil.copytree(ROOT / "sft_play", folder / "sft_play", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", folder / "configs")
    shutil.copy(ROOT / "constraints.txt", folder)
    subprocess.run(["git", "init", "-q", str(folder)], check=True, timeout=240)


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check said."""

    code: int
    json: dict[str, Any]

    def found(self, host: str, severity: str | None = None) -> dict[str, str]:
        """Returns id -> text and remedy of a host's findings."""
        rows = self.json["hosts"][host]["findings"]
        return {row["id"]: f"{row['text']} | {row['remedy']}" for row in rows if severity in (None, row["severity"])}

    def fails(self) -> dict[str, set[str]]:
        """Returns host -> ids of what keeps it from taking part, where there is something."""
        return {host: set(some) for host in self.json["hosts"] if (some := self.found(host, "fail"))}

    def says(self, host: str, name: str, *parts: str) -> None:
        """Asserts that a finding's text and remedy hold these."""
        text = self.found(host)[name]
        assert all(part in text for part in parts), text

    def ways(self) -> dict[tuple[str, str], float]:
        """Returns the speeds between two hosts, Mbit/s."""
        return {(pair["source"], pair["target"]): pair["mbit"] or 0.0 for pair in self.json["pairs"]}


def check(net: Lan, hosts: dict[str, dict[str, Any]] | None = None, *words: str, **top: Any) -> Checked:
    """Types the command on the first machine."""
    done = typed(net, *command(net, hosts, **top), "JSON=1", *words)
    assert done.stdout, done.stderr
    return Checked(done.returncode, json.loads(done.stdout))


def command(net: Lan, hosts: dict[str, dict[str, Any]] | None = None, **top: Any) -> tuple[str, str]:
    """Returns the words of a check, and writes the inventory that they name."""
    defaults = {"folder": str(net.folder / "project"), **top.pop("defaults", {})}
    return "cluster-check", f"CLUSTER={net.inventory(net.folder / 'cluster.yaml', hosts, defaults=defaults, **top)}"


def typed(net: Lan, *words: str, k: int = 0, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Types a command in the project of host `k`."""
    argv = [net.python, "-m", "sft_play", *words]
    return net.run(k, argv, timeout=timeout, cwd=net.folder / "project", env={"PYTHONPATH": ""})


def assert_nothing_runs(net: Lan) -> None:
    until(
        lambda: all(len(net.pids(k)) <= QUIET for k in range(3)),
        seconds=240,
        said=lambda: list(map(net.pids, range(3))),
    )


def python_with(net: Lan, name: str, **variables: str) -> str:
    """Returns an interpreter that starts with variables of its own."""
    path = net.folder / name
    path.write_text(
        "#!/bin/sh\nexport " + " ".join(f"{k}={v!r}" for k, v in variables.items()) + f'\nexec {net.python} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def configuration(net: Lan) -> Path:
    path = net.folder / "demo.yaml"
    train = net.folder / "data" / "train.jsonl"
    path.write_text(f"model: {{name: builtin}}\ndata: {{train_path: {train}}}\nlaunch: {{backend: gloo}}\n")
    return path


@pytest.mark.slow
def test_good_machines(net: Lan) -> None:
    """Nothing is wrong, speeds and clocks are those of the links; no process of it is left on any machine."""
    checked = check(net, None, f"CONFIG={configuration(net)}")
    assert checked.fails() == {} and checked.code == 0
    for name in ("node1", "node2", "node3"):
        assert set(checked.found(name)) <= BESIDE_THE_POINT
        assert abs(checked.json["hosts"][name]["skew_seconds"]) < 5
    ways = checked.ways()
    assert len(ways) == 6 and all(0 < mbit < 1000 for mbit in ways.values()), ways
    assert checked.json["all_reduce"]["backend"] == "gloo"
    assert checked.json["all_reduce"]["seconds"] > 2 * 2 / 3 * 8 * 2**20 / 125e6  # of 8 MiB over 1 Gb/s
    assert_nothing_runs(net)


@pytest.mark.slow
def test_several_faults_at_once(net: Lan) -> None:
    """Another version, a clock that is 10 s ahead, a GPU that is not there, and a port that somebody holds: all named,
    with remedies.
    """
    need("faketime")
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    holder = net.popen(
        0, [net.python, "-c", "import socket, time\ns = socket.create_server(('', 29500))\ntime.sleep(100)"]
    )
    try:
        skewed = python_with(net, "skewed", LD_PRELOAD=str(library), FAKETIME="+10s", DONT_FAKE_MONOTONIC="1")
        folder = net.folder / "other" / "accelerate-0.0.1.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 0.0.1\n")
        another = python_with(net, "other-version", PYTHONPATH=str(folder.parent))
        hosts: dict[str, dict[str, Any]] = {"node2": {"python": another, "gpus": 2}, "node3": {"python": skewed}}
        checked = check(net, hosts, f"CONFIG={configuration(net)}")
    finally:
        holder.kill()
        holder.wait()
    assert checked.code == 3
    assert checked.fails() == {"node1": {"port-taken"}, "node2": {"versions", "gpus"}, "node3": {"clock"}}
    checked.says("node1", "port-taken", f"process {holder.pid}", "MASTER_PORT=")
    checked.says("node2", "versions", "accelerate 0.0.1", "cluster-install CLUSTER=")
    checked.says("node2", "gpus", "`gpus: 2`", "cluster.yaml:")
    checked.says("node3", "clock", "10.0 s ahead")
    assert abs(checked.json["hosts"]["node3"]["skew_seconds"] - 10) < 5
    assert checked.json["all_reduce"]["skipped"]


@contextlib.contextmanager
def mounted(net: Lan, k: int, *mounts: Sequence[str | Path]) -> Iterator[None]:
    """Mounts something on a host; the last word of each is the place."""
    for words in mounts:
        done = net.run(k, ["mount", *words])
        assert done.returncode == 0, done.stderr
    yield
    for words in reversed(mounts):
        net.run(k, ["umount", "-l", words[-1]])


@contextlib.contextmanager
def firewall(net: Lan, k: int, rules: str) -> Iterator[None]:
    need("nft")
    (net.folder / "rules").write_text(
        f"table inet t {{\n chain c {{\n type filter hook input priority 0\n {rules}\n }}\n}}\n"
    )
    assert net.run(k, ["nft", "-f", net.folder / "rules"]).returncode == 0
    yield
    net.run(k, ["nft", "flush", "ruleset"])


@pytest.mark.long
def test_closed_ports(net: Lan) -> None:
    """The master's port, which another one gets round; a firewall that lets in SSH only, by which gloo would hang
    without a word.
    """
    with firewall(net, 0, "tcp dport 29500 drop"):
        checked, other = check(net), check(net, None, "MASTER_PORT=29507")
    assert checked.fails() == {"node1": {"port-closed"}}
    checked.says("node1", "port-closed", "`node2`, `node3`", "ufw allow from 192.168.77.12 to any port 29500")
    assert other.code == 0 and other.json["all_reduce"]["seconds"]
    with firewall(net, 2, 'policy drop; iif "lo" accept; ct state established,related accept; tcp dport 22 accept'):
        checked = check(net)
    assert checked.fails() == {"node3": {"ports-closed"}}
    checked.says("node3", "ports-closed", "`node1`, `node2`")
    assert checked.json["seconds"] < 35


@pytest.mark.long
def test_other_files_and_disks(net: Lan) -> None:
    """Other code and a full disk on one; other data, and nothing that can be written, on another: no file is left
    there.
    """
    changed, runs = net.folder / "errors.py", Path(net.variables["RUNS_DIR"])
    target, data = (
        net.folder / "project" / "sft_play" / "errors.py",
        net.hosts[2].private[net.folder / "data"] / "train.jsonl",
    )
    kept = data.read_text()
    changed.write_text(target.read_text() + "\n# changed\n")
    folders = [net.folder / "project", net.folder / "cache", runs, Path.home()]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    own = [("--bind", changed, target), ("-t", "tmpfs", "-o", "size=1m", "none", runs)]
    read_only = [words for one in folders for words in (("--bind", one, one), ("-o", "remount,ro,bind", one))]
    data.write_text(kept + "{}\n")
    try:
        with mounted(net, 1, *own), mounted(net, 2, *read_only):
            assert net.run(2, ["touch", net.folder / "project" / "x"]).returncode != 0
            checked = check(net, None, f"CONFIG={configuration(net)}", defaults={"interface": None})
    finally:
        data.write_text(kept)
    assert checked.fails() == {"node2": {"code", "disk-low"}, "node3": {"data", "runs-folder", "cache-folder"}}
    checked.says("node2", "code", "`sft_play/errors.py`")
    checked.says("node2", "disk-low", str(runs))
    checked.says("node3", "data", "train.jsonl")
    assert checked.json["all_reduce"]["seconds"]


@pytest.mark.long
def test_other_prepared_rows(tmp_path: Path, tiny: Path) -> None:
    """The caches are compared by the fingerprints of their rows: one with others, and one that should be shared and is
    not.
    """
    for name, start in (("train", 0), ("val", 30)):
        (tmp_path / f"{name}.jsonl").write_text(question_rows(start, 20, longest=5))
    config = tmp_path / "demo.yaml"
    data = f"train_path: {tmp_path}/train.jsonl, val_path: {tmp_path}/val.jsonl, sync: shared"
    config.write_text(f"model: {{name: {tiny}, max_seq_len: 64}}\ntuning: {{mode: full}}\ndata: {{{data}}}\n")
    cache = tmp_path / "lan" / "cache"
    with lan(tmp_path / "lan", private=[cache]) as net:
        copy_project(net.folder / "project")
        for k in (0, 1):
            made = typed(net, "data", f"CONFIG={config}", k=k, timeout=250)
            assert made.returncode == 0, made.stderr
        manifest = next((net.hosts[1].private[cache] / "data").glob("train-*")) / "manifest.json"
        value = json.loads(manifest.read_text())
        value["split"]["fingerprint"] = "0" * 64
        manifest.write_text(json.dumps(value))
        checked = check(net, None, f"CONFIG={config}")
    assert checked.fails() == {"node2": {"data"}, "node3": {"data"}}
    checked.says("node2", "data", f"other data than here: `{manifest.parent.name}`")
    checked.says("node3", "data", f"`{cache}` has no `train-")


@pytest.mark.long
def test_machines_that_do_not_let_us_in(net: Lan) -> None:
    """A refused key, a key of the host that nobody knows, no folder, no such machine: each with the way out, and all at
    once.
    """
    known, config = net.folder / "known", net.folder / "strangers"
    known.write_text(
        "".join(line for line in (net.folder / "ssh" / "known_hosts").open() if not line.startswith("node3"))
    )
    config.write_text(net.ssh_config.read_text().replace(f"{net.folder}/ssh/known_hosts", str(known)))
    hosts = {
        "node2": {"user": "daemon"},
        "again": {"address": "node2", "folder": "/nowhere"},
        "node4": {"address": "192.168.77.99"},
        "node5": {"address": "no.such.host.invalid"},
    }
    checked = check(net, hosts, ssh_config=str(config))
    assert checked.code == 3 and checked.json["seconds"] < 30
    assert checked.fails() == {
        "node2": {"refused-key"},
        "node3": {"unknown-host-key"},
        "again": {"no-environment"},
        "node4": {"unreachable"},
        "node5": {"unknown-name"},
    }
    checked.says("node2", "refused-key", "ssh-copy-id")
    checked.says("node3", "unknown-host-key", f"ssh -F {config}")
    checked.says("again", "no-environment", f"make cluster-install CLUSTER={net.folder}/cluster.yaml")


@pytest.mark.long
def test_a_machine_that_stops_answering(net: Lan) -> None:
    """It was met, and then reads from a disk that is gone: it is named, the others are compared all the same."""
    dead, target = net.folder / "dead", net.folder / "project" / "sft_play" / "report" / "card.py"
    os.mkfifo(dead)
    with mounted(net, 1, ("--bind", dead, target)):
        checked = check(net)
        os.close(os.open(dead, os.O_RDWR | os.O_NONBLOCK))  # its reader may end
    assert checked.code == 3 and checked.json["seconds"] < 35
    assert checked.fails() == {"node2": {"lost"}}
    checked.says("node2", "lost", "it stopped answering (facts: no answer within 10 s)")
    assert checked.ways().keys() == {("node1", "node3"), ("node3", "node1")}


@pytest.mark.long
def test_a_slow_network_and_a_faster_one_next_to_it(net: Lan) -> None:
    """50 Mbit/s, as over WireGuard: 16 MiB between two machines would take 2.7 s a way, and three sums of 8 MiB 5.4 s.
    The faster one is named; with it in the inventory the ways are measured over it, and the sum goes over it.
    """
    for k in range(3):
        net.rate(k, 50)
    with net.second_network():
        slow, fast = (
            check(net, None, f"CONFIG={configuration(net)}", network="50Mbit"),
            check(net, defaults={"interface": "eth1"}),
        )
    for k in range(3):
        net.rate(k, 1000)
    ways = slow.ways()
    assert slow.fails() == fast.fails() == {} and len(ways) == 6 and all(30 < mbit < 60 for mbit in ways.values()), ways
    assert 0.5 <= slow.json["all_reduce"]["megabytes"] <= 4 and slow.json["all_reduce"]["seconds"] > 0.2
    assert slow.json["seconds"] < 30
    for name in ("node1", "node2", "node3"):
        slow.says(name, "faster-interface", "`eth1` carries ")
        assert not {"interface", "faster-interface", "slow-network"} & set(fast.found(name))
    assert min(fast.ways().values()) > 1000, fast.ways()
    assert fast.json["all_reduce"]["megabytes"] == 8, "one second at most, as for 1 Gb/s"


@pytest.mark.long
def test_ctrl_c(net: Lan) -> None:
    """In the middle of it: the command ends soon, and no process of it goes on anywhere."""
    typing = Typed(net, net.folder)
    process = typing.launch(0, *command(net), cwd=net.folder / "project", PYTHONPATH="")
    typing.until(lambda: len(net.pids(2)) > QUIET + 1)  # a probe is there
    process.send_signal(signal.SIGINT)
    assert typing.end(20) == 130 and "stopped by Ctrl-C" in typing.said(), typing.said()
    assert_nothing_runs(net)


@pytest.mark.long
def test_text(net: Lan) -> None:
    """For people: a table, each fault with its remedy, the sum; the exit code says it too."""
    done = typed(net, *command(net, {"node3": {"gpus": 4}}, network="1Gbit"))
    assert done.returncode == 3
    for part in (
        "node3: fail: `gpus: 4` in the inventory",
        "remedy: correct `gpus`",
        "a sum of 8 MiB over all machines (gloo):",
        "1 cannot take part",
    ):
        assert part in done.stdout
