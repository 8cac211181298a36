"""What `cluster-check` makes of what machines say: the cases that need cards, drivers or networks which no test machine has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_play.cluster.check import as_json, report
from sft_play.cluster.examined import Examined, Pair, Seen, Summed, Wanted, sum_seconds
from sft_play.cluster.finding import Finding, listed, verdict
from sft_play.cluster.findings import GIB, judge
from sft_play.config.cluster_host import Host, Inventory
from tests.conftest import ROOT

NAMES = ("desktop", "laptop", "old")
PACKAGES = {"torch": "2.13.0", "accelerate": "1.15.0"}


def gpu(name: str = "NVIDIA GeForce RTX 4070", total: int = 12, free: float = 11.5, *held_by: str) -> dict[str, Any]:
    return {
        "name": name,
        "total_bytes": total * GIB,
        "free_bytes": int(free * GIB),
        "capability": [8, 9],
        "held_by": list(held_by),
    }


def seen(k: int, **changes: Any) -> Seen:
    """Returns a machine on which all is well; `changes` are of its software, its facts or its own fields."""
    host = Host(name=NAMES[k], address=f"192.168.1.{10 + k}", place=f"c.yaml:{k + 4}", gpus=changes.pop("stated", None))
    disk = {"path": "/x", "free_bytes": 100 * GIB + k, "total_bytes": 200 * GIB, "writable": True}
    facts: dict[str, Any] = {
        "host_name": NAMES[k], "machine": f"boot{k} 192.168.1.{10 + k}", "python": "3.11.7", "ram_bytes": 32 * GIB, "nofile": [65536, 65536],
        "disks": {"folder": disk, "cache": disk, "runs": disk, "shm": {**disk, "path": "/dev/shm"}}, "rsync": True,
        "names_itself": [f"192.168.1.{10 + k}"], "route": {"address": f"192.168.1.{10 + k}", "interface": "eth0", "mtu": 1500},
        "interfaces": ["lo", "eth0"], "packages": dict(PACKAGES),
    }  # fmt: skip
    software: dict[str, Any] = {
        "torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "usable_gpus": 1, "error": None, "driver": "580.95.05", "gpus": [gpu()],
        "hidden": None, "architectures": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"],
    }  # fmt: skip
    made = Seen(host, skew_seconds=0.0001, ssh_ms=0.4, facts=facts, software=software)
    for key, value in changes.items():
        if key in software:
            software[key] = value
        elif key in facts:
            facts[key] = value
        else:
            setattr(made, key, value)
    return made


def judged(*machines: Seen, wanted: Wanted | None = None, network: str | None = None, **found: Any) -> dict[str, list[Finding]]:
    inventory = Inventory(hosts=tuple(one.host for one in machines), network=network, ssh_config=None, path=Path("c.yaml"))
    examined = Examined(hosts={one.host.name: one for one in machines}, **found)
    return judge(examined, inventory, wanted or Wanted(port=29500), "c.yaml")


def test_all_is_well() -> None:
    findings = judged(*(seen(k) for k in range(3)))
    assert findings == {name: [] for name in NAMES}
    assert {verdict(some) for some in findings.values()} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "name", "severity", "part"),
    [
        ({"driver": "550.54"}, "driver", "fail", "driver 550.54 is too old for CUDA 13.0"),
        (
            {"gpus": [gpu("NVIDIA GeForce RTX 4070", 12, 3.0, "blender (process 7)")]},
            "gpu-memory",
            "warning",
            "held by blender (process 7)",
        ),
        ({"stated": 2}, "gpus", "fail", "`gpus: 2` in the inventory, but torch finds 1"),
        ({"usable_gpus": 0}, "gpus", "fail", "cannot use them"),
        ({"usable_gpus": 0, "gpus": []}, "gpus", "fail", "no GPU that torch can use, while others have"),
        ({"torch": "2.12.0+cu130"}, "versions", "fail", "torch 2.12.0+cu130, on `desktop` 2.13.0+cu130"),
        ({"nccl": "2.27.3"}, "versions", "fail", "NCCL 2.27.3"),
        ({"python": "3.12.1"}, "versions", "fail", "Python 3.12.1, on `desktop` 3.11.7"),
        ({"python": "3.11.2"}, "versions", "warning", "Python 3.11.2"),
        ({"packages": {"torch": "2.13.0"}}, "versions", "fail", "accelerate missing (there 1.15.0)"),
        ({"packages": PACKAGES | {"unsloth": "2026.10.9"}}, "versions", "fail", "unsloth 2026.10.9 (there missing)"),
        (
            {"packages": PACKAGES | {"flash-attn": "2.8.1"}},
            "versions",
            "fail",
            "python -m pip uninstall flash-attn, or install it on `desktop`",
        ),
        ({"packages": PACKAGES | {"rich": "14.1.0"}}, "packages", "warning", "rich 14.1.0 (there missing)"),
        ({"torch": None, "error": "ImportError: libcudart"}, "torch", "fail", "ImportError: libcudart"),
        ({"skew_seconds": -1.5}, "clock", "warning", "1.5 s behind"),
        ({"machine": "boot0 192.168.1.10"}, "same-machine", "fail", "`desktop` and `laptop` are one machine"),
        ({"nofile": [1024, 4096]}, "nofile", "warning", "1024 files"),
        ({"names_itself": ["127.0.1.1"]}, "own-name", "warning", "192.168.1.11 laptop"),
        ({"route": {"address": "192.168.1.11", "interface": "wg0", "mtu": 1420}}, "mtu", "warning", "1420"),
        ({"lost": "software: no answer within 20 s"}, "lost", "fail", "stopped answering"),
        ({"rsync": False}, "rsync", "fail", "no `rsync`, by which it would get code and data | on it: `sudo apt install rsync`"),
    ],
)
def test_one_fault(changes: dict[str, Any], name: str, severity: str, part: str) -> None:
    """It is found on that machine alone, with a remedy."""
    findings = judged(seen(0), seen(1, **changes), seen(2))
    assert findings["desktop"] == []
    assert findings["old"] == []
    matching = [one for one in findings["laptop"] if one.id == name]
    assert len(matching) == 1, findings["laptop"]
    assert matching[0].severity == severity
    assert part in f"{matching[0].text} | {matching[0].remedy}"


@pytest.mark.parametrize(
    ("capabilities", "changes", "expected"),
    [
        ([[6, 1]], {}, ["fail"]),
        ([[6, 1], [8, 9]], {}, ["fail"]),
        ([[6, 1], [8, 9]], {"hidden": "1"}, ["warning"]),
        ([[6, 1]], {"hidden": "0"}, ["fail"]),
        ([[6, 1]], {"stated": 0}, []),
        ([[6, 1]], {"architectures": []}, []),
        ([[13, 0]], {}, []),
        ([None], {}, []),
        ([[7, 5], [8, 9], [12, 0]], {}, []),
    ],
)
def test_cards_that_torch_has_no_code_for(capabilities: list[Any], changes: dict[str, Any], expected: list[str]) -> None:
    """As `make doctor` says it: what CUDA 13's torch 2.13 was built for, and a GTX 1080 (6.1)."""
    gpus = [gpu("NVIDIA GeForce GTX 1080") | {"capability": one} for one in capabilities]
    findings = judged(seen(0), seen(1, gpus=gpus, usable_gpus=len(gpus), **changes))["laptop"]
    lacking = [one for one in findings if one.id == "torch-lacks-architecture"]
    assert [one.severity for one in lacking] == expected
    for one in lacking:
        assert one.text.startswith(
            "torch 2.13.0+cu130 has no code for NVIDIA GeForce GTX 1080 (compute capability 6.1); it has sm_75,"
        )
        assert one.remedy.startswith("install a torch build for this GPU")


