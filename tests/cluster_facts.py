"""What a machine of a cluster says of itself, where all is well."""

from __future__ import annotations

from sft_play.cluster.remote import Facts

OWN = Facts(
    host_name="a", machine="a 192.0.2.9", home="/home/a", folder="/srv/sft", runs="/srv/sft/runs", cache="/cache", hub="/hub", python="3.11.2",
    packages={"torch": "2.9.0", "peft": "0.18.0"}, gpus=[], gpu_count=1, rsync=True, shares_runs=False, shares_cache=False, linux=True,
    run_there=None, trains=False, interfaces={"lo": {}, "eth0": {}}, route=None, listens=[], code={}, data={}, prepared={},
)  # fmt: skip
