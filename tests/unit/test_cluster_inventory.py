"""Inventories: what is read, what is refused, and which hosts the command line chooses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sft_play.cluster.inventory import read_inventory
from sft_play.cluster.ssh import SSH_FAILED, arguments, is_here, trouble
from sft_play.errors import UserError
from tests.conftest import Program

GOOD = """
network: 1Gbit
defaults: {user: me, gpus: 1}
hosts:
  desktop: {address: 192.168.1.10, interface: enp5s0}
  laptop: {address: 192.168.1.11, user: you, port: 2222}
  old-desktop: 192.168.1.12
"""


def written(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_all_problems_of_an_inventory_are_reported_at_once(tmp_path: Path) -> None:
    text = """netwrk: 1Gbit
defaults: {usr: me}
hosts:
  a: {adress: 1.2.3.4}
  b: {address: 10.0.0.1, gpus: two, port: 99999}
"""
    with pytest.raises(UserError) as caught:
        read_inventory(written(tmp_path, text))
    message = caught.value.render()
    for part in (
        "c.yaml:1: `netwrk` is not a known key",
        "did you mean `network`?",
        "c.yaml:2: `defaults.usr` is not a known key",
        "did you mean `user`?",
        "c.yaml:4: `hosts.a.adress` is not a known key",
        "did you mean `address`?",
        "c.yaml:5: `hosts.b.gpus` is `two`",
        "`hosts.b.port` is `99999`",
    ):
        assert part in message, part
    text = """hosts:
  c: {address: 10.0.0.2, folder: relative}
  d: {address: -oProxyCommand=x}
  "e f": {address: 10.0.0.3}
"""
    with pytest.raises(UserError) as caught:
        read_inventory(written(tmp_path, text))
    message = caught.value.render()
    for part in (
        "c.yaml:2: `folder` is `relative`",
        "c.yaml:3: `address` is `-oProxyCommand=x`",
        "`e f` is not a name",
    ):
        assert part in message, part


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            "hosts: {a: 10.0.0.1, b: 10.0.0.1}",
            "hosts `a` and `b` have one address, `10.0.0.1`\n\nhint: the other is at ",
        ),
        ("hosts: {a: 10.0.0.1, b: 127.0.0.1}", "every machine calls itself"),
        ("hosts: [a, b]", "`hosts` is `[a, b]`; expected a mapping"),
        ("hosts: {}", "there are no hosts"),
        ("", "an inventory of machines has `hosts`"),
        ("network: fast\nhosts: {a: 10.0.0.1}", "`network` is `fast`; expected a speed such as `1Gbit`"),
        ("ssh_config: nowhere\nhosts: {a: 10.0.0.1}", "which is not a file"),
        ("hosts: {a: {user: me}}", "`hosts.a.address` is missing"),
        ("hosts: {a: '192.168.77.11:22'}", "`address` is `192.168.77.11:22`; expected a name or an IPv4 address"),
        ("hosts: {a: root@192.168.77.11}", "hint: a user goes into `user:`, a port into `port:`"),
        ("hosts: {a: 192.168.1.300}", "`address` is `192.168.1.300`; expected a name or an IPv4 address"),
        *(
            (f"hosts: {{a: {{address: 10.0.0.1, folder: '{folder}'}}}}", "`folder` is ")
            for folder in ("~/", "/", "//", "~/../x")
        ),
        ("hosts: {a: 'fd00::2'}", "ranks meet over IPv4 only"),
        ("hosts: {a: {address: 10.0.0.1, ssh: me@jump}}", "`ssh` is `me@jump`; expected a name or an IP address"),
    ],
)
def test_each_mistake_is_one_error(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(UserError) as caught:
        read_inventory(written(tmp_path, text))
    assert part in caught.value.render()
    assert caught.value.render().count("error: ") == 1, "one mistake, one error"


def test_a_host_may_set_what_all_have(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD + "ssh_config: ssh\n")
    written(tmp_path, "Host *\n", "ssh")
    desktop, laptop, old = read_inventory(path).hosts
    assert (desktop.user, desktop.gpus, desktop.interface, desktop.port) == ("me", 1, "enp5s0", None)
    assert (laptop.user, laptop.gpus, laptop.port, laptop.folder) == ("you", 1, 2222, "~/sft-play")
    assert (old.address, old.user, old.place) == ("192.168.1.12", "me", f"{path}:7")
    assert desktop.ssh_config == tmp_path / "ssh"
    other = "defaults: {python: /x/bin/python}\nhosts: {a: {address: 10.0.0.1, python: .venv/bin/python}}"
    assert read_inventory(written(tmp_path, other)).master.python == ".venv/bin/python", "even to the usual value"


def test_the_command_line_chooses_hosts(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    inventory = read_inventory(path, "old-desktop, desktop")
    assert [host.name for host in inventory.hosts] == ["old-desktop", "desktop"]
    for chosen, part in (("desktop lapto", "did you mean `laptop`?"), (" , ", "there are no hosts")):
        with pytest.raises(UserError) as caught:
            read_inventory(path, chosen)
        assert part in caught.value.render()


def test_only_cluster_commands_accept_inventory_variables(in_process: Program, tmp_path: Path) -> None:
    """The variable chooses hosts; a command without an inventory is refused, and other commands do not have it."""
    path = written(tmp_path, GOOD)
    done = in_process("cluster-check", f"CLUSTER={path}", "CLUSTER_HOSTS=nobody")
    assert done.code == 2
    assert "CLUSTER_HOSTS=nobody: `nobody` is not a host" in done.err
    done = in_process("cluster-check")
    assert done.code == 2
    assert "CLUSTER=configs/clusters/home_lan.yaml" in done.err
    assert (
        "did you mean `configs/clusters/home_lan.yaml`?"
        in in_process("cluster-check", "CLUSTER=configs/clusters/home_lam.yaml").err
    )
    assert "`train` takes no `CLUSTER_HOSTS`" in in_process("train", "CLUSTER_HOSTS=a").err


def test_words_arrive_verbatim(tmp_path: Path) -> None:
    """No shell on the way changes a word; `~/` is the other side's home."""
    path = written(tmp_path, "hosts: {a: {address: 192.0.2.1, user: me, port: 22}, b: 192.0.2.2}")
    inventory = read_inventory(path)
    host = inventory.master
    assert not is_here(host)
    odd = ["a b", "$HOME", "`id`", "x'y\"z", "", "*", "~/x", "a;b", "-n", "\\", "é\n2"]
    words = arguments(host, ["printf", "%s|", *odd])
    assert words[:2] == ["ssh", "-T"]
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes", "ConnectTimeout=5"} <= set(words)
    assert words[words.index("--") + 1] == "192.0.2.1"
    done = subprocess.run(["sh", "-c", words[-1]], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout == "".join(f"{word}|" for word in odd)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.", "unknown-host-key"),
        ("ssh: connect to host x port 22: Connection refused", "no-sshd"),
        ("kex_exchange_identification: read: Connection reset", "ssh"),
    ],
)
def test_errors_of_ssh_become_findings_with_a_remedy(tmp_path: Path, message: str, name: str) -> None:
    """What `tests/multinode/test_cluster_check.py` does not bring about."""
    inventory = read_inventory(written(tmp_path, "hosts: {a: {address: 192.0.2.1, user: me, port: 2200}}"))
    why = trouble(inventory.master, SSH_FAILED, message)
    assert why.id == name
    assert why.remedy
