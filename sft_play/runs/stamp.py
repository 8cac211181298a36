"""The stamp: what made a run or a checkpoint. Resume, merge, infer and eval compare it before they load anything."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from sft_play import __version__
from sft_play.config.schema import Config
from sft_play.errors import CheckpointError
from sft_play.files import read_json, write_json
from sft_play.runs.prepared import Prepared

Purpose = Literal["resume", "merge", "infer", "eval"]
Verdict = Literal["refuse", "warn", "allow"]

PACKAGES = ("torch", "transformers", "peft", "accelerate", "deepspeed", "bitsandbytes", "datasets")
NAME = "stamp.json"


class PlanFacts(Protocol):
    """What a stamp keeps of a plan (`sft_play.plan.plan.Plan`, which is a layer above)."""

    @property
    def precision(self) -> str: ...
    @property
    def weights_dtype(self) -> str: ...
    @property
    def global_batch_size(self) -> int: ...
    @property
    def strategy(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def recoveries(self) -> Sequence[Mapping[str, Any]]: ...


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
    step: int = 0
    """Optimizer steps behind these weights; never compared."""

    def save(self, folder: Path) -> None:
        """Writes `stamp.json` into `folder`."""
        write_json(folder / NAME, asdict(self))

    @staticmethod
    def load(folder: Path) -> Stamp:
        """Reads the stamp of a run, checkpoint or model. Raises `CheckpointError` when there is none."""
        path = folder / NAME
        try:
            value = read_json(path)
            # A stamp of an earlier version lacks the fields that have a default.
            known = {item.name for item in fields(Stamp) if item.default is MISSING or item.name in value}
            stamp = Stamp(**{name: value[name] for name in known})
            return replace(stamp, recoveries=tuple(stamp.recoveries))
        except FileNotFoundError:
            raise CheckpointError("there is no stamp, so what made it is unknown", place=str(path)) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"the stamp cannot be read: {error}", place=str(path)) from error


def make_stamp(config: Config, plan: PlanFacts, prepared: Prepared) -> Stamp:
    """Returns the stamp of a run, from what is known before it starts."""
    tuning, adapters = config.tuning, config.tuning.mode != "full"
    lora = tuning.lora
    return Stamp(
        backend=tuning.backend,
        mode=tuning.mode,
        quantization=tuning.quantization if tuning.mode == "qlora" else "none",
        base_model=prepared.model.name,
        base_revision=prepared.model.revision,
        base_fingerprint=prepared.model.fingerprint,
        tokenizer_fingerprint=prepared.model.tokenizer_fingerprint,
        lora={"r": lora.r, "alpha": lora.alpha, "dropout": lora.dropout, "target_modules": lora.target_modules}
        if adapters
        else None,
        max_seq_len=config.model.max_seq_len,
        precision=plan.precision,
        weights_dtype=plan.weights_dtype,
        train_data=prepared.train.fingerprint if prepared.train else None,
        validation_data=prepared.validation.fingerprint if prepared.validation else None,
        seed=config.train.seed,
        global_batch_size=plan.global_batch_size,
        strategy=plan.strategy,
        world_size=plan.world_size,
        versions=_versions(),
        mixture=_mixture(config, prepared),
        recoveries=tuple(plan.recoveries),
    )


def _mixture(config: Config, prepared: Prepared) -> dict[str, Any] | None:
    sources = prepared.train.sources if prepared.train else ()
    if not any(source.weight for source in sources):
        return None
    weights = [source.weight for source in sources]
    return {"weights": weights, "mix_by": config.data.mix_by, "exhausted": config.data.exhausted}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "sft_play": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


@dataclass(frozen=True, slots=True)
class Rule:
    """What a difference in one field means for each purpose, and what to do about it."""

    resume: Verdict
    merge: Verdict
    infer: Verdict
    eval: Verdict
    advice: str


RULES: Mapping[str, Rule] = {
    "backend": Rule("refuse", "refuse", "refuse", "refuse", "use the `tuning.backend` that made it, or start a new run"),
    "mode": Rule("refuse", "refuse", "refuse", "refuse", "use the `tuning.mode` that made it, or start a new run"),
    "quantization": Rule("refuse", "warn", "warn", "warn", "use the `tuning.quantization` that made it"),
    "base_model": Rule("refuse", "warn", "warn", "warn", "set `model.name` to the model that it was made from"),
    "base_revision": Rule("refuse", "warn", "warn", "warn", "set `model.revision` to the commit that it was made from"),
    "base_fingerprint": Rule("refuse", "refuse", "refuse", "refuse", "the base model's files have changed: restore them"),
    "tokenizer_fingerprint": Rule(
        "refuse", "refuse", "refuse", "refuse", "the tokenizer or its chat template has changed: restore it"
    ),
    "lora": Rule("refuse", "refuse", "refuse", "refuse", "use the adapter shape that made it, or start a new run"),
    "max_seq_len": Rule("refuse", "allow", "allow", "allow", "set `model.max_seq_len` back"),
    "precision": Rule("warn", "allow", "allow", "allow", "losses will differ in the last digits"),
    "weights_dtype": Rule("warn", "allow", "allow", "allow", "losses will differ in the last digits"),
    "train_data": Rule("refuse", "allow", "allow", "allow", "the training rows have changed: restore them, or start a new run"),
    "validation_data": Rule("warn", "allow", "allow", "allow", "scores before and after do not compare"),
    "mixture": Rule(
        "refuse", "allow", "allow", "allow", "the row order would change: set weights, `data.mix_by` and `data.exhausted` back"
    ),
    "seed": Rule("refuse", "allow", "allow", "allow", "the row order would change: set `train.seed` back"),
    "global_batch_size": Rule(
        "refuse", "allow", "allow", "allow", "every update would change: set `train.global_batch_size` back"
    ),
    "strategy": Rule("refuse", "allow", "allow", "allow", "use the command that started the run: its states are laid out for it"),
    "world_size": Rule("refuse", "allow", "allow", "allow", "resume with as many processes as before (`NUM_GPUS`)"),
    "versions": Rule("warn", "warn", "allow", "allow", "install the pinned versions with `make install`"),
    "recoveries": Rule("allow", "allow", "allow", "allow", "nothing: how a batch is divided changes no update"),
}
"""The table: field of `Stamp` -> verdicts. `docs/checkpoints.md` shows it; a test compares the two."""


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
    """Returns the fields that differ and matter for `purpose`, refusals first."""
    found = []
    for name, rule in RULES.items():
        before, after = getattr(old, name), getattr(new, name)
        verdict: Verdict = getattr(rule, purpose)
        if before != after and verdict != "allow":
            if isinstance(before, Mapping) and isinstance(after, Mapping):
                before, after = _changed(before, after), _changed(after, before)
            found.append(Difference(name, before, after, verdict, rule.advice))
    return sorted(found, key=lambda difference: difference.verdict != "refuse")


def refuse(differences: Sequence[Difference], what: str) -> list[str]:
    """Returns warnings to print. Raises `CheckpointError` naming every field that forbids it."""
    refused = [difference for difference in differences if difference.verdict == "refuse"]
    if refused:
        raise CheckpointError(
            f"{what} was made by something else: " + "; ".join(str(difference) for difference in refused),
            hint="start a new run for what is new; the old one is unchanged",
        )
    return [f"note: {difference}" for difference in differences]


def _changed(part: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if other.get(name) != value}


def _short(value: Any) -> str:
    text = ", ".join(f"{name} {inner}" for name, inner in value.items()) if isinstance(value, Mapping) else str(value)
    return f"`{text[:16]}...`" if len(text) == 64 else f"`{text}`"
