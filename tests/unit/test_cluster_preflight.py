"""What `cluster-check` makes of what machines say: the cases that need cards, drivers or networks which no test machine
has.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sft_play.cluster.findings import Examined, Pair, Seen, Wanted, judge, sum_seconds
from sft_play.cluster.hosts import SAYS
from sft_play.cluster.inventory import Host, Inventory
from sft_play.plan.hardware import GIB
from sft_play.text import Finding
from tests.cluster_facts import OWN
from tests.conftest import ROOT

NAMES = ("desktop", "laptop", "old")
PACKAGES = {"torch": "2.13.0+cu130", "accelerate": "1.15.0"}
ETH0 = {"address": "192.168.1.10", "interface": "eth0", "mtu": 1500}


def gpu(free: float = 11.5) -> dict[str, Any]:
    return {"name": "NVIDIA GeForce RTX 4070", "total_bytes": 12 * GIB, "free_bytes": int(free * GIB)}


def seen(k: int, doctor: Sequence[Mapping[str, str]] = (), **changes: Any) -> Seen:
    """Returns a machine on which all is well; `changes` are of its facts."""
    host = Host(name=NAMES[k], address=f"192.168.1.{10 + k}", place=f"c.yaml:{k + 4}")
    own = {"host_name": NAMES[k], "machine": f"boot{k}", "packages": PACKAGES, "gpus": [gpu()], "route": ETH0}
    return Seen(
        host, answers=True, skew_seconds=0.0001, facts=dataclasses.replace(OWN, **(own | changes)), doctor=doctor
    )


def judged(
    *machines: Seen, wanted: Wanted | None = None, network: str | None = None, **found: Any
) -> dict[str, list[Finding]]:
    inventory = Inventory(hosts=tuple(one.host for one in machines), network=network, path=Path("c.yaml"))
    examined = Examined(hosts={one.host.name: one for one in machines}, **found)
    return judge(examined, inventory, wanted or Wanted(port=29500))


@pytest.mark.parametrize(
    ("changes", "name", "severity", "part"),
    [
        ({"doctor": [{"id": "driver-too-old", "severity": "error", "text": "driver 550 is too old", "remedy": "a newer one"}]}, "driver-too-old",
         "fail", "driver 550 is too old | a newer one"),
        ({"gpus": [gpu(3.0)]}, "gpu-memory", "warning", "GPU 0 (NVIDIA GeForce RTX 4070) has 3.0 of 12.0 GiB free"),
        ({"machine": "boot0"}, "same-machine", "fail", "`desktop` and `laptop` are one machine, `laptop`"),
        ({"gpu_count": 0}, "gpus", "fail", "other hosts have GPUs, but its driver shows 0 (1 in the machine)"),
        ({"python": "3.12.1"}, "versions", "fail", "Python 3.12 (there 3.11)"),
        ({"packages": PACKAGES | {"unsloth": "2026.10.9"}}, "versions", "fail", "unsloth 2026.10.9 (there missing)"),
        ({"route": {"address": "192.168.1.11", "interface": "wg0", "mtu": 1420}}, "mtu", "warning", "1420"),
    ],
)  # fmt: skip
def test_one_fault(changes: dict[str, Any], name: str, severity: str, part: str) -> None:
    """It is found on that machine alone, with a remedy."""
    findings = judged(seen(0), seen(1, **changes), seen(2))
    assert findings["desktop"] == findings["old"] == []
    [found] = [one for one in findings["laptop"] if one.id == name]
    assert found.severity == severity and part in f"{found.text} | {found.remedy}"


def test_code_is_sent_by_rsync_and_nccl_needs_gpus() -> None:
    """With one machine nothing is sent."""
    findings = judged(seen(0, rsync=False), seen(1))
    assert [one.id for one in findings["desktop"]] == ["rsync"] and findings["laptop"] == []
    assert judged(seen(0, rsync=False)) == {"desktop": []}
    machines = tuple(seen(k, gpu_count=0, gpus=[]) for k in range(2))
    findings = judged(*machines, wanted=Wanted(port=29500, backend="nccl"))
    assert all("`launch.backend: nccl` needs" in some[0].text for some in findings.values())


def test_slow_and_long_ways_are_warned_of_once() -> None:
    """A 100 Mbit/s line between gigabit ones, which also takes long: the machine behind it, and what a step would
    wait.
    """
    pairs = [
        Pair(a, b, None, *((12.0, 94.0) if "old" in (a, b) else (0.2, 940.0))) for a in NAMES for b in NAMES if a != b
    ]
    findings = judged(*(seen(k) for k in range(3)), network="1Gbit", pairs=pairs)
    assert {name: {one.id for one in some} for name, some in findings.items() if some} == {
        "old": {"slow-network", "latency"}
    }
    assert any(
        "94 Mbit/s, the inventory says `1Gbit`; 8.4 M parameters in fp32 take 3.8 s a step" in one.text
        for one in findings["old"]
    )
    assert sum_seconds(34_000_000, 3, 1000 * 0.94) == pytest.approx(0.386, abs=0.001)  # 34 MB on 3 machines at 1 Gb/s


def test_every_finding_is_documented() -> None:
    guide = (ROOT / "docs" / "home-cluster.md").read_text(encoding="utf-8")
    code = "".join((ROOT / "sft_play" / "cluster" / f"{name}.py").read_text() for name in ("findings", "hosts"))
    ids = {*re.findall(r'(?:_fail|_warn|Finding)\("([a-z-]+)"', code), *(row[0] for row in SAYS)}
    assert len(ids) > 20
    assert {name for name in ids if f"`{name}`" not in guide} == set()
