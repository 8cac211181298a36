"""The stamp: what made a run or a checkpoint. Resume, merge, infer and eval compare it before they load anything."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """Facts of a run; written into its folder, every checkpoint and the published model."""

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
    """Weights of the training sources and what they mean; `None` where every row comes once an epoch."""
    recoveries: Sequence[Mapping[str, Any]] = ()
    """What was changed because memory ran out, oldest first."""
    optimizer: str | None = None
    """Family of the optimizer, by what its states are: `adamw_torch` for `adamw_torch_fused` too."""
    parent: Mapping[str, Any] | None = None
    """The adapter that the run started from, and whether it was trained on or merged into the base."""
    template: str | None = None
    """sha256 of a conversation as the chat template writes it; `None` where rows have no template."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the plan that make the last digits: layout, kernels, how a batch is divided."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key -> value of the configuration that a run keeps (`runs.stamp`); empty in a stamp of an earlier version.
    """
    data_files: Mapping[str, str | None] = field(default_factory=dict)
    """`train:NAME` or `validation:NAME` -> sha256 over the source's files; `None` for a hub data set or a built-in one.
    """
    code: str | None = None
    """sha256 over the source of SFT-Play."""
    git: Mapping[str, Any] | None = None
    """Commit of the working folder, whether it was dirty, and a sha256 of its diff; `None` where there is no git."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """System, processor, devices, driver, CUDA."""
    step: int = 0
    """Optimizer steps behind these weights; never compared."""

    @property
    def public_base(self) -> tuple[str, bool]:
        """The base model's name without this machine's folders, and whether it is the hub's."""
        name = self.base_model
        on_hub = name.count("/") == 1 and name[0] not in "./~" and not Path(name).exists()
        return name if on_hub else Path(name).name, on_hub

    def save(self, folder: Path) -> None:
        """Write `stamp.json` into `folder`."""
        write_json(folder / NAME, asdict(self))

    @staticmethod
    def load(folder: Path) -> Stamp:
        """Read the stamp of a run, checkpoint or model. Raise `CheckpointError` when there is none."""
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


@dataclass(frozen=True, slots=True)
class Rule:
    """What a difference in one field means for each purpose, and what to do about it."""

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
    "versions": Rule(
        "warn", "install the pinned versions with `make install`, Unsloth's with `make install-unsloth`", "warn"
    ),
    "recoveries": Rule("allow", "nothing: how a batch is divided changes no update"),
    "optimizer": Rule("refuse", "its states are of another kind: set `train.optim` to the one before"),
    "template": Rule(
        "warn", "the chat template writes conversations otherwise: look for its change", "warn", "warn", "warn"
    ),
    "plan": Rule("allow", "losses may differ in the last digits"),
    "settings": Rule("refuse", "a run keeps its configuration: put these keys of `config.json` back"),
    "data_files": Rule("allow", "nothing while `train_data`, the rows made from them, is the same"),
    "code": Rule("warn", "another version of SFT-Play continues this run"),
    "git": Rule("allow", "nothing: it says where configuration and data came from"),
    "machine": Rule("warn", "losses will differ in the last digits"),
}
"""The table: field of `Stamp` -> verdicts. `docs/checkpoints.md` shows it; a test compares the two."""

LATER = frozenset({"optimizer", "template", "plan", "settings", "data_files", "code", "machine"})
"""Fields that a stamp of an earlier version, or one of a run without such rows, leaves empty: nothing is said about
those.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two stamps differ."""

    field: str
    old: Any
    new: Any
    verdict: Verdict
    advice: str

    def __str__(self) -> str:
        return f"`{self.field}` was {_short(self.old)} and is {_short(self.new)}: {self.advice}"


