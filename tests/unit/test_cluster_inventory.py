"""Inventories: what is read, what is refused, and what the command line changes."""

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
  a: {ip: 1.2.3.4}
  b: {address: 10.0.0.1, gpus: two, port: 99999}
  c: {address: 10.0.0.2, folder: relative, user: "-oProxyCommand=x"}
  d: {address: -oProxyCommand=x}
  "e f": {address: 10.0.0.3}
"""
    with pytest.raises(UserError) as caught:
        read_inventory(written(tmp_path, text))
    message = caught.value.render()
    for part in (
        "c.yaml:1: unknown key `netwrk`",
        "did you mean `network`?",
        "c.yaml:2: unknown key `usr`",
        "did you mean `user`?",
        "c.yaml:4: unknown key `ip`",
        "did you mean `address`?",
        "c.yaml:5: `gpus` is `two`",
        "`port` is `99999`",
        "c.yaml:6: `folder` is `relative`",
        "`user` is `-oProxyCommand=x`",
        "c.yaml:7: `address` is `-oProxyCommand=x`",
        "`e f` is not a name",
    ):
        assert part in message, part
    assert "has no `address`" not in message, "host `a` has a wrong key in its place"
    assert message.count("error: ") == 9, message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            "hosts: {a: 10.0.0.1, b: 10.0.0.1}",
            "hosts `a` and `b` have one address, `10.0.0.1`\n\nhint: the other is at ",
        ),
        ("hosts: {a: 10.0.0.1, b: 127.0.0.1}", "every machine calls itself"),
        ("hosts: [a, b]", "`hosts` is `[a, b]`; expected names with their keys"),
        ("hosts: {}", "no hosts"),
        ("", "the inventory is `null`; expected `extends`"),
        ("network: fast\nhosts: {a: 10.0.0.1}", "`network` is `fast`; expected a speed such as `1Gbit`"),
        ("ssh_config: nowhere\nhosts: {a: 10.0.0.1}", "which is not a file"),
        ("hosts: {a: {user: me}}", "host `a` has no `address`"),
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


def test_an_inventory_may_extend_another(tmp_path: Path) -> None:
    """A fourth machine is one entry; a host may be changed, or left out; the parent's paths count from its own
    folder.
    """
    (tmp_path / "base").mkdir()
    written(tmp_path / "base", "Host *\n", "ssh")
    written(tmp_path / "base", GOOD + "ssh_config: ssh\n")
    child = written(
        tmp_path, "extends: base/c.yaml\nhosts:\n  laptop:\n  old-desktop: {gpus: 0}\n  attic: 192.168.1.13\n"
    )
    inventory = read_inventory(child)
    assert [host.name for host in inventory.hosts] == ["desktop", "old-desktop", "attic"]
    assert (inventory.hosts[1].address, inventory.hosts[1].gpus) == ("192.168.1.12", 0)
    assert inventory.master.ssh_config == tmp_path / "base" / "ssh"
    written(tmp_path, "extends: c.yaml\nhosts: {a: 10.0.0.1}\n")
    with pytest.raises(UserError, match="forms a cycle"):
        read_inventory(tmp_path / "c.yaml")


def test_variables_of_the_command_line_change_an_inventory(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    changes = {
        "CLUSTER_HOSTS": "old-desktop, desktop",
        "CLUSTER_NETWORK": "100Mbit",
        "CLUSTER_OLD_DESKTOP_GPUS": "2",
        "CLUSTER_FOLDER": "/srv/x",
    }
    inventory = read_inventory(path, changes)
    assert [(host.name, host.gpus, host.folder) for host in inventory.hosts] == [
        ("old-desktop", 2, "/srv/x"),
        ("desktop", 1, "/srv/x"),
    ]
    assert inventory.network == "100Mbit"
    for changes, part in (
        ({"CLUSTER_HOSTS": "desktop lapto"}, "did you mean `laptop`?"),
        ({"CLUSTER_HOSTS": "desktop laptop desktop"}, "`desktop` is listed 2 times"),
        ({"CLUSTER_HOSTS": " , "}, "names no host"),
        ({"CLUSTER_NETWORKS": "1Gbit"}, "did you mean `CLUSTER_NETWORK`?"),
        ({"CLUSTER_LAPTOP_GPUS": "many"}, "CLUSTER_LAPTOP_GPUS=many: `gpus` is `many`"),
    ):
        with pytest.raises(UserError) as caught:
            read_inventory(path, changes)
        assert part in caught.value.render()


def test_only_cluster_commands_accept_inventory_variables(in_process: Program, tmp_path: Path) -> None:
    """The variables change the inventory; a command without one is refused, and other commands do not have them."""
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
    assert "unknown variable `CLUSTER_HOSTS`" in in_process("train", "CLUSTER_HOSTS=a").err


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
        ("WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.", "host-key-changed"),
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