def test_what_only_the_first_machine_has() -> None:
    """Node 0's plan would take it on all: flash-attn is missing on the others, and `cluster-install` does not bring it."""
    findings = judged(seen(0, packages=PACKAGES | {"flash-attn": "2.8.1", "rich": "14.1.0"}), seen(1))
    assert findings["desktop"] == []
    versions, packages = findings["laptop"]
    assert (versions.id, versions.severity) == ("versions", "fail")
    assert versions.text.endswith("flash-attn missing (there 2.8.1)")
    python = "on `laptop`, in `~/sft-play`: .venv/bin/python -m pip"
    assert versions.remedy == f"{python} install flash-attn==2.8.1, or uninstall it on `desktop`"
    assert (packages.id, packages.severity) == ("packages", "warning")
    assert "rich missing (there 14.1.0)" in packages.text


def test_the_masters_own_rsync() -> None:
    """It sends to the others; with one machine nothing is sent."""
    findings = judged(seen(0, rsync=False), seen(1))
    assert [(one.id, one.severity) for one in findings["desktop"]] == [("rsync", "fail")]
    assert "bring code and data to the others" in findings["desktop"][0].text
    assert findings["laptop"] == []
    assert judged(seen(0, rsync=False)) == {"desktop": []}


def test_nccl_needs_cards_and_the_master_is_where_one_types() -> None:
    machines = [seen(k, usable_gpus=0, gpus=[], driver=None) for k in range(2)]
    findings = judged(*machines, wanted=Wanted(port=29500, backend="nccl"))
    assert all("`launch.backend: nccl` needs" in some[0].text for some in findings.values())
    inventory = Inventory(hosts=tuple(one.host for one in machines), network=None, ssh_config=None, path=Path("c.yaml"))
    there = judge(Examined(hosts={one.host.name: one for one in machines}), inventory, Wanted(port=29500), "c.yaml", here=False)
    assert [one.id for one in there["desktop"]] == ["master-elsewhere"]
    assert there["laptop"] == []


