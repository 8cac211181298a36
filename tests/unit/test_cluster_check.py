"""What `cluster-check` concludes from machines' reports, for cards or drivers that no test machine has.

Programs in place of ssh stand for the machines: each prints a report of `make doctor JSON=1`.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sft_play.cluster.check import GpuFacts, HostReport, compare
from sft_play.cluster.inventory import Host, Inventory
from sft_play.cluster.ssh import CAUSES
from sft_play.plan.hardware import GIB
from tests.cluster_facts import OWN
from tests.conftest import ROOT

NAMES = ("desktop", "laptop", "old")
SSH = """#!/bin/sh
while :; do case "$1" in -T) shift;; -F|-o|-p|-l) shift 2;; --) shift; break;; esac; done
cat "$MACHINES/$1"
"""


def card(free: float = 11.5) -> GpuFacts:
    return GpuFacts(name="NVIDIA GeForce RTX 4070", memory_bytes=12 * GIB, free_bytes=int(free * GIB))


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of each machine's report, by its address."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MACHINES", str(tmp_path))
    return tmp_path


def say(machines: Path, number: int, doctor: list[dict[str, str]] | None = None, **changes: Any) -> Host:
    """Write the report of a healthy machine with `changes`; return its host."""
    own = {"host_name": NAMES[number], "identity": f"boot{number}", "gpus": [card()], "driver": "580.65.06"}
    facts = asdict(replace(OWN, **(own | changes)))
    host = Host(name=NAMES[number], address=f"192.0.2.{10 + number}", place=f"c.yaml:{number + 4}")
    (machines / host.address).write_text(json.dumps({"findings": doctor or [], "machine": facts}))
    return host


def compared(*hosts: Host, backend: str = "auto") -> dict[str, HostReport]:
    answers = compare(Inventory(hosts=hosts, path=Path("c.yaml")), shared={}, backend=backend)
    return {answer.host.name: answer for answer in answers}


TOO_OLD = {"id": "driver-too-old", "severity": "error", "text": "driver 550 is too old", "remedy": "a newer one"}


@pytest.mark.parametrize(
    ("changes", "name", "severity", "part"),
    [
        ({"doctor": [TOO_OLD]}, "driver-too-old", "fail", "driver 550 is too old | a newer one"),
        ({"gpus": [card(3.0)]}, "gpu-memory", "warning", "GPU 0 (NVIDIA GeForce RTX 4070) has 3.0 of 12.0 GiB free"),
        ({"identity": "boot0"}, "same-machine", "fail", "`desktop` and `laptop` are one machine, `laptop`"),
        ({"gpus": []}, "gpus", "fail", "other hosts have GPUs, but its driver shows 0"),
        ({"versions": {**OWN.versions, "python": "3.12.1"}}, "versions", "fail", "Python 3.12 (there 3.11)"),
        (
            {"versions": {**OWN.versions, "unsloth": "2026.10.9"}},
            "versions",
            "fail",
            "unsloth 2026.10.9 (there missing)",
        ),
        ({"driver": "590.1"}, "driver", "warning", "its NVIDIA driver is 590.1, that of `desktop` 580.65.06"),
        ({"rsync": False}, "rsync", "fail", "there is no `rsync`"),
        ({"system": "Darwin"}, "no-linux", "fail", "it runs Darwin"),
    ],
)
def test_each_fault_is_reported_for_its_machine_alone(
    machines: Path, changes: dict[str, Any], name: str, severity: str, part: str
) -> None:
    """It is reported for that machine alone, with a remedy."""
    answers = compared(say(machines, 0), say(machines, 1, **changes), say(machines, 2))
    assert answers["desktop"].findings == answers["old"].findings == []
    [finding] = answers["laptop"].findings
    assert (finding.id, finding.severity) == (name, severity)
    assert part in f"{finding.text} | {finding.remedy}" and finding.remedy


def test_a_single_machine_is_not_compared(machines: Path) -> None:
    """Nothing is sent to it, and there is nothing to compare; NCCL needs its GPUs."""
    assert compared(say(machines, 0, rsync=False))["desktop"].verdict == "ok"
    [finding] = compared(say(machines, 0, gpus=[]), backend="nccl")["desktop"].findings
    assert "`launch.backend: nccl` needs GPUs, but its driver shows 0" in finding.text


def test_an_inventory_states_cards_and_an_interface(machines: Path) -> None:
    host = replace(say(machines, 0), gpus=2, interface="wg0")
    findings = {finding.id: finding for finding in compared(host)["desktop"].findings}
    assert findings["gpus"].text == "`gpus: 2` in the inventory, but its driver shows 1"
    assert findings["interface"].text == "there is no interface `wg0`; it has `lo`, `eth0`"
    assert all("c.yaml:4" in finding.remedy for finding in findings.values())


def test_a_project_of_another_version_is_named(machines: Path) -> None:
    """Its doctor says less than this one asks for."""
    host = say(machines, 0)
    (machines / host.address).write_text(json.dumps({"findings": []}))
    [finding] = compared(host)["desktop"].findings
    assert finding.id == "versions" and "make cluster-install CLUSTER=..." in finding.remedy


def test_every_finding_is_documented() -> None:
    guide = (ROOT / "docs" / "home-cluster.md").read_text(encoding="utf-8")
    code = (ROOT / "sft_play" / "cluster" / "check.py").read_text()
    ids = {*re.findall(r'\.add\(\s*"([a-z-]+)"', code), *(cause.id for cause in CAUSES)}
    assert len(ids) > 15
    assert {name for name in ids if f"`{name}`" not in guide} == set()
