"""Facts that a healthy machine of a cluster reports."""

from __future__ import annotations

from sft_play.cluster.check import Facts

OWN = Facts(
    host_name="a",
    identity="a 192.0.2.9",
    system="Linux",
    versions={"python": "3.11.2", "torch": "2.9.0", "peft": "0.18.0"},
    driver=None,
    gpus=[],
    interfaces=["lo", "eth0"],
    rsync=True,
    home="/home/a",
    folder="/srv/sft",
    runs="/srv/sft/runs",
    cache="/cache",
    hub="/hub",
)
