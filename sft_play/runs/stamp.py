"""The stamp: the facts that determine a run or a checkpoint, compared by resume, merge, infer and eval before they load
weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from sft_play.config.reader import misfit, required_fields
from sft_play.config.schema import Config, needs_own_word
from sft_play.errors import CheckpointError, safe_text
from sft_play.files import read_json, write_json
from sft_play.runs.prepared import HUB

Purpose = Literal["resume", "merge", "infer", "eval"]
Verdict = Literal["refuse", "warn", "allow"]

NAME = "stamp.json"
MADE = "made"
"""Source of a base that preparation created, with a merged adapter or new tokens, and how its folder's name begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """Facts of a run, written into its folder, every checkpoint and the published model."""

    backend: str
    mode: str
    quantization: str
    base_model: str
    base_revision: str | None
    base_fingerprint: str
    tokenizer_fingerprint: str
    lora: Mapping[str, Any] | None
    """Rank, alpha, dropout and targets; `None` for full tuning."""
    max_seq_len: int
    precision: str
    weights_dtype: str
    train_data: str | None
    validation_data: str | None
    seed: int
    global_batch_size: int
    strategy: str
    world_size: int
    versions: Mapping[str, str]
    mixture: Mapping[str, Any] | None = None
    """Weights of the training sources and their unit; `None` if every row is used once per epoch."""
    recoveries: Sequence[Mapping[str, Any]] = ()
    """Changes made because memory ran out, oldest first."""
    optimizer: str | None = None
    """Optimizer family with the same states: `adamw_torch` for `adamw_torch_fused` too."""
    parent: Mapping[str, Any] | None = None
    """The adapter that the run started from, and whether it was trained further or merged into the base."""
    template: str | None = None
    """sha256 of a conversation as the chat template writes it; `None` without a template."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the plan that affect the last digits: layout, kernels, division of a batch."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key -> value of the fixed part of a run's configuration; empty in a stamp of an earlier version."""
    data_files: Mapping[str, str | None] = field(default_factory=dict)
    """`train:NAME` or `validation:NAME` -> sha256 over the source's files; `None` for a hub or built-in data set."""
    code: str | None = None
    """sha256 over the source of SFT-Play."""
    git: Mapping[str, Any] | None = None
    """Commit of the working folder, whether it was dirty, and a sha256 of its diff; `None` without git."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """System, processor, devices, driver, CUDA."""
    step: int = 0
    """Optimizer steps of these weights; never compared."""

    @property
    def public_base(self) -> tuple[str, bool]:
        """The base model's name without local folders, of a run's model with the run's, and whether it is a hub id."""
        name, path = self.base_model, Path(self.base_model)
        on_hub = name.count("/") == 1 and name[0] not in "./~" and not path.exists()
        of_run = (path.parent / "plan.json").is_file()
        of_folder = path.parent.name if path.name == "model" else f"{path.parent.name}-{path.name}"
        return name if on_hub else of_folder if of_run else path.name, on_hub

    def save(self, folder: Path) -> None:
        """Write `stamp.json` into `folder`."""
        write_json(folder / NAME, asdict(self))

    @staticmethod
    def load(folder: Path) -> Stamp:
        """Read the stamp of a run, checkpoint or model. Raise `CheckpointError` if there is none."""
        path = folder / NAME
        try:
            value = read_json(path, follow=False)
            if (key := misfit(value, Stamp)) is not None:
                raise ValueError(f"`{key}` is of another type")
            # A stamp of an earlier version lacks the fields that have a default.
            names = {item.name for item in fields(Stamp)} & dict(value).keys()
            stamp = Stamp(**{name: value[name] for name in names.union(required_fields(Stamp))})
            return replace(stamp, recoveries=tuple(stamp.recoveries))
        except FileNotFoundError:
            raise CheckpointError("there is no stamp, so what made it is unknown", place=str(path)) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"the stamp cannot be read: {error}", place=str(path)) from error


def own_stamp(folder: Path) -> Stamp | None:
    """Return the stamp of an adapter's folder, or `None` for an adapter from elsewhere: one without a stamp, or in the
    hub's cache, whose files are links and whose stamp names a model on another machine.
    """
    path = folder / NAME
    return Stamp.load(folder) if path.is_file() and not path.is_symlink() else None


@dataclass(frozen=True, slots=True)
class Rule:
    """The verdict on a difference in one field for each purpose, and advice."""

    resume: Verdict
    advice: str
    merge: Verdict = "allow"
    infer: Verdict = "allow"
    eval: Verdict = "allow"


