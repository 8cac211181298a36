"""`make cluster-check` on three machines with links of 1 Gb/s: what is well is said to be, and each planted fault is found."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.lan import Lan, lan
from tests.places import question_rows
from tests.programs import need

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
    subprocess.run(["git", "init", "-q", str(folder)], check=True, timeout=30)


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check said."""

    code: int
    json: dict[str, Any]
    seconds: float

    def found(self, host: str, severity: str | None = None) -> dict[str, str]:
        """Returns id -> text and remedy of a host's findings."""
        rows = self.json["hosts"][host]["findings"]
        return {row["id"]: f"{row['text']} | {row['remedy']}" for row in rows if severity in (None, row["severity"])}

    def fails(self) -> dict[str, set[str]]:
        """Returns host -> ids of what keeps it from taking part."""
        return {host: set(self.found(host, "fail")) for host in self.json["hosts"]}


def check(net: Lan, hosts: dict[str, dict[str, Any]] | None = None, *words: str, **top: Any) -> Checked:
    """Types the command on the first machine."""
    began = time.monotonic()
    done = typed(net, inventory_of(net, hosts, **top), "JSON=1", *words)
    assert done.stdout, done.stderr
    return Checked(done.returncode, json.loads(done.stdout), time.monotonic() - began)


def inventory_of(net: Lan, hosts: dict[str, dict[str, Any]] | None = None, **top: Any) -> Path:
    defaults = {"folder": str(net.folder / "project"), **top.pop("defaults", {})}
    return net.inventory(net.folder / "cluster.yaml", hosts, defaults=defaults, **top)