def ways(bad: set[tuple[str, str]], mbit: float = 940.0) -> list[Pair]:
    return [
        Pair(a, b, "timed out" if (a, b) in bad else None, None if (a, b) in bad else 0.2, None if (a, b) in bad else mbit)
        for a in NAMES for b in NAMES if a != b
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({("desktop", "old"), ("laptop", "old")}, {"old": "ports-closed"}),
        ({("old", "desktop"), ("old", "laptop")}, {"old": "ports-closed"}),
        ({(a, b) for a in NAMES for b in NAMES if "old" in (a, b)}, {"old": "cut-off"}),
        ({("desktop", "laptop")}, {"laptop": "ports-closed"}),
    ],
)
def test_whose_ports_are_closed(bad: set[tuple[str, str]], expected: dict[str, str]) -> None:
    findings = judged(*(seen(k) for k in range(3)), pairs=ways(bad))
    assert {name: some[0].id for name, some in findings.items() if some} == expected


def test_slow_network_is_told_once_and_in_seconds() -> None:
    """A 100 Mbit/s line between gigabit ones: the machine behind it, and what a step would wait."""
    pairs = [Pair(p.source, p.target, None, 0.2, 94.0 if "old" in (p.source, p.target) else 940.0) for p in ways(set())]
    findings = judged(*(seen(k) for k in range(3)), network="1Gbit", pairs=pairs)
    assert {name: [one.id for one in some] for name, some in findings.items()} == {
        "desktop": [],
        "laptop": [],
        "old": ["slow-network"],
    }
    assert "3.8 s a step" in findings["old"][0].text
    assert sum_seconds(34_000_000, 3, 1000 * 0.94) == pytest.approx(0.386, abs=0.001)  # 34 MB on 3 machines at 1 Gb/s


def test_data_and_code() -> None:
    wanted = Wanted(port=1, code={"a.py": "1", "b.py": "2"}, sources={"d.jsonl": "3"}, prepared={"train-1": "4"}, shared=True)
    good = {"code_files": {"a.py": "1", "b.py": "2"}, "sources": {"d.jsonl": "3"}, "prepared": {"train-1": "4"}}
    bad = {"code_files": {"a.py": "1", "b.py": None}, "sources": {"d.jsonl": None}, "prepared": {"train-1": None}}
    findings = judged(seen(0, **good), seen(1, **bad), wanted=wanted)
    assert findings["desktop"] == []
    assert [(one.id, one.severity) for one in findings["laptop"]] == [("code", "fail"), ("data", "fail")]
    assert "1 of the project's 2 files" in findings["laptop"][0].text
    assert "`data.sync` is `shared`" in findings["laptop"][1].text
    findings = judged(
        seen(0, **good),
        seen(1, **(bad | {"code_files": good["code_files"], "sources": {"d.jsonl": "9"}})),
        wanted=Wanted(port=1, code=wanted.code, sources=wanted.sources),
    )
    assert [one.id for one in findings["laptop"]] == ["data"]
    slow = {"code_files": {"a.py": "1"}, "sources": {}}
    findings = judged(seen(0, **good), seen(1, **slow), wanted=Wanted(port=1, code=wanted.code, sources=wanted.sources))
    assert [(one.id, one.severity) for one in findings["laptop"]] == [("not-measured", "warning")]
    assert findings["laptop"][0].text.startswith("2 files could not be compared, since it reads them slowly: `b.py`, `d.jsonl`")