RULES: Mapping[str, Rule] = {
    "backend": Rule(
        "refuse", "use the `tuning.backend` that made it, or start a new run", "refuse", "refuse", "refuse"
    ),
    "mode": Rule("refuse", "use the `tuning.mode` that made it, or start a new run", "refuse", "refuse", "refuse"),
    "quantization": Rule("refuse", "use the `tuning.quantization` that made it", "warn", "warn", "warn"),
    "base_model": Rule("refuse", "set `model.name` to the model that it was made from", "warn", "warn", "warn"),
    "base_revision": Rule("refuse", "set `model.revision` to the commit that it was made from", "warn", "warn", "warn"),
    "base_fingerprint": Rule(
        "refuse", "the base model's files have changed: restore them", "refuse", "refuse", "refuse"
    ),
    "tokenizer_fingerprint": Rule(
        "refuse", "the tokenizer or its chat template has changed: restore it", "refuse", "refuse", "refuse"
    ),
    "lora": Rule("refuse", "use the adapter shape that made it, or start a new run", "refuse", "refuse", "refuse"),
    "parent": Rule("refuse", "the adapter that the run started from has changed: restore it, or start a new run"),
    "max_seq_len": Rule("refuse", "set `model.max_seq_len` back"),
    "precision": Rule("warn", "losses will differ in the last digits"),
    "weights_dtype": Rule("warn", "losses will differ in the last digits"),
    "train_data": Rule("refuse", "the training rows have changed: restore them, or start a new run"),
    "validation_data": Rule("warn", "scores before and after do not compare"),
    "mixture": Rule("refuse", "the row order would change: set weights, `data.mix_by` and `data.exhausted` back"),
    "seed": Rule("refuse", "the row order would change: set `train.seed` back"),
    "global_batch_size": Rule("refuse", "every update would change: set `train.global_batch_size` back"),
    "strategy": Rule("warn", "losses will differ in the last digits; the states are rearranged"),
    "world_size": Rule(
        "warn", "losses will differ in the last digits, with dropout by its draws; the states are rearranged"
    ),
    "versions": Rule("warn", "install the pinned versions with `make install`, Unsloth's with `make install-unsloth`"),
    "recoveries": Rule("allow", "nothing: how a batch is divided changes no update"),
    "optimizer": Rule("refuse", "its states are of another kind: set `train.optim` to the one before"),
    "template": Rule(
        "warn", "the chat template writes conversations otherwise: look for its change", "warn", "warn", "warn"
    ),
    "plan": Rule("allow", "losses may differ in the last digits"),
    "settings": Rule("refuse", "a run keeps its configuration: restore these keys of `config.json`"),
    "data_files": Rule("allow", "nothing while `train_data`, the rows made from them, is the same"),
    "code": Rule("warn", "another version of SFT-Play continues this run"),
    "git": Rule("allow", "nothing: it says where configuration and data came from"),
    "machine": Rule("warn", "losses will differ in the last digits"),
}
"""Field of `Stamp` -> verdicts. `docs/checkpoints.md` shows the table; a test compares the two."""

LATER = frozenset({"optimizer", "template", "plan", "settings", "data_files", "code", "machine"})
"""Fields that are not compared if they are empty, as in an earlier version's stamp or without such rows."""


@dataclass(frozen=True, slots=True)
class StampDifference:
    """A field in which two stamps differ."""

    field: str
    old: Any
    new: Any
    verdict: Verdict
    advice: str

    def __str__(self) -> str:
        return f"`{self.field}` was {_short(self.old)} and is {_short(self.new)}: {self.advice}"


def compare(old: Stamp, new: Stamp, purpose: Purpose) -> list[StampDifference]:
    """Return the fields that differ and matter for `purpose`, refusals first."""
    differences = []
    for name, rule in RULES.items():
        before, after = getattr(old, name), getattr(new, name)
        if name == "versions":
            # No difference is a package that an earlier version did not record, nor an upgrade of this program.
            before = {package: version for package, version in before.items() if package != "sft_play"}
            after = {package: version for package, version in after.items() if package in before}
        if name in ("settings", "lora") and before and after:  # nor is a key that only one of the versions has
            before, after = _shared(before, after), _shared(after, before)
            before, after = (
                {key: _fixed_extra(part) if key == EXTRA else part for key, part in settings.items()}
                for settings in (before, after)
            )
        if name == "machine":  # the number of its devices is `world_size`
            before, after = (
                facts and {**facts, "devices": [str(device).partition(" x ")[2] for device in facts.get("devices", ())]}
                for facts in (before, after)
            )
        if name == "base_model":  # one that was made may be in another cache
            before, after = (Path(base).name if f"/{MADE}-" in base else base for base in (before, after))
        verdict: Verdict = getattr(rule, purpose)
        if before != after and verdict != "allow" and not (name in LATER and not (before and after)):
            if isinstance(before, Mapping) and isinstance(after, Mapping):
                before, after = _changed(before, after), _changed(after, before)
            advice = rule.advice + (_commits(old, new) if name == "train_data" else "")
            if name == "world_size" and new.settings.get("launch.local_steps", 1) > 1:
                advice = "with `launch.local_steps` each number of processes trains otherwise, one without local steps"
            differences.append(StampDifference(name, before, after, verdict, advice))
    return sorted(differences, key=lambda difference: difference.verdict != "refuse")