def typed(net: Lan, inventory: Path, *words: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    argv = [net.python, "-m", "sft_play", "cluster-check", f"CLUSTER={inventory}", *words]
    return net.run(0, argv, timeout=timeout, cwd=net.folder / "project", env={"PYTHONPATH": ""})


def assert_nothing_runs(net: Lan) -> None:
    until = time.monotonic() + 10
    while any(len(net.pids(k)) > QUIET for k in range(3)) and time.monotonic() < until:
        time.sleep(0.2)
    assert all(len(net.pids(k)) <= QUIET for k in range(3))


def python_with(net: Lan, name: str, **variables: str) -> str:
    """Returns an interpreter that starts with variables of its own."""
    path = net.folder / name
    path.write_text("#!/bin/sh\nexport " + " ".join(f"{k}={v!r}" for k, v in variables.items()) + f'\nexec {net.python} "$@"\n')
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
    assert checked.fails() == {"node1": set(), "node2": set(), "node3": set()}
    assert checked.code == 0
    for name in ("node1", "node2", "node3"):
        assert set(checked.found(name)) <= BESIDE_THE_POINT
        assert abs(checked.json["hosts"][name]["skew_seconds"]) < 0.5
    ways = {(pair["source"], pair["target"]): pair["mbit"] for pair in checked.json["pairs"]}
    assert len(ways) == 6
    assert all(mbit is not None and 100 < mbit < 1000 for mbit in ways.values()), ways
    assert checked.json["all_reduce"]["backend"] == "gloo"
    assert checked.json["all_reduce"]["seconds"] > 2 * 2 / 3 * 8 * 2**20 / 125e6  # of 8 MiB over 1 Gb/s
    assert checked.json["seconds"] < 30
    assert_nothing_runs(net)


@pytest.mark.slow
@pytest.mark.long
def test_each_machine_trains_some_steps_by_itself(net: Lan, tiny: Path) -> None:
    """The configuration is on the first machine only; the third lets nobody in, and the others are measured all the same."""
    config = net.folder / "bench.yaml"
    rows = net.folder / "bench.jsonl"
    rows.write_text(question_rows(0, 12, longest=8))
    config.write_text(f"model: {{name: {tiny}, max_seq_len: 64}}\ndata: {{train_path: {rows}}}\nlaunch: {{backend: gloo}}\n")
    inventory = inventory_of(net, {"node3": {"user": "daemon"}})
    done = typed(net, inventory, f"CONFIG={config}", "BENCH=1", "JSON=1", timeout=550)
    assert done.returncode == 3, done.stderr
    found = json.loads(done.stdout)["bench"]
    assert found["node3"] == {"error": "not tried: it cannot take part"}
    for name in ("node1", "node2"):
        speeds = [row["measured"] for row in found[name]["rows"] if row["unit"] == "tokens/s"]
        assert speeds and all(speed > 0 for speed in speeds), found[name]
        [memory] = [row for row in found[name]["rows"] if row["unit"] == "GiB"]
        assert memory["measured"] > 0 and memory["expected"] > 0


@pytest.mark.slow
def test_several_faults_at_once(net: Lan) -> None:
    """Another version, a clock that is 10 s ahead, a GPU that is not there, and a port that somebody holds: all named, with remedies."""
    need("faketime")
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    holder = net.popen(0, [net.python, "-c", "import socket, time\ns = socket.create_server(('', 29500))\ntime.sleep(100)"])
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
    assert f"process {holder.pid}" in checked.found("node1")["port-taken"]
    assert "MASTER_PORT=" in checked.found("node1")["port-taken"]
    assert "accelerate 0.0.1" in checked.found("node2")["versions"]
    assert "cluster-install CLUSTER=" in checked.found("node2")["versions"]
    assert "`gpus: 2`" in checked.found("node2")["gpus"]
    assert "cluster.yaml:" in checked.found("node2")["gpus"]
    assert "10.0 s ahead" in checked.found("node3")["clock"]
    assert abs(checked.json["hosts"]["node3"]["skew_seconds"] - 10) < 0.2
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
    (net.folder / "rules").write_text(f"table inet t {{\n chain c {{\n type filter hook input priority 0\n {rules}\n }}\n}}\n")
    assert net.run(k, ["nft", "-f", net.folder / "rules"]).returncode == 0
    yield
    net.run(k, ["nft", "flush", "ruleset"])


@pytest.mark.long
def test_closed_ports(net: Lan) -> None:
    """The master's port, which another one gets round; a firewall that lets in SSH only, by which gloo would hang without a word."""
    with firewall(net, 0, "tcp dport 29500 drop"):
        checked, other = check(net), check(net, None, "MASTER_PORT=29507")
    assert checked.fails() == {"node1": {"port-closed"}, "node2": set(), "node3": set()}
    text = checked.found("node1")["port-closed"]
    assert "`node2`, `node3`" in text
    assert "ufw allow from 192.168.77.12 to any port 29500" in text
    assert other.code == 0
    assert other.json["all_reduce"]["seconds"]
    with firewall(net, 2, 'policy drop; iif "lo" accept; ct state established,related accept; tcp dport 22 accept'):
        checked = check(net)
    assert checked.fails() == {"node1": set(), "node2": set(), "node3": {"ports-closed"}}
    assert "`node1`, `node2`" in checked.found("node3")["ports-closed"]
    assert checked.seconds < 35


@pytest.mark.long
def test_other_files_and_disks(net: Lan) -> None:
    """Other code and a full disk on one; other data, and nothing that can be written, on another: no file is left there."""
    changed, runs = net.folder / "errors.py", Path(net.variables["RUNS_DIR"])
    target, data = net.folder / "project" / "sft_play" / "errors.py", net.hosts[2].private[net.folder / "data"] / "train.jsonl"
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
    assert checked.fails() == {"node1": set(), "node2": {"code", "disk-low"}, "node3": {"data", "runs-folder", "cache-folder"}}
    assert "`sft_play/errors.py`" in checked.found("node2")["code"]
    assert str(runs) in checked.found("node2")["disk-low"]
    assert "train.jsonl" in checked.found("node3")["data"]
    assert checked.json["all_reduce"]["seconds"]


@pytest.mark.long
def test_other_prepared_rows(tmp_path: Path, tiny: Path) -> None:
    """The caches are compared by the fingerprints of their rows: one with others, and one that should be shared and is not."""
    for name, start in (("train", 0), ("val", 30)):
        (tmp_path / f"{name}.jsonl").write_text(question_rows(start, 20, longest=5))
    config = tmp_path / "demo.yaml"
    data = f"train_path: {tmp_path}/train.jsonl, val_path: {tmp_path}/val.jsonl, sync: shared"
    config.write_text(f"model: {{name: {tiny}, max_seq_len: 64}}\ntuning: {{mode: full}}\ndata: {{{data}}}\n")
    cache = tmp_path / "lan" / "cache"
    with lan(tmp_path / "lan", private=[cache]) as net:
        copy_project(net.folder / "project")
        for k in (0, 1):
            made = net.run(
                k,
                [net.python, "-m", "sft_play", "data", f"CONFIG={config}"],
                timeout=250,
                cwd=net.folder / "project",
                env={"PYTHONPATH": ""},
            )
            assert made.returncode == 0, made.stderr
        manifest = next((net.hosts[1].private[cache] / "data").glob("train-*")) / "manifest.json"
        value = json.loads(manifest.read_text())
        value["split"]["fingerprint"] = "0" * 64
        manifest.write_text(json.dumps(value))
        checked = check(net, None, f"CONFIG={config}")
    assert checked.fails() == {"node1": set(), "node2": {"data"}, "node3": {"data"}}
    assert f"other data than here: `{manifest.parent.name}`" in checked.found("node2")["data"]
    assert f"`{cache}` has no `train-" in checked.found("node3")["data"]


@pytest.mark.long
def test_machines_that_do_not_let_us_in(net: Lan) -> None:
    """A refused key, no environment, no folder, no such machine: each with the way out, and all at once."""
    hosts = {
        "node2": {"user": "daemon"}, "node3": {"folder": "/nowhere"},
        "node4": {"address": "192.168.77.99"}, "node5": {"address": "no.such.host.invalid"},
    }  # fmt: skip
    checked = check(net, hosts)
    assert checked.code == 3
    assert checked.fails() == {
        "node1": set(), "node2": {"refused-key"}, "node3": {"no-environment"}, "node4": {"unreachable"}, "node5": {"unknown-name"},
    }  # fmt: skip
    assert checked.seconds < 30
    assert "ssh-copy-id" in checked.found("node2")["refused-key"]
    assert f"make cluster-install CLUSTER={net.folder}/cluster.yaml" in checked.found("node3")["no-environment"]


@pytest.mark.long
def test_unknown_host_key(net: Lan) -> None:
    config = net.folder / "strangers"
    config.write_text(net.ssh_config.read_text().replace(f"{net.folder}/ssh/known_hosts", "/dev/null"))
    checked = check(net, ssh_config=str(config))
    assert checked.fails() == {"node1": set(), "node2": {"unknown-host-key"}, "node3": {"unknown-host-key"}}
    assert f"ssh -F {config}" in checked.found("node2")["unknown-host-key"]


@pytest.mark.long
def test_a_machine_that_stops_answering(net: Lan) -> None:
    """It was met, and then reads from a disk that is gone: it is named, the others are compared all the same."""
    dead, target = net.folder / "dead", net.folder / "project" / "sft_play" / "report" / "card.py"
    os.mkfifo(dead)
    with mounted(net, 1, ("--bind", dead, target)):
        checked = check(net)
        lost = checked.found("node2", "fail")
        os.close(os.open(dead, os.O_RDWR | os.O_NONBLOCK))  # its reader may end
    assert checked.code == 3
    assert checked.fails() == {"node1": set(), "node2": {"lost"}, "node3": set()}
    assert "it stopped answering (facts: no answer within 10 s)" in lost["lost"]
    assert {(pair["source"], pair["target"]) for pair in checked.json["pairs"]} == {("node1", "node3"), ("node3", "node1")}
    assert checked.seconds < 35


@pytest.mark.long
def test_a_faster_network_next_to_the_slow_one(net: Lan) -> None:
    """It is named; with it in the inventory the ways are measured over it, and the sum goes over it."""
    for k in range(3):
        net.rate(k, 100)
    with net.second_network():
        slow, fast = check(net), check(net, defaults={"interface": "eth1"})
    for k in range(3):
        net.rate(k, 1000)
    for name in ("node1", "node2", "node3"):
        assert slow.found(name, "warning")["faster-interface"].startswith("`eth1` carries ")
        assert not {"interface", "faster-interface", "slow-network"} & set(fast.found(name))
    assert all(pair["mbit"] > 1000 for pair in fast.json["pairs"]), fast.json["pairs"]
    assert fast.json["all_reduce"]["seconds"] < slow.json["all_reduce"]["seconds"] / 2


@pytest.mark.long
def test_all_pairs_of_a_slow_network_are_measured(net: Lan) -> None:
    """50 Mbit/s, as over WireGuard: 16 MiB between two machines would take 2.7 s a way, and three sums of 8 MiB 5.4 s."""
    for k in range(3):
        net.rate(k, 50)
    try:
        checked = check(net, None, f"CONFIG={configuration(net)}", network="50Mbit")
    finally:
        for k in range(3):
            net.rate(k, 1000)
    assert checked.fails() == {"node1": set(), "node2": set(), "node3": set()}
    ways = {(pair["source"], pair["target"]): pair["mbit"] for pair in checked.json["pairs"]}
    assert len(ways) == 6
    assert all(mbit is not None and 30 < mbit < 60 for mbit in ways.values()), ways
    assert 0.5 <= checked.json["all_reduce"]["megabytes"] <= 4
    assert checked.json["all_reduce"]["seconds"] > 0.2
    assert checked.json["seconds"] < 30


@pytest.mark.long
def test_ctrl_c(net: Lan) -> None:
    """In the middle of it: the command ends soon, and no process of it goes on anywhere."""
    argv = [net.python, "-m", "sft_play", "cluster-check", f"CLUSTER={inventory_of(net)}"]
    process = net.popen(
        0, argv, cwd=net.folder / "project", env={"PYTHONPATH": ""}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while len(net.pids(2)) <= QUIET + 1:  # until a probe is there
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130, said
    assert "stopped by Ctrl-C" in said
    assert_nothing_runs(net)


@pytest.mark.long
def test_text(net: Lan) -> None:
    """For people: a table, each fault with its remedy, the sum; the exit code says it too."""
    inventory = inventory_of(net, {"node3": {"gpus": 4}}, network="1Gbit")
    done = typed(net, inventory)
    assert done.returncode == 3
    assert "node3: fail: `gpus: 4` in the inventory" in done.stdout
    assert "remedy: correct `gpus`" in done.stdout
    assert "a sum of 8 MiB over all machines (gloo):" in done.stdout
    assert "1 cannot take part" in done.stdout
    done = typed(net, inventory, "CLUSTER_NODE3_GPUS=0", "CLUSTER_HOSTS=node1 node3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node2" not in done.stdout
