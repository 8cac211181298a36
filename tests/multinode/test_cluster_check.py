"""`make cluster-check` on three machines with links of 1 Gb/s: healthy facts are reported as such, and each planted
fault is found.
"""

from __future__ import annotations

import contextlib
import json
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
from tests.programs import need
from tests.waiting import until

pytestmark = pytest.mark.broad

HARMLESS = {
    "disk-low",
    "shared-memory",
    "slow-network",
    "latency",
}
"""What a small or busy machine may be warned of in any test."""
QUIET = 3
"""Processes of a host on which nothing happens: its keeper, what that sleeps by, and sshd."""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lan]:
    folder = tmp_path_factory.mktemp("check")
    with lan(folder, nodes=3) as machines:
        copy_project(folder / "project")
        yield machines


def copy_project(folder: Path) -> None:
    """Copy the project, so that nobody edits it while machines are compared."""
    shutil.copytree(ROOT / "sft_play", folder / "sft_play", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", folder / "configs")
    shutil.copy(ROOT / "constraints.txt", folder)
    subprocess.run(["git", "init", "-q", str(folder)], check=True, timeout=240)


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check."""

    code: int
    json: dict[str, Any]

    def findings(self, host: str, severity: str | None = None) -> dict[str, str]:
        """Return id -> text and remedy of a host's findings."""
        rows = self.json["hosts"][host]["findings"]
        return {row["id"]: f"{row['text']} | {row['remedy']}" for row in rows if severity in (None, row["severity"])}

    def fails(self) -> dict[str, set[str]]:
        """Return host -> ids of what keeps it from taking part, if anything."""
        return {host: set(some) for host in self.json["hosts"] if (some := self.findings(host, "fail"))}

    def says(self, host: str, name: str, *parts: str) -> None:
        """Assert that a finding's text and remedy contain these."""
        text = self.findings(host)[name]
        assert all(part in text for part in parts), text

    def speeds(self) -> list[float]:
        """Return the speeds from the first host to the others, Mbit/s."""
        return [host["mbit"] for host in self.json["hosts"].values() if host["mbit"] is not None]


def check(net: Lan, hosts: dict[str, dict[str, Any]] | None = None, *words: str, **top: Any) -> Checked:
    """Type the command on the first machine."""
    done = typed(net, *command(net, hosts, **top), "JSON=1", *words)
    assert done.stdout, done.stderr
    return Checked(done.returncode, json.loads(done.stdout))


def command(net: Lan, hosts: dict[str, dict[str, Any]] | None = None, **top: Any) -> tuple[str, str]:
    """Return the words of a check, and write the inventory that they name."""
    defaults = {"folder": str(net.folder / "project"), **top.pop("defaults", {})}
    return "cluster-check", f"CLUSTER={net.inventory(net.folder / 'cluster.yaml', hosts, defaults=defaults, **top)}"


def typed(net: Lan, *words: str, k: int = 0, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Type a command in the project of host `k`."""
    argv = [net.python, "-m", "sft_play", *words]
    return net.run(k, argv, timeout=timeout, cwd=net.folder / "project", env={"PYTHONPATH": ""})


def assert_nothing_runs(net: Lan) -> None:
    until(
        lambda: all(len(net.pids(k)) <= QUIET for k in range(3)),
        seconds=240,
        explanation=lambda: list(map(net.pids, range(3))),
    )


def python_with(net: Lan, name: str, **variables: str) -> str:
    """Return an interpreter that starts with further variables."""
    path = net.folder / name
    settings = " ".join(f"{name}={value!r}" for name, value in variables.items())
    path.write_text(f'#!/bin/sh\nexport {settings}\nexec {net.python} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_good_machines_have_no_findings(net: Lan) -> None:
    """Nothing is wrong, speeds are those of the links; no process of it is left on any machine."""
    checked = check(net)
    assert checked.fails() == {} and checked.code == 0
    for name in ("node1", "node2", "node3"):
        assert set(checked.findings(name)) <= HARMLESS
    assert len(checked.speeds()) == 2 and all(0 < mbit < 1000 for mbit in checked.speeds()), checked.speeds()
    assert_nothing_runs(net)


@pytest.mark.slow
def test_several_faults_are_reported_at_once(net: Lan) -> None:
    """Another version, an absent GPU and a port in use are all named, with remedies."""
    listen = "import socket, time\ns = socket.create_server(('', 29500))\ntime.sleep(500)"
    holder = net.popen(0, [net.python, "-c", listen])
    try:
        folder = net.folder / "other" / "accelerate-0.0.1.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 0.0.1\n")
        another = python_with(net, "other-version", PYTHONPATH=str(folder.parent))
        checked = check(net, {"node2": {"python": another}, "node3": {"gpus": 2}})
    finally:
        holder.kill()
        holder.wait()
    assert checked.code == 3
    assert checked.fails() == {"node1": {"port-taken"}, "node2": {"versions"}, "node3": {"gpus"}}
    checked.says("node1", "port-taken", f"process {holder.pid}", "MASTER_PORT=")
    checked.says("node2", "versions", "accelerate 0.0.1", "cluster-install CLUSTER=")
    checked.says("node3", "gpus", "`gpus: 2`", "cluster.yaml:")


@contextlib.contextmanager
def mounted(net: Lan, k: int, *mounts: Sequence[str | Path]) -> Iterator[None]:
    """Mount something on a host; the last word of each is the place."""
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
def test_a_blocked_port_is_reported_and_avoided(net: Lan) -> None:
    """The master's port is blocked; another one avoids that."""
    with firewall(net, 0, "tcp dport 29500 drop"):
        checked, other = check(net), check(net, None, "MASTER_PORT=29507")
    assert checked.fails() == {"node1": {"port-closed"}} and checked.speeds() == []
    checked.says("node1", "port-closed", "`node2`, `node3`", "ufw allow from 192.168.77.12 to any port 29500")
    assert other.code == 0 and len(other.speeds()) == 2


@pytest.mark.long
def test_full_disks_and_read_only_folders_are_reported(net: Lan) -> None:
    runs = Path(net.variables["RUNS_DIR"])
    folders = [net.folder / "cache", runs]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    read_only = [words for path in folders for words in (("--bind", path, path), ("-o", "remount,ro,bind", path))]
    with mounted(net, 1, ("-t", "tmpfs", "-o", "size=1m", "none", runs)), mounted(net, 2, *read_only):
        checked = check(net)
    assert checked.fails() == {"node2": {"disk-low"}, "node3": {"runs-folder", "cache-folder"}}
    checked.says("node2", "disk-low", str(runs))


@pytest.mark.long
def test_machines_without_access_are_reported_with_a_remedy(net: Lan) -> None:
    """A refused key, an unknown host key, a missing folder and an unknown machine are reported at once, each with a
    remedy.
    """
    known_hosts, config = net.folder / "known", net.folder / "strangers"
    known_hosts.write_text(
        "".join(line for line in (net.folder / "ssh" / "known_hosts").open() if not line.startswith("node3"))
    )
    config.write_text(net.ssh_config.read_text().replace(f"{net.folder}/ssh/known_hosts", str(known_hosts)))
    hosts = {
        "node2": {"user": "daemon"},
        "again": {"address": "node2", "folder": "/nowhere"},
        "node4": {"address": "192.168.77.99"},
        "node5": {"address": "no.such.host.invalid"},
    }
    checked = check(net, hosts, ssh_config=str(config))
    assert checked.code == 3
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
def test_a_machine_that_stops_answering_is_named(net: Lan) -> None:
    """Its Python hangs, as on a lost disk: it is named, and the others are still compared."""
    hanging = net.folder / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 3000\n")
    hanging.chmod(0o755)
    checked = check(net, {"node2": {"python": str(hanging)}})
    assert checked.code == 3 and checked.fails() == {"node2": {"unreachable"}}
    checked.says("node2", "unreachable", "no answer within 30 s")
    assert len(checked.speeds()) == 1


@pytest.mark.long
def test_a_slow_network_is_accepted_if_the_inventory_says_so(net: Lan) -> None:
    """50 Mbit/s, as over WireGuard, is no fault if the inventory says so."""
    for k in range(3):
        net.rate(k, 50)
    stated, unstated = check(net, network="50Mbit"), check(net)
    for k in range(3):
        net.rate(k, 1000)
    assert stated.fails() == unstated.fails() == {} and "slow-network" not in stated.findings("node2")
    assert all(30 < mbit < 60 for mbit in stated.speeds()), stated.speeds()
    unstated.says("node3", "slow-network", "`node1` -> `node3`:", "less than gigabit Ethernet", "docs/slow-networks.md")


@pytest.mark.long
def test_ctrl_c_ends_a_check_and_all_its_processes(net: Lan) -> None:
    """A signal in the middle ends the command soon and all its processes everywhere."""
    typing = Typed(net, net.folder)
    process = typing.launch(0, *command(net), cwd=net.folder / "project", PYTHONPATH="")
    typing.until(lambda: len(net.pids(2)) > QUIET + 1)  # a probe is there
    process.send_signal(signal.SIGINT)
    assert typing.end(20) == 130 and "stopped by Ctrl-C" in typing.said(), typing.said()
    assert_nothing_runs(net)


@pytest.mark.long
def test_the_terminal_shows_a_table_and_each_fault_with_its_remedy(net: Lan) -> None:
    """For people: a table, each fault with its remedy; the exit code says it too."""
    done = typed(net, *command(net, {"node3": {"gpus": 4}}, network="1Gbit"))
    assert done.returncode == 3
    for part in (" Mbit/s", "node3: fail: `gpus: 4` in the inventory", "remedy: correct `gpus`", "1 cannot take part"):
        assert part in done.stdout