def test_output() -> None:
    """The table, the slowest way, the sum; JSON with every finding."""
    machines = [seen(0), seen(1, gpus=[gpu("NVIDIA GeForce RTX 4060 Laptop GPU", 8, 7.6)])]
    inventory = Inventory(hosts=tuple(one.host for one in machines), network=None, ssh_config=None, path=Path("c.yaml"))
    pairs = [Pair("desktop", "laptop", None, 0.21, 941.0), Pair("laptop", "desktop", None, 0.2, 938.0)]
    examined = Examined(hosts={one.host.name: one for one in machines}, pairs=pairs, summed=Summed("nccl", 0.07), seconds=7.0)
    findings = judge(examined, inventory, Wanted(port=29500), "c.yaml")
    text = "\n".join(report(examined, inventory, Wanted(port=29500), findings))
    assert "1 x RTX 4060 Laptop GPU" in text
    assert "938 Mbit/s" in text
    assert "34 MB) would take 0.29 s a step" in text
    assert "(nccl): 0.070 s" in text
    assert text.endswith("2 machines: 2 ok, 0 with a warning, 0 cannot take part")
    alone = Examined(hosts={"desktop": machines[0]}, seconds=7.0)
    assert "1 machine: 1 ok" in "\n".join(report(alone, inventory, Wanted(port=29500), {"desktop": []}))
    value = as_json(examined, inventory, Wanted(port=29500), findings)
    assert value["ok"] is True
    assert value["hosts"]["laptop"]["software"]["gpus"][0]["total_bytes"] == 8 * GIB
    assert listed([str(k) for k in range(8)]).endswith("and 2 more")


def test_every_finding_is_documented() -> None:
    folder, guide = ROOT / "sft_play" / "launch" / "cluster", (ROOT / "docs" / "home-cluster.md").read_text(encoding="utf-8")
    source = "".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in ("findings", "findings_network", "ssh"))
    ids = set(re.findall(r'\bid="([a-z-]+)"', source))
    assert len(ids) > 30
    assert {name for name in ids if f"`{name}`" not in guide} == set()


def test_cards_as_the_driver_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without packages asks `nvidia-smi`; here a program that answers in its way."""
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "580.95.05, 12282, 11870, NVIDIA GeForce RTX 4070"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    script = (
        "import sys, json; sys.modules['pynvml'] = None; from sft_play.cluster import probe; print(json.dumps(probe.software()))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    assert found["driver"] == "580.95.05"
    assert [(one["name"], one["total_bytes"], one["free_bytes"]) for one in found["gpus"]] == [
        ("NVIDIA GeForce RTX 4070", 12282 << 20, 11870 << 20)
    ]
    assert found["torch"] is None
    assert "torch" in found["error"]
    host = seen(1, stated=2, driver=found["driver"], gpus=found["gpus"], without=127, usable_gpus=0)
    findings = judged(seen(0), host)["laptop"]
    assert [one.id for one in findings] == ["no-environment", "gpus"]
    assert "its driver shows 1" in findings[1].text


def test_what_a_host_says_in_the_place_of_a_shell_counts_before_sshds_remark() -> None:
    said = "This account is currently not available.\nCould not chdir to home directory /nonexistent: No such file or directory"
    host = seen(1, start=said, code=1, facts={})
    [found] = judged(seen(0), host)["laptop"]
    assert found.id == "broken-python" and found.text.endswith("ended with code 1: This account is currently not available.")


def test_a_folder_that_is_a_file_is_told_as_one() -> None:
    [found] = judged(seen(0), seen(1, start="/etc/hosts is a file", code=95, facts={}))["laptop"]
    assert found.id == "no-environment" and found.text == "no environment: `folder` is `~/sft-play`, which is a file there"
    assert found.remedy == "give another `folder` in the inventory, or move that file away there"
