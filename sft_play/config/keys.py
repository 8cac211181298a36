"""Every key of the configuration with its type, range, default, documentation and variable name, and the keys that are
refused.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from sft_play.config import schema
from sft_play.config.reader import Range, fields_of
from sft_play.config.yaml_files import YamlNode, wrap

TABLE = Path(__file__).with_name("training_arguments.json")
RANGES: Mapping[str, Range] = {
    "adam_beta1": Range(minimum=0, below=1),
    "adam_beta2": Range(minimum=0, below=1),
    "adam_epsilon": Range(above=0),
    "neftune_noise_alpha": Range(minimum=0),
    "torch_empty_cache_steps": Range(minimum=1),
    "eval_delay": Range(minimum=0),
    "dataloader_prefetch_factor": Range(minimum=1),
}
"""Ranges of further fields of `TrainingArguments`; those of the schema's keys are in the schema."""
TYPES: Mapping[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "dict": dict,
    "list[str]": list[str],
    "null": type(None),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A key, such as `train.learning_rate`."""

    name: str
    annotation: Any
    """Type and range."""
    default: Any
    help: str


def variable_name(key: str) -> str:
    """Return the variable of a dotted key."""
    return key.replace(".", "_").upper()


@functools.cache
def sections() -> Mapping[str, type]:
    """Return dotted section -> its dataclass: `tuning.lora` -> `LoraSettings`; the root is ``."""
    records: dict[str, type] = {}

    def walk(record: type, name: str) -> None:
        records[name] = record
        for field, annotation in fields_of(record).items():
            if dataclasses.is_dataclass(annotation):
                walk(cast(type, annotation), f"{name}.{field}" if name else field)

    walk(schema.Config, "")
    return records


@functools.cache
def schema_keys() -> Mapping[str, Key]:
    """Return the keys of the schema, in its order, without `help`, which would need a parse of the source."""
    keys = {}
    for section, record in sections().items():
        hints = fields_of(record)
        for field in dataclasses.fields(record):
            name = f"{section}.{field.name}" if section else field.name
            if name in sections() or name == "train.extra":
                continue
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            keys[name] = Key(name=name, annotation=_with_choices(name, hints[field.name]), default=default, help="")
    return keys


def _with_choices(name: str, annotation: Any) -> Any:
    """Restrict `train.optim` and `train.lr_scheduler_type` to words that the pinned transformers takes, and ours."""
    if name == "train.optim":
        return _words([*table()["optim"]["choices"], "auto", "muon"])
    if name == "train.lr_scheduler_type":
        return _words(table()["lr_scheduler_type"]["choices"])
    return annotation


def _words(words: list[str]) -> Any:
    return cast(Any, Literal)[tuple(words)]


@functools.cache
def table() -> Mapping[str, Any]:
    """Return the fields of the pinned `TrainingArguments`: type, default, choices, help."""
    return cast(Mapping[str, Any], json.loads(TABLE.read_text(encoding="utf-8"))["fields"])


@functools.cache
def extra_keys() -> Mapping[str, Key]:
    """Return the further fields of `TrainingArguments` that `train.` takes."""
    keys = {}
    for field, row in table().items():
        name = f"train.{field}"
        if name in schema_keys() or field in REFUSED:
            continue
        parts = [TYPES[kind] for kind in row["type"]] + ([_words(row["choices"])] if "choices" in row else [])
        keys[name] = Key(
            name=name,
            annotation=Annotated[functools.reduce(operator.or_, parts), RANGES.get(field, Range())],
            default=row["default"],
            help=row["help"],
        )
    return keys


def find_key(name: str) -> Key | None:
    """Return the key of a dotted name, or `None`."""
    return schema_keys().get(name) or extra_keys().get(name)


@functools.cache
def variables() -> Mapping[str, str]:
    """Return variable -> dotted key for every key, including refused keys, whose reason is then reported."""
    names = [*schema_keys(), *extra_keys(), *(f"train.{field}" for field in REFUSED)]
    return {variable_name(name): name for name in names}


def as_meant(key: str, node: YamlNode) -> YamlNode:
    """Translate a value that other tools take for this key: `packing: true`, `target_modules: all-linear` or
    `q_proj,v_proj`.
    """
    if key in ("train.packing", "train.activation_offload") and isinstance(node.value, bool):
        return YamlNode("on" if node.value else "off", line=node.line)
    if key == "tuning.lora.target_modules" and isinstance(node.value, str):
        modules = [name.strip() for name in node.value.split(",") if name.strip()]
        if modules in (["all-linear"], ["all"], ["auto"]):
            return YamlNode("auto", line=node.line)
        return wrap(modules, node.line) if modules else node
    return node


# Fields of `TrainingArguments` that are refused, with what to use in their place.


ROW_ORDER = "`train.seed` fixes the order of rows for any number of processes"
COMMAND = "the command decides this"
SCORES = "evaluation is token-weighted over all ranks, with the scores of `make eval`"

TRACKERS = "trackers read their own variables, such as `export WANDB_PROJECT=...` (docs/watching.md)"

RENAMED = "it is named differently here"
REFUSED: Mapping[str, tuple[str | None, str]] = {
    "output_dir": ("RUN_NAME", "a run's files are in `runs/RUN_NAME/`, and `RUNS_DIR` moves `runs/`"),
    "per_device_train_batch_size": ("train.batch_size", RENAMED),
    "per_device_eval_batch_size": ("eval.batch_size", RENAMED),
    "num_train_epochs": ("train.epochs", RENAMED),
    "gradient_accumulation_steps": ("train.grad_accum", RENAMED),
    "activation_checkpointing": ("train.gradient_checkpointing", RENAMED),
    **dict.fromkeys(
        ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
        ("train.gradient_checkpointing", "the plan decides how activations are recomputed"),
    ),
    "auto_find_batch_size": (
        "train.batch_size",
        "it would change the global batch; `auto` finds what fits and keeps it",
    ),
    "average_tokens_across_devices": (None, "it is always on: the loss is exact over all tokens of the global batch"),
    "use_cache": (None, "it is off in training and on when answers are generated"),
    "bf16_full_eval": ("train.bf16", "evaluation computes as training does"),
    "fp16_full_eval": ("train.fp16", "evaluation computes as training does"),
    "log_on_each_node": (None, "every rank has its log; rank 0 writes to the console"),
    "prediction_loss_only": ("train.predict_with_generate", SCORES),
    **dict.fromkeys(("eval_use_gather_object", "include_for_metrics", "batch_eval_metrics"), (None, SCORES)),
    "logging_nan_inf_filter": (None, "a loss that is not a number stops the run"),
    **dict.fromkeys(("dataloader_in_order", "train_sampling_strategy", "length_column_name"), (None, ROW_ORDER)),
    "dataloader_multiprocessing_context": (None, "workers start as torch starts them on this system"),
    **dict.fromkeys(
        ("save_only_model", "enable_jit_checkpoint"),
        (None, "a checkpoint is always complete, so that a run can be resumed"),
    ),
    "save_on_each_node": (None, "rank 0 writes to the run folder"),
    **dict.fromkeys(
        ("push_to_hub", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
        (None, "nothing is uploaded while training; `make push RUN=name REPO=owner/name` does it afterwards"),
    ),
    "hub_token": (None, "give the token as the environment variable `HF_TOKEN`, which is not kept in the run folder"),
    "ignore_data_skip": (None, "a resumed run continues with the next row"),
    "restore_callback_states_from_checkpoint": (None, "a resumed run gives the same losses as an uninterrupted one"),
    "data_seed": ("train.seed", ROW_ORDER),
    "optim_target_modules": ("train.optim", "it is for optimizers whose states no checkpoint here can contain"),
    "use_cpu": (None, "hide GPUs with `CUDA_VISIBLE_DEVICES=`"),
    "use_liger_kernel": ("train.kernels", "it would also replace the loss, which is computed in chunks here"),
    "liger_kernel_config": ("train.kernels", "the kernels are chosen by model family"),
    **dict.fromkeys(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode"),
        ("train.kernels", "batches differ in length, and torch compiles again for each"),
    ),
    "accelerator_config": (None, "the plan decides; `make plan` shows it"),
    "parallelism_config": (
        "launch.sequence_parallel",
        "the plan decides; its context parallelism attends across packed rows",
    ),
    "dataloader_drop_last": (None, "no row is skipped; " + ROW_ORDER),
    "remove_unused_columns": (None, "rows are prepared before the run and hold only what the model takes"),
    "label_names": (None, "labels are the tokens of the answers"),
    "ddp_backend": ("launch.backend", RENAMED),
    "ddp_timeout": ("launch.timeout_seconds", RENAMED),
    **dict.fromkeys(
        ("fsdp", "fsdp_config"), ("launch.strategy", "`launch.strategy: fsdp2` or `make train-fsdp` shards the model")
    ),
    "deepspeed": ("DEEPSPEED_CONFIG", "`make train-deepspeed DEEPSPEED_CONFIG=file.json` takes your own JSON"),
    "do_train": (None, COMMAND),
    "do_eval": ("train.eval_strategy", COMMAND),
    "do_predict": ("train.predict_with_generate", COMMAND),
    "resume_from_checkpoint": (
        None,
        "`make resume RUN=` continues a run from its newest checkpoint; `model.adapter: RUN` starts another from its"
        " adapter",
    ),
    "local_rank": (None, "omit it: the launcher sets it"),
    **dict.fromkeys(
        ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        (None, TRACKERS),
    ),
}
"""Field -> (name to use, why): the plan or a command decides it, or it has another name here."""
