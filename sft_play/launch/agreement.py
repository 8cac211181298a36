"""What the nodes of a run must agree on, and the one error that says where they do not. Pure but for `versions_here`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from sft_play.config.call import flatten
from sft_play.config.load import LoadedConfig
from sft_play.config.reader import record_of
from sft_play.errors import TOKEN, CheckpointError, DataError, HardwareError, Problems, RetryableError, UserError
from sft_play.files import text_sha256
from sft_play.plan.calibration import Calibration
from sft_play.plan.hardware import Device
from sft_play.runs.manifest import SHARDED
from sft_play.runs.origin import code_sha256, torch_cuda, versions

OWN_CHOICE = frozenset({
    "launch.join_seconds", "launch.silent_seconds", "train.dataloader_num_workers", "train.dataloader_pin_memory",
})  # fmt: skip
"""Keys that each node may have its own way: none of them is seen by another."""
PLACES = ("model.name", "model.tokenizer", "data.")
"""Keys that may name a file by a path of this machine; their content is compared after the preparation."""
SECRET_KEY = re.compile(r"(?:hub_token|password|api_key)$")
LONGEST_VALUE = 120
"""Letters of a value that a message shows."""
KINDS: Mapping[int, type[UserError]] = {2: UserError, 3: HardwareError, 4: DataError, 5: CheckpointError, 75: RetryableError}


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """What a node says of itself when the nodes of a run meet."""

    rank: int
    """Of the node: `NODE_RANK`."""
    host: str
    num_nodes: int
    run: str
    resumed: bool
    """Whether it continues a run rather than starting one."""
    checkpoint: str | None
    """Name and manifest of the checkpoint that it continues from; `None` for the run's start."""
    command: Mapping[str, Any]
    """What was typed in addition to the configuration: command, DeepSpeed and FSDP settings."""
    config: Mapping[str, Any]
    """Key -> value, as text."""
    versions: Mapping[str, str]
    kind: str
    """`cpu` or `cuda`."""
    devices: tuple[Device, ...]
    """Of its ranks, in order."""
    measured: tuple[Calibration, ...] = ()
    """What `make bench` measured there on these devices, one for each of their names; without the links, which are that machine's own."""

    @property
    def name(self) -> str:
        """How messages call the node."""
        return f"node {self.rank} ({self.host})"

    def to_json(self) -> dict[str, Any]:
        """Returns what goes over the network."""
        return asdict(self)

    @staticmethod
    def from_json(value: Any) -> NodeFacts:
        """Returns the facts that another node sent. Raises `ValueError` for those of another version."""
        try:
            devices = tuple(
                Device(**{**one, "compute_capability": tuple(one["compute_capability"]) if one["compute_capability"] else None})
                for one in value["devices"]
            )
            measured = tuple(replace(record_of(one, Calibration), links={}) for one in value["measured"])
            return NodeFacts(**{**value, "devices": devices, "measured": measured})
        except (TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"not a node's facts: {error}") from None


def versions_here(kind: str) -> dict[str, str]:
    """Returns the versions that must be the same on every node: Python, packages, CUDA of torch's build, our own source."""
    found = dict(versions())
    found["python"] = ".".join(found["python"].split(".")[:2])
    if kind == "cuda":
        found["torch's CUDA"] = torch_cuda() or "none"
    return found | {"source of sft_play": code_sha256()[:12]}


def config_here(loaded: LoadedConfig) -> dict[str, str]:
    """Returns the configuration as it is compared: every key but those that each node may have its own way."""
    flat = {key: json.dumps(_placed(key, value)) for key, value in flatten(loaded).items() if key not in OWN_CHOICE}
    return {key: _hidden(key, text) for key, text in flat.items()}


def _hidden(key: str, text: str) -> str:
    """Returns a value that can be sent over the network and shown: of a secret only a few letters of its hash."""
    if text != "null" and (SECRET_KEY.search(key) or TOKEN.search(text)):
        return f"(not shown) {text_sha256(text)[:8]}"
    return text


def _placed(key: str, value: Any) -> Any:
    """Returns a value without the folders of this machine."""
    if not key.startswith(PLACES):
        return value
    if isinstance(value, str) and value.startswith(("/", "~")):
        return f".../{PurePosixPath(value).name}"
    if isinstance(value, Mapping):
        return {name: _placed(key, part) for name, part in value.items()}
    return [_placed(key, part) for part in value] if isinstance(value, list) else value