def compare(old: Stamp, new: Stamp, purpose: Purpose) -> list[Difference]:
    """Return the fields that differ and matter for `purpose`, refusals first."""
    differences = []
    for name, rule in RULES.items():
        before, after = getattr(old, name), getattr(new, name)
        if name == "versions":  # a package that an earlier SFT-Play did not write down is no difference
            after = {package: version for package, version in after.items() if package in before}
        if name in ("settings", "lora") and before and after:  # nor is a key that only one of the two versions knows
            before, after = _shared(before, after), _shared(after, before)
            before, after = (
                {key: _kept(part) if key == EXTRA else part for key, part in settings.items()}
                for settings in (before, after)
            )
        verdict: Verdict = getattr(rule, purpose)
        if before != after and verdict != "allow" and not (name in LATER and not (before and after)):
            if isinstance(before, Mapping) and isinstance(after, Mapping):
                before, after = _changed(before, after), _changed(after, before)
            advice = rule.advice + (_commits(old, new) if name == "train_data" else "")
            differences.append(Difference(name, before, after, verdict, advice))
    return sorted(differences, key=lambda difference: difference.verdict != "refuse")


def refuse(differences: Sequence[Difference], what: str) -> list[str]:
    """Return warnings to print. Raise `CheckpointError` naming every field that forbids it."""
    refused = [difference for difference in differences if difference.verdict == "refuse"]
    if refused:
        raise CheckpointError(
            f"{what} was made by something else: " + "; ".join(str(difference) for difference in refused),
            hint="start a new run for what is new; the old one is unchanged",
        )
    return [f"note: {safe_text(str(difference))}" for difference in differences]


def _shared(part: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name in other}


def _changed(part: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if other.get(name) != value}


def _commits(old: Stamp, new: Stamp) -> str:
    """Return which data sets of the hub were read at another commit, and how to have that again; empty where none
    was.
    """
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


# The keys of a configuration that a run keeps to its end: a stamp holds their values, and a resume may change only the
# others.


CHANGEABLE = frozenset({
    "train.max_steps", "train.epochs", "train.save_strategy", "train.save_steps", "train.save_total_limit",
    "train.logging_steps", "train.eval_strategy", "train.eval_steps", "train.dataloader_num_workers",
    "train.dataloader_pin_memory", "train.batch_size", "train.grad_accum", "train.gradient_checkpointing",
    "eval.batch_size", "train.async_save", "train.kernels", "train.profile", "train.spike_guard", "train.spike_factor",
    "launch.timeout_seconds", "launch.max_oom_retries", "launch.hang_seconds", "launch.max_restarts",
    "launch.auto_resume", "launch.balance", "launch.join_seconds", "launch.network", "launch.silent_seconds", "launch.slow_network",
    "launch.sequence_parallel", "launch.stages", "launch.tensor_parallel", "launch.notify",
})  # fmt: skip
"""Keys that a resumed run may change: none of them changes an update that has been made."""
STAMPED = ("model.", "tuning.", "data.", "train.seed", "train.global_batch_size", "launch.strategy")
"""Keys that the stamp holds in fields of their own: comparing those gives the better message."""
SECTIONS, EXTRA = ("train", "eval", "launch"), "train.extra"
"""Sections whose other keys a stamp holds one by one."""
AS_PLANNED = frozenset({"train.packing"})
"""Keys that a repeated run is given as the plan decided them (`make stamp`, `run it again`); the plan's facts are in
the stamp.
"""


def kept_settings(config: Config) -> dict[str, Any]:
    """Return dotted key -> value, as JSON has it, of what a run keeps and no other field of its stamp holds."""
    settings: dict[str, Any] = {}
    for name in SECTIONS:
        section = getattr(config, name)
        for item in fields(section):
            key = f"{name}.{item.name}"
            if key not in CHANGEABLE | AS_PLANNED and not key.startswith(STAMPED):
                value = getattr(section, item.name)
                settings[key] = json.loads(json.dumps(_kept(value) if item.name == "extra" else value))
    return settings


def _kept(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return further `TrainingArguments` without those that no run's folder gives: a resume may name another tracker,
    or none.
    """
    return {name: value for name, value in extra.items() if not needs_own_word(f"train.{name}")}
