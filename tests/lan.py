"""Several machines on one: each host is a network namespace with its own address, host name, mounts and sshd, on a
switch of given speed.

    with lan(tmp_path, nodes=3) as net:
        net.run(0, [net.python, "-m", "sft_play", "cluster-check", f"CLUSTER={net.inventory(tmp_path / 'c.yaml')}"])

Hosts are counted from 0 (`node1` is host 0, at 192.168.77.11). All see the same files, except the folders named in
`private`. The test itself stands outside: nothing of it reaches a host but by `run`, `popen` and `command`. The
namespaces have no name: they end with their processes, all of which are ended when the test ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft_play.config.yaml_files import dump_yaml
from sft_play.runs.folder import RunFolder
from tests.conftest import ROOT, environment, metrics
from tests.programs import HOSTS, need, unavailable
from tests.waiting import until

SECONDS = 400
"""The longest wait for a command."""
KEEPER = """
set -e
hostname "$1"
if [ -n "$2" ]; then mount --bind "$2" /etc/hosts; fi
[ ! -e ~/.bashrc ] || mount --bind /dev/null ~/.bashrc  # a person's start-up files may wait for a lock

shift 3
while [ $# -gt 0 ]; do mkdir -p "$1" "$2"; mount --bind "$1" "$2"; shift 2; done
echo ready
exec 2>/dev/null
set +e
while kill -0 PARENT 2>/dev/null; do sleep 1; done
me=$(readlink /proc/self/ns/net)
for one in /proc/[0-9]*; do
  [ "$(readlink $one/ns/net 2>/dev/null)" = "$me" ] && [ "${one#/proc/}" != $$ ] && kill -9 "${one#/proc/}" 2>/dev/null
done
"""
"""Holds the namespaces of a host; when the test process has died without cleaning up, it ends what is left in them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LanHost:
    """One machine."""

    name: str
    address: str
    keeper: int
    """Process that holds the namespaces; `/proc/KEEPER/net/dev` counts this host's bytes."""
    private: Mapping[Path, Path]
    """A folder that only this host sees -> where the test finds it."""


@dataclass(kw_only=True, slots=True)
class Lan:
    """The hosts, and what can be done to them."""

    folder: Path
    hosts: tuple[LanHost, ...] = ()
    switch: int = 0
    """Process that holds the switch's namespace."""
    ssh_config: Path
    variables: Mapping[str, str]
    """Environment of everything that `run` and `popen` start, and of SSH sessions."""
    keepers: list[subprocess.Popen[str]] = field(default_factory=list)
    python: str = sys.executable

    def command(self, k: int, argv: Sequence[str | Path], *, cwd: Path = ROOT) -> list[str]:
        """Return what starts `argv` on host `k`, in `cwd` as that host sees it."""
        inside = ["nsenter", "-t", str(self.hosts[k].keeper), "-n", "-u", "-m", "--", "env", "-C", str(cwd)]
        return [*inside, *map(str, argv)]

    def run(
        self,
        k: int,
        argv: Sequence[str | Path],
        *,
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` on host `k` to its end."""
        return subprocess.run(
            self.command(k, argv, cwd=cwd),
            env={**self.variables, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def popen(
        self,
        k: int,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start `argv` on host `k` in a separate session; it is killed with the LAN at the latest."""
        options = {"stdin": subprocess.DEVNULL, "text": True, "start_new_session": True, **options}
        return subprocess.Popen(self.command(k, argv, cwd=cwd), env={**self.variables, **(env or {})}, **options)

    def link(self, k: int, up: bool) -> None:
        """Plug host `k`'s cable in at the switch, or pulls it."""
        _inside(self.switch, "ip", "link", "set", f"p{k + 1}", "up" if up else "down")

    def rate(self, k: int, mbit: float) -> None:
        """Set the speed of host `k`'s cable in both directions, Mbit/s."""
        for keeper, device in ((self.hosts[k].keeper, "eth0"), (self.switch, f"p{k + 1}")):
            _inside(
                keeper, "tc", *f"qdisc replace dev {device} root tbf rate {mbit:g}mbit burst 256kb latency 30ms".split()
            )

    def sent_bytes(self, k: int) -> int:
        """Return how many bytes host `k`'s interface has sent so far, headers included."""
        for line in Path(f"/proc/{self.hosts[k].keeper}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == "eth0":
                return int(counters.split()[8])
        raise AssertionError("eth0 is gone")

    def pids(self, k: int) -> list[int]:
        """Return the processes of host `k`, its keeper and sshd included; process numbers are the machine's own."""
        return _processes(self.hosts[k].keeper)

    def workers(self, k: int) -> list[int]:
        """Return the processes that train on host `k`, not those that start them."""
        starters = {"accelerate.commands.launch", "torch.distributed.run"}
        words = {pid: command_line(pid) for pid in self.pids(k)}
        return [pid for pid, own in words.items() if "sft_play.train" in own and not starters.intersection(own)]

    def inventory(self, path: Path, hosts: Mapping[str, Mapping[str, Any]] | None = None, **top: Any) -> Path:
        """Write an inventory of all hosts; `hosts` adds keys by host name (`{"node2": {"gpus": 1}}`), `top` at the
        top.
        """
        each = {h.name: {"address": h.address, **(hosts or {}).get(h.name, {})} for h in self.hosts}
        others = {name: dict(keys) for name, keys in (hosts or {}).items() if name not in each}
        common = {
            "user": "root",
            "python": self.python,
            "folder": str(ROOT),
            "interface": "eth0",
            **top.pop("defaults", {}),
        }
        path.write_text(
            dump_yaml({"ssh_config": str(self.ssh_config), **top, "defaults": common, "hosts": each | others})
        )
        return path


class Typed:
    """Our commands on hosts, and the output of each."""

    config: Path
    """What is trained."""

    def __init__(self, net: Lan, folder: Path) -> None:
        self.net, self.folder = net, folder
        self.started: list[tuple[subprocess.Popen[str], Path]] = []

    def launch(
        self, k: int, *words: str | Path, terminal: bool = False, cwd: Path = ROOT, **env: str
    ) -> subprocess.Popen[str]:
        """Type a command on host `k`, on a `terminal` or not."""
        path = self.folder / f"said{len(self.started)}"
        command = [self.net.python, "-m", "sft_play", *map(str, words)]
        command = ["script", "-qefc", shlex.join(command), "/dev/null"] if terminal else command
        with path.open("w") as output:
            process = self.net.popen(k, command, env=env, stdout=output, stderr=subprocess.STDOUT, cwd=cwd)
        self.started.append((process, path))
        return process

    def run(self, name: str) -> RunFolder:
        """Return a run on the shared disk."""
        return RunFolder(self.net.folder / "runs" / name)

    def alone(self, *words: str, k: int = 0) -> list[float]:
        """Return the losses of one process that trains the same."""
        done = self.net.run(
            k,
            [self.net.python, "-m", "sft_play", "train", f"CONFIG={self.config}", "RUN_NAME=alone", *words],
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return losses(self.run("alone"))

    def said(self, number: int = -1) -> str:
        """Return the output of the command with this number in the order of starts, by default the last."""
        return self.started[number][1].read_text()

    def end(self, seconds: float = SECONDS, number: int = -1) -> int:
        """Wait for a command, and return its exit code."""
        process = self.started[number][0]
        until(lambda: process.poll() is not None, seconds=seconds, explanation=lambda: self.said(number))
        return process.returncode

    def finish(self, code: int = 0, seconds: float = SECONDS) -> str:
        """Wait for the end of the last command, which must have this exit code; return what it has printed."""
        assert self.end(seconds) == code, self.said()
        return self.said()

    def until(self, happened: str | Callable[[], object], number: int = -1) -> None:
        """Wait until a command has printed this, or for another condition while it runs."""
        until(
            (lambda: happened in self.said(number)) if isinstance(happened, str) else happened,
            process=self.started[number][0],
            seconds=SECONDS,
            explanation=lambda: self.said(number),
        )


@contextlib.contextmanager
def lan(folder: Path, nodes: int = 3, *, private: Sequence[Path] = ()) -> Iterator[Lan]:
    """Yield `nodes` hosts on one switch, each behind a cable of 1 Gb/s.

    `private` are folders that every host sees as its own (`net.hosts[k].private[path]` is where the test finds host
    k's). Cache and runs are under `folder`. Skip without root.
    """
    _require()
    folder = folder.resolve()
    (folder / "ssh").mkdir(parents=True, exist_ok=True)
    env = environment(folder / "cache", folder / "runs", {"OMP_NUM_THREADS": "1"})
    net = Lan(folder=folder, ssh_config=folder / "ssh" / "config", variables=env)
    try:
        _build(net, nodes, private)
        _serve_ssh(net)
        yield net
    finally:
        _end(net)


def _require() -> None:
    need(*HOSTS)
    if os.geteuid() != 0:
        unavailable("not root: a LAN of namespaces cannot be made")
    tried = subprocess.run(
        ["unshare", "-n", "-u", "-m", "true"], capture_output=True, text=True, check=False, timeout=20
    )
    if tried.returncode:
        unavailable(f"no namespaces here: {tried.stderr.strip()}")


def _build(net: Lan, nodes: int, private: Sequence[Path]) -> None:
    names = [(f"node{k}", f"192.168.77.{10 + k}") for k in range(1, nodes + 1)]
    hosts_file = net.folder / "hosts"
    hosts_file.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names))
    net.switch = _keep(net, "switch", None, {})
    _inside(net.switch, "ip", "link", "add", "br0", "up", "type", "bridge")
    lines = []
    for k, (name, address) in enumerate(names, start=1):
        own = {path: net.folder / name / f"private{i}" for i, path in enumerate(private)}
        keeper = _keep(net, name, hosts_file, own)
        _inside(keeper, "ip", "link", "set", "lo", "up")
        _plug(keeper, net.switch, f"p{k}", address)
        lines.append(LanHost(name=name, address=address, keeper=keeper, private=own))
    net.hosts = tuple(lines)
    for k in range(nodes):
        net.rate(k, 1000)


def _plug(keeper: int, switch: int, end: str, address: str) -> None:
    """Join a host and the switch by a cable, of which `end` is the switch's."""
    _inside(switch, *f"ip link add name eth0 netns {keeper} type veth peer name {end} netns {switch}".split())
    _inside(keeper, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
    _inside(keeper, "ip", "link", "set", "eth0", "up")
    _inside(switch, "ip", "link", "set", end, "master", "br0", "up")


def _keep(net: Lan, name: str, hosts_file: Path | None, private: Mapping[Path, Path]) -> int:
    """Start the process that holds a host's namespaces, and return its number."""
    mounts = [str(part) for seen, outside in private.items() for part in (outside, seen)]
    script = KEEPER.replace("PARENT", str(os.getpid()))
    keeper = subprocess.Popen(
        ["unshare", "-n", "-u", "-m", "sh", "-c", script, "sh", name, str(hosts_file or ""), "mounts", *mounts],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    net.keepers.append(keeper)
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == "ready\n", f"{name} could not be made"
    return keeper.pid


def _serve_ssh(net: Lan) -> None:
    """Write keys and configurations, starts one sshd a host and waits until each listens."""
    ssh = net.folder / "ssh"
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd's own, for the process without rights
    _key(ssh / "id")
    shutil.copyfile(ssh / "id.pub", ssh / "authorized_keys")
    known_hosts, client = "", ""
    forwarded = ("SFT_PLAY_CACHE", "RUNS_DIR", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
    for host in net.hosts:
        key = _key(ssh / f"{host.name}_key")
        known_hosts += f"{host.name},{host.address} {' '.join(key.with_suffix('.pub').read_text().split()[:2])}\n"
        client += f"Host {host.name} {host.address}\n HostName {host.address}\n"
        config = ssh / f"{host.name}.conf"
        config.write_text(
            f"ListenAddress {host.address}\nPort 22\nHostKey {key}\nPidFile none\nAuthorizedKeysFile"
            f" {ssh}/authorized_keys\nStrictModes no\nUsePAM no\nPermitRootLogin"
            " prohibit-password\nPasswordAuthentication no\nMaxStartups 50\nSubsystem sftp internal-sftp\nSetEnv "
            + " ".join(shlex.quote(f"{name}={net.variables[name]}") for name in forwarded)
            + "\n"
        )
        sshd = str(shutil.which("sshd"))
        started = net.command(net.hosts.index(host), [sshd, "-D", "-f", config, "-E", ssh / f"{host.name}.log"])
        net.keepers.append(subprocess.Popen(started, stdin=subprocess.DEVNULL, text=True, start_new_session=True))
    (ssh / "known_hosts").write_text(known_hosts)
    net.ssh_config.write_text(
        f"{client}Host *\n User root\n IdentityFile {ssh}/id\n IdentitiesOnly yes\n UserKnownHostsFile"
        f" {ssh}/known_hosts\n GlobalKnownHostsFile /dev/null\n StrictHostKeyChecking yes\n BatchMode yes\n LogLevel"
        " ERROR\n"
    )
    until(lambda: all(_listens(host) for host in net.hosts), seconds=240, explanation=lambda: "sshd does not listen")


def _listens(host: LanHost) -> bool:
    rows = Path(f"/proc/{host.keeper}/net/tcp").read_text().splitlines()[1:]
    return any(row.split()[1].endswith(":0016") and row.split()[3] == "0A" for row in rows)


def _key(path: Path) -> Path:
    if not path.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=240)
    return path


def _inside(keeper: int, *argv: str) -> None:
    done = subprocess.run(
        ["nsenter", "-t", str(keeper), "-n", *argv], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"


def _processes(keeper: int) -> list[int]:
    """Return the processes of a network namespace."""
    namespace, processes = Path(f"/proc/{keeper}/ns/net").readlink(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if (entry / "ns" / "net").readlink() == namespace:
                processes.append(int(entry.name))
    return processes


def _end(net: Lan) -> None:
    """End every process of every host, the keepers last: the namespaces, their links and mounts go with them."""
    own = {keeper.pid for keeper in net.keepers}
    for holder in filter(None, [*(host.keeper for host in net.hosts), net.switch]):
        with contextlib.suppress(OSError):
            pids = _processes(holder)
            assert os.getpid() not in pids  # never the machine itself
            for pid in pids:
                if pid not in own:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    for keeper in reversed(net.keepers):
        keeper.kill()
        keeper.wait(timeout=240)
        if keeper.stdout is not None:
            keeper.stdout.close()


def losses(run: RunFolder) -> list[float]:
    return [row["loss"] for row in metrics(run.path)]


def command_line(pid: int) -> list[str]:
    """Return a process's words, or none if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