def refuse(differences: Sequence[StampDifference], what: str) -> list[str]:
    """Return warnings to print. Raise `CheckpointError` naming every field that forbids it."""
    refused = [difference for difference in differences if difference.verdict == "refuse"]
    if refused:
        raise CheckpointError(
            f"{what} does not match: " + "; ".join(str(difference) for difference in refused),
            hint="start a new run (RUN_NAME=...); MODEL_ADAPTER= or MODEL_NAME= starts it from these weights"
            " (docs/checkpoints.md#resume); the old run is unchanged",
        )
    return [f"note: {safe_text(str(difference))}" for difference in differences]


def _shared(part: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name in other}


def _changed(part: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if other.get(name) != value}


def _commits(old: Stamp, new: Stamp) -> str:
    """Return which hub data sets were read at another commit and how to read that one, or an empty string."""
    before, after = old.data_files or {}, new.data_files or {}
    moved = {
        name: content
        for name, content in before.items()
        if (content or "").startswith(HUB) and after.get(name) != content
    }
    commits = [
        f"`{name.partition(':')[2]}` was read from the hub at the commit `{content[len(HUB) :]}`"
        for name, content in moved.items()
        if content
    ]
    return f" ({'; '.join(commits)}: set the `revision` of that source to it)" if commits else ""


def _short(value: Any) -> str:
    text = ", ".join(f"{name} {inner}" for name, inner in value.items()) if isinstance(value, Mapping) else str(value)
    return f"`{text[:16]}...`" if len(text) == 64 else f"`{text}`"


# A stamp contains the keys of the configuration that are fixed for a run; a resume may change only the others.


CHANGEABLE = frozenset({
    "train.max_steps", "train.epochs", "train.save_strategy", "train.save_steps", "train.save_total_limit",
    "train.logging_steps", "train.eval_strategy", "train.eval_steps", "train.dataloader_num_workers",
    "train.dataloader_pin_memory", "train.batch_size", "train.grad_accum", "train.gradient_checkpointing",
    "train.activation_offload", "eval.batch_size", "train.async_save", "train.kernels", "train.profile",
    "launch.timeout_seconds", "launch.max_oom_retries", "launch.hang_seconds", "launch.max_restarts",
    "launch.auto_resume", "launch.balance", "launch.join_seconds", "launch.network", "launch.silent_seconds",
    "launch.slow_network", "launch.sequence_parallel", "launch.stages", "launch.tensor_parallel", "launch.notify",
})  # fmt: skip
"""Keys that a resumed run may change, since they do not affect past updates."""
STAMPED = ("model.", "tuning.", "data.", "train.seed", "train.global_batch_size", "launch.strategy")
"""Keys with separate fields in the stamp, whose comparison gives a better message."""
SECTIONS, EXTRA = ("train", "eval", "launch"), "train.extra"
"""Sections whose other keys a stamp contains individually."""
AS_PLANNED = frozenset({"train.packing"})
"""Keys that a repeated run gets as the plan decided them (`make stamp`, `run it again`); the stamp contains the plan's
facts.
"""


def fixed_settings(config: Config) -> dict[str, Any]:
    """Return dotted key -> JSON value of the fixed keys without a separate field in the stamp."""
    settings: dict[str, Any] = {}
    for name in SECTIONS:
        section = getattr(config, name)
        for item in fields(section):
            key = f"{name}.{item.name}"
            if key not in CHANGEABLE | AS_PLANNED and not key.startswith(STAMPED):
                value = getattr(section, item.name)
                settings[key] = json.loads(json.dumps(_fixed_extra(value) if item.name == "extra" else value))
    return settings


def _fixed_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return further `TrainingArguments` without those that are never taken from a run's folder, so that a resume may
    change trackers.
    """
    return {name: value for name, value in extra.items() if not needs_own_word(f"train.{name}")}