def disagreements(nodes: Sequence[NodeFacts]) -> list[UserError]:
    """Returns what is wrong with these nodes, all at once; compared with the first of them."""
    first = nodes[0]
    found: list[UserError] = []
    if len({node.num_nodes for node in nodes}) > 1:
        told = _told(nodes, lambda node: str(node.num_nodes))
        found.append(UserError(f"`NUM_NODES` is not the same on every node: {told}", hint="give every node the same NUM_NODES"))
    if len({node.run for node in nodes}) > 1:
        told = _told(nodes, lambda node: f"`{node.run}`")
        found.append(UserError(f"the nodes have different runs: {told}", hint="give every node the same RUN_NAME (or RUN)"))
    if len({node.resumed for node in nodes}) > 1:
        told = _told(nodes, lambda node: "continues the run" if node.resumed else "starts it")
        hint = "let RUNS_DIR be a folder that all machines share, or copy the run's folder from node 0 to the others"
        found.append(CheckpointError(f"some nodes start the run, others continue it: {told}", hint=hint))
    if len({node.kind for node in nodes}) > 1:
        told = _told(nodes, lambda node: "no GPU" if node.kind == "cpu" else f"{len(node.devices)} x {node.devices[0].name}")
        hint = "`make gpu-info` on each node; CUDA_VISIBLE_DEVICES= on all of them trains on CPUs"
        found.append(HardwareError(f"some nodes have GPUs and some have none: {told}", hint=hint))
    found += _apart(nodes, lambda node: node.versions, "versions differ", HardwareError, "install the same on every node")
    if not any(node.resumed for node in nodes):
        found += _apart(nodes, lambda node: node.command, "the command differs", UserError, "type the same command on every node")
    found += _apart(
        nodes, lambda node: node.config, "the configuration differs", UserError, "give every node the same file and variables"
    )
    if first.resumed and len({node.checkpoint for node in nodes}) > 1:
        found.append(_starts_apart(nodes))
    return found


def _starts_apart(nodes: Sequence[NodeFacts]) -> UserError:
    names = [node.checkpoint.split()[0] if node.checkpoint else "its start" for node in nodes]
    hint = "let RUNS_DIR be a folder that all machines share, or copy the run's `checkpoints/` from node 0 to the others"
    if len(set(names)) == 1:
        return CheckpointError(
            f"`{names[0]}` is not the same checkpoint on every node: {_told(nodes, lambda n: str(n.checkpoint))}", hint=hint
        )
    told = ", ".join(f"{node.name} from {name}" for node, name in zip(nodes, names, strict=True))
    return CheckpointError(f"the nodes would continue from different checkpoints: {told}", hint=hint)


def _apart(
    nodes: Sequence[NodeFacts], table: Callable[[NodeFacts], Mapping[str, Any]], what: str, kind: type[UserError], hint: str
) -> list[UserError]:
    """Returns one error with every key that differs, and its values."""
    first, lines = nodes[0], []
    for node in nodes[1:]:
        mine, theirs = table(first), table(node)
        for key in [*mine, *(name for name in theirs if name not in mine)]:
            if mine.get(key) != theirs.get(key):
                lines.append(f"`{key}` is {_value(mine.get(key))} on {first.name}, {_value(theirs.get(key))} on {node.name}")
    return [kind(f"{what}: {'; '.join(lines[:20])}{_more(lines)}", hint=hint)] if lines else []


def _more(lines: Sequence[str]) -> str:
    return f"; and {len(lines) - 20} more" if len(lines) > 20 else ""


def _value(text: Any) -> str:
    shown = "not there" if text is None else str(text)
    return f"`{shown if len(shown) <= LONGEST_VALUE else shown[: LONGEST_VALUE - 20] + ' ... ' + shown[-15:]}`"


def _told(nodes: Sequence[NodeFacts], word: Callable[[NodeFacts], str]) -> str:
    return ", ".join(f"{node.name}: {word(node)}" for node in nodes)


def data_apart(nodes: Sequence[NodeFacts], prepared: Sequence[Mapping[str, Any]]) -> list[UserError]:
    """Returns the error for nodes whose model or prepared data are not the same: name -> what it is, with its hash last."""
    tables = {node.rank: table for node, table in zip(nodes, prepared, strict=True)}
    hint = "bring the same files to every node (`data.sync` does it for `make train-cluster`), or let all read one shared folder"
    return _apart(nodes, lambda node: tables[node.rank], "nodes prepared different data", DataError, hint)


def folders_apart(apart: Sequence[NodeFacts], *, strategy: str, save_strategy: str) -> list[UserError]:
    """Returns the error for nodes that do not see node 0's run folder, where no checkpoint could be complete."""
    if not apart or strategy not in SHARDED or save_strategy == "no":
        return []
    names, verb = ", ".join(node.name for node in apart), "does" if len(apart) == 1 else "do"
    return [CheckpointError(
        f"under {strategy} every machine writes a part of each checkpoint, and {names} {verb} not see the run folder of node 0",
        hint="let RUNS_DIR be a folder that all machines share, or take `make train-distributed` with `launch.strategy: ddp`, or set"
        " `train.save_strategy: no`",
    )]  # fmt: skip


def errors_to_json(errors: Sequence[UserError]) -> list[dict[str, Any]]:
    """Returns errors as they go over the network, several problems one by one."""
    flat = [one for error in errors for one in (error.problems if isinstance(error, Problems) else (error,))]
    return [{"code": e.exit_code, "message": e.message, "place": e.place, "hint": e.hint} for e in flat]


def errors_from_json(value: Any) -> list[UserError]:
    """Returns the errors that another node sent. Raises `ValueError` for anything else."""
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise ValueError("no errors")
    found = []
    for one in value[:40]:
        words = [one.get("place"), one.get("hint")]
        if not isinstance(one.get("message"), str) or not all(isinstance(word, str | None) for word in words):
            raise ValueError("not an error")
        kind = KINDS.get(one["code"] if type(one.get("code")) is int else 75, RetryableError)
        found.append(kind(one["message"][:20_000], place=words[0], hint=words[1]))
    return found
