"""Names that people know from other tools, and the right name for one that is mistyped."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path

from sft_play.config.keys import REFUSED, extra_keys, find_key, schema_keys, sections, variable_name, variables
from sft_play.config.reader import shown
from sft_play.config.yaml_files import Node
from sft_play.errors import HUB_LOGIN, SECRET, UserError

SECRETS_HINT = (
    f"tokens and passwords come from the environment (`HF_TOKEN` for the hub) or from {HUB_LOGIN}, and are never written down"
)

ALIASES: Mapping[str, str] = {
    # transformers, TRL, PEFT
    "model_name_or_path": "model.name", "model_id": "model.name", "pretrained_model_name_or_path": "model.name",
    "model_revision": "model.revision", "model_name": "model.name", "model_path": "model.name", "torch_dtype": "model.dtype",
    "max_seq_length": "model.max_seq_len", "max_length": "model.max_seq_len", "seq_len": "model.max_seq_len",
    "sequence_length": "model.max_seq_len", "max_sequence_length": "model.max_seq_len", "model_max_length": "model.max_seq_len",
    "num_layers": "model.layers", "num_hidden_layers": "model.layers", "n_layer": "model.layers", "n_layers": "model.layers",
    "num_attention_heads": "model.attention_heads", "num_heads": "model.attention_heads", "n_head": "model.attention_heads",
    "n_heads": "model.attention_heads", "d_model": "model.hidden_size", "n_embd": "model.hidden_size", "block_size": "model.max_seq_len",
    "context_length": "model.max_seq_len", "tokenizer_name": "model.tokenizer", "tokenizer_path": "model.tokenizer",
    "tokenizer_name_or_path": "model.tokenizer", "num_words": "model.vocab_size", "vocabulary_size": "model.vocab_size",
    "from_scratch": "model.init", "stage": "tuning.task", "task": "tuning.task",
    "attention_implementation": "model.attn_implementation", "use_flash_attention_2": "model.attn_implementation",
    "load_in_4bit": "tuning.quantization", "load_in_8bit": "tuning.quantization", "bnb_4bit_quant_type": "tuning.quantization",
    "use_peft": "tuning.mode", "use_lora": "tuning.mode", "use_qlora": "tuning.mode", "peft_type": "tuning.mode",
    "lora_r": "tuning.lora.r", "lora_rank": "tuning.lora.r", "rank_lora": "tuning.lora.r", "lora_alpha": "tuning.lora.alpha",
    "lora_dropout": "tuning.lora.dropout", "lora_target_modules": "tuning.lora.target_modules",
    "target_modules": "tuning.lora.target_modules",
    "dataset_name": "data.train_path", "dataset_path": "data.train_path", "train_file": "data.train_path",
    "train_data": "data.train_path", "data_path": "data.train_path", "validation_file": "data.val_path", "eval_file": "data.val_path",
    "eval_dataset": "data.val_path", "train_dataset": "data.train_path", "val_data": "data.val_path",
    "per_device_train_batch_size": "train.batch_size", "per_device_batch_size": "train.batch_size",
    "batch_size_per_device": "train.batch_size", "micro_batch_size_per_gpu": "train.batch_size", "bs": "train.batch_size",
    "gradient_accumulation_steps": "train.grad_accum", "gradient_accumulation": "train.grad_accum",
    "grad_accumulation": "train.grad_accum", "accumulation_steps": "train.grad_accum", "grad_acc": "train.grad_accum",
    "per_device_eval_batch_size": "eval.batch_size", "eval_batch_size": "eval.batch_size",
    "effective_batch_size": "train.global_batch_size", "total_batch_size": "train.global_batch_size",
    "num_epochs": "train.epochs", "num_train_epochs": "train.epochs", "epoch": "train.epochs", "n_epochs": "train.epochs",
    "lr": "train.learning_rate", "scheduler": "train.lr_scheduler_type", "lr_scheduler": "train.lr_scheduler_type",
    "optimizer": "train.optim", "grad_clip": "train.max_grad_norm", "gradient_clipping": "train.max_grad_norm",
    "warmup": "train.warmup_ratio", "wd": "train.weight_decay", "steps": "train.max_steps", "num_steps": "train.max_steps",
    "evaluation_strategy": "train.eval_strategy", "use_gradient_checkpointing": "train.gradient_checkpointing",
    "activation_checkpointing": "train.gradient_checkpointing", "max_new_tokens": "train.generation_max_new_tokens",
    "num_beams": "train.generation_num_beams", "num_workers": "train.dataloader_num_workers",
    "pin_memory": "train.dataloader_pin_memory", "mixed_precision": "train.bf16", "save_interval": "train.save_steps",
    "save_every": "train.save_steps", "log_interval": "train.logging_steps",
    # Axolotl
    "base_model": "model.name", "base_model_config": "model.name", "adapter": "tuning.mode", "sequence_len": "model.max_seq_len",
    "datasets": "data.train_path", "dataset": "data.train_path", "test_datasets": "data.validation", "val_set_size": "data.validation",
    "micro_batch_size": "train.batch_size", "lora_target_linear": "tuning.lora.target_modules", "flash_attention":
    "model.attn_implementation", "saves_per_epoch": "train.save_strategy", "evals_per_epoch": "train.eval_strategy",
    "eval_max_new_tokens": "train.generation_max_new_tokens",
    # LLaMA-Factory
    "finetuning_type": "tuning.mode", "quantization_bit": "tuning.quantization", "quantization_method": "tuning.quantization",
    "cutoff_len": "model.max_seq_len", "lora_target": "tuning.lora.target_modules", "flash_attn": "model.attn_implementation",
    "val_size": "data.validation", "max_samples": "eval.samples",
    # launchers
    "sequence_parallel_size": "launch.sequence_parallel", "context_parallel_size": "launch.sequence_parallel", "sp_size":
    "launch.sequence_parallel", "cp_size": "launch.sequence_parallel", "ulysses_size": "launch.sequence_parallel",
    "tensor_parallel_size": "launch.tensor_parallel", "tp_size": "launch.tensor_parallel", "tp": "launch.tensor_parallel",
    "strategy": "launch.strategy", "distributed_backend": "launch.backend", "ddp_timeout": "launch.timeout_seconds",
    "timeout": "launch.timeout_seconds", "nccl_timeout": "launch.timeout_seconds", "num_gpu": "NUM_GPUS", "gpus": "NUM_GPUS",
    "n_gpus": "NUM_GPUS", "ngpus": "NUM_GPUS", "gpu_count": "NUM_GPUS", "world_size": "NUM_GPUS", "num_processes": "NUM_GPUS",
    "nproc_per_node": "NUM_GPUS", "nproc": "NUM_GPUS", "rank": "NODE_RANK", "node_rank": "NODE_RANK", "machine_rank": "NODE_RANK",
    "local_rank": "NODE_RANK", "nnodes": "NUM_NODES", "num_machines": "NUM_NODES", "nodes": "NUM_NODES",
    "master_address": "MASTER_ADDR", "main_process_ip": "MASTER_ADDR", "main_process_port": "MASTER_PORT",
    "rdzv_id": "RUN_NAME", "job_name": "RUN_NAME", "ntasks": "NUM_GPUS", "ntasks_per_node": "NUM_GPUS", "gpus_per_node": "NUM_GPUS",
    "run": "RUN", "name": "RUN_NAME", "experiment_name": "RUN_NAME", "config_file": "CONFIG", "cfg": "CONFIG",
    "deepspeed": "DEEPSPEED_CONFIG", "deepspeed_config_file": "DEEPSPEED_CONFIG", "checkpoint_path": "CHECKPOINT",
    "resume_from_checkpoint": "RUN",
}  # fmt: skip
"""Name elsewhere -> key or variable here. Names of keys, lower case, without section."""

IN_SECTION: Mapping[str, str] = {
    "tuning.rank": "tuning.lora.r", "tuning.lora.rank": "tuning.lora.r", "tuning.method": "tuning.mode", "tuning.type": "tuning.mode",
    "tuning.bits": "tuning.quantization", "tuning.dropout": "tuning.lora.dropout", "tuning.lora.modules": "tuning.lora.target_modules",
    "model.path": "model.name", "model.id": "model.name", "model.length": "model.max_seq_len",
    "data.path": "data.train_path", "data.train": "data.train_path", "data.file": "data.train_path", "data.test": "data.val_path",
    "data.val": "data.val_path", "data.valid": "data.val_path", "data.eval": "data.val_path", "data.validation_path": "data.val_path",
    "data.files": "data.sources", "data.train_files": "data.sources", "launch.timeout": "launch.timeout_seconds",
    "launch.num_gpus": "NUM_GPUS", "launch.num_nodes": "NUM_NODES", "train.output": "RUN_NAME", "eval.num_samples": "eval.samples",
    "eval.max_new_tokens": "train.generation_max_new_tokens", "eval.num_beams": "train.generation_num_beams",
    "train.scheduler": "train.lr_scheduler_type", "train.optimizer": "train.optim", "train.lora_r": "tuning.lora.r",
}  # fmt: skip
"""Names that mean something only in their section."""

NF4, INT8 = ({"tuning.mode": "qlora", "tuning.quantization": kind} for kind in ("nf4", "int8"))
LORA = {"tuning.mode": "lora"}
BACKENDS = {name: {"launch.backend": name.replace("mpi", "auto")} for name in ("nccl", "gloo", "mpi")}
SETTINGS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "load_in_4bit": {"true": NF4, "false": LORA}, "load_in_8bit": {"true": INT8, "false": LORA},
    "quantization_bit": {"4": NF4, "8": INT8},
    "use_qlora": {"true": NF4}, "use_lora": {"true": LORA}, "use_peft": {"true": LORA},
    "use_flash_attention_2": {"true": {"model.attn_implementation": "flash_attention_2"}},
    "flash_attention": {"true": {"model.attn_implementation": "flash_attention_2"}},
    "mixed_precision": {"bf16": {"train.bf16": "true"}, "fp16": {"train.fp16": "true"}, "false": {"train.bf16": "false"}},
    "backend": BACKENDS, "distributed_backend": BACKENDS, "dist_backend": BACKENDS,
    "no_nccl": {"true": {"launch.backend": "gloo"}},
    "zero_stage": {stage: {"launch.strategy": f"zero{number}"} for stage, number in {"true": 1, "2": 2, "3": 3}.items()},
}  # fmt: skip
"""Settings elsewhere whose value is another one here: name -> value -> key or variable -> value here."""
ENDPOINT = re.compile(r"(?P<host>[^:]+|\[[^]]+\])(:(?P<port>\d+))?")
GRES = re.compile(r"(gres/)?gpu(:[\w.-]+)??(:(?P<count>\d+))?", re.IGNORECASE)
SPLIT = (
    "layers are not put on GPUs one after the other here; `launch.tensor_parallel` slices each, and `train-fsdp`, or "
    "`launch.strategy: fsdp2`, shares out the weights"
)
SLICES = "`LAUNCH_SEQUENCE_PARALLEL=2` lets two GPUs hold slices of each line"
OF_DEEPSPEED, OF_FSDP = (f"the command says so: `{command}`" for command in ("train-deepspeed", "train-fsdp"))
OF_CPU = "the CPU is used where no GPU is seen; `export CUDA_VISIBLE_DEVICES=` hides GPUs"
INSTEAD: dict[str, str] = {
    "pipeline": SPLIT, "pipeline_parallel": SPLIT, "pipeline_parallel_size": SPLIT,
    "rdzv_backend": "machines meet at `MASTER_ADDR`: leave it out", "standalone": "one machine is the default: leave it out",
    "multi_gpu": "the command says so: `train-distributed` starts a process on each GPU", "use_deepspeed": OF_DEEPSPEED,
    "use_fsdp": OF_FSDP, "fsdp": OF_FSDP, "cpu": OF_CPU, "use_cpu": OF_CPU,
    "gpu_ids": "`export CUDA_VISIBLE_DEVICES=0,1` chooses GPUs, and each command uses those that it sees",
    "do_train": "the command says what is done: leave it out", "do_eval": "the command says what is done: leave it out",
    "overwrite_output_dir": "each run has its own folder: omit it",
}  # fmt: skip
"""Names elsewhere that nothing here stands for -> what there is."""
OF_ZERO = "`LAUNCH_STRATEGY=zero2` (or `zero1`, `zero3`), or the command says so: `train-deepspeed`"
VALUES: Mapping[str, str] = INSTEAD | {"deepspeed": OF_ZERO, "zero": OF_ZERO, "tp": SPLIT, "pp": SPLIT, "sp": SLICES}
"""Values elsewhere that nothing here stands for -> what there is."""
OF_ENVIRONMENT: Mapping[str, str] = {"output_dir": "RUNS_DIR", "runs_dir": "RUNS_DIR", "sft_play_cache": "SFT_PLAY_CACHE"}
"""Names of what only the environment says -> its name there."""
OF_PROGRAMS = re.compile(r"(CUDA|NCCL|GLOO|OMP|HF|TRANSFORMERS|TOKENIZERS|TORCH|PYTORCH|WANDB|MLFLOW|COMET|AIM)_\w+")
"""Variables that other programs read from the environment."""
OF_CONTAINERS: tuple[str, ...] = (
    "EPOCHS", "NUM_EPOCHS", "NUM_TRAIN_EPOCHS", "MAX_STEPS", "BATCH_SIZE", "PER_DEVICE_TRAIN_BATCH_SIZE", "GRADIENT_ACCUMULATION_STEPS",
    "LEARNING_RATE", "LR", "MAX_SEQ_LENGTH", "MODEL_ID", "MODEL_NAME_OR_PATH", "BASE_MODEL", "DATASET_NAME", "LORA_R",
)  # fmt: skip
"""What training images take from a pod's environment, beside names that are ours without `SFT_`."""
OF_LAUNCHES = ("slurm.", "kubernetes.")
"""Sections whose variables (`KUBERNETES_PORT`) a scheduler itself sets."""


VARIABLES: Mapping[str, str] = {
    "CONFIG": "a YAML file or a preset's name",
    "RUN": "a run's name or folder",
    "CLUSTER": "an inventory of machines; `CLUSTER_HOSTS=...` and the like change it for one call, see docs/home-cluster.md",
    "RUN_NAME": "name of a new run: letters, digits, `_ . + = -`",
    "MODEL": "a hub model or a folder instead of a run, see docs/evaluation.md",
    "CHECKPOINT": "`best`, `last` or `step-000040` (`step-40`, `40`) instead of the final model; for `eval` also `base`",
    "DATA": "other rows to score, see docs/evaluation.md",
    "NUM_GPUS": "processes on this machine",
    "NUM_NODES": "number of machines, see docs/launching.md#several-machines-by-hand",
    "NODE_RANK": "rank of this machine, from 0",
    "MASTER_ADDR": "address of node 0",
    "MASTER_PORT": "its port (29500); on one machine a free port is chosen",
    "ACCELERATE_CONFIG": "a file of accelerate, see docs/launching.md#an-accelerate-config-of-your-own",
    "DEEPSPEED_CONFIG": "a DeepSpeed JSON, see docs/launching.md#a-deepspeed-json-of-your-own",
    "HARDWARE": "hardware to plan for, see docs/planning.md",
    "SOURCE": "source of the memory figures: `formula`, `trace` or `probe`, see docs/planning.md",
    "SCALE": "figures by number of devices, such as `1..4,8`, see docs/forecast.md",
    "PRICE_PER_HOUR": "price of one machine, for the cost of the run, see docs/forecast.md",
    "SWEEP": "YAML file of a sweep: `method`, `metric`, `keys` with their values; see docs/watching.md",
    "WHY": "`1` shows the plan's reasons and the launch's variables; `plan` shows reasons unless it is `0`",
    "TENSORBOARD_PORT": "instead of 6006; the next free port if taken",
    "MIXED_PRECISION": "answer for `setup-accelerate`: `no`, `bf16` or `fp16`",
    "STRATEGY": "answer for `setup-accelerate`; strategy of `soak`",
    "RANK": "rank whose log is shown (0)",
    "FOLLOW": "`1` follows the log until the run ends",
    "BENCH": "`1` also trains some steps on each machine, see docs/cluster.md",
    "KILLS": "number of kills of `soak`, see docs/reliability.md",
    "SEED": "seed of `soak`",
    "PROMPT": "one question, see docs/use.md",
    "INPUT": "a file of questions",
    "OUTPUT": "the file for the answers",
    "OUT": "what is written: a folder for `merge` and `kubernetes`, else a file",
    "HOST": "address to listen on (127.0.0.1); with another one `serve` and `ui` need a token, see docs/security.md",
    "PORT": "port of `serve` (8000) or `ui` (8600); the next free port if taken",
    "A": "a run, checkpoint or model (`NAME`, `NAME@step-000040`, `NAME@model`, a folder) whose stamp is compared",
    "B": "with this one's",
    "BENCHMARKS": "tasks of lm-evaluation-harness",
    "BENCHMARK_LIMIT": "samples per task",
    "SPLIT": "rows that `inspect` shows: `train` or `validation`",
    "SEARCH": "only rows with these words",
    "HTML": "`1` writes a page, see docs/data.md",
    "SUBMIT": "`1` submits the script with `sbatch`, see docs/slurm.md",
    "REPO": "a hub repository, `owner/name`",
    "YES": "`1`: `push` uploads",
    "PRIVATE": "`0`: `push` makes a public repository",
    "RUNS": "runs to compare",
    "METRIC": "the score to compare by",
    "ROWS": "number of answers or rows shown",
    "SORT": "a column of `runs`; `-` before it: largest first",
    "WHERE": "a condition over columns of `runs`, see docs/watching.md",
    "CSV": "`1`: CSV on stdout",
    "JSON": "`1` prints JSON instead of text",
}
"""Name -> meaning, as `sft-play COMMAND --help` shows it."""


def suggest(name: str, section: str = "", options: Iterable[str] = VARIABLES) -> str | None:
    """Returns the key (`train.learning_rate`) or variable (`NUM_GPUS`) that `name` probably means, or `None`.

    `name` may be a YAML key, dotted or not, a variable or a flag; `section` is where in a file it stands.
    """
    known = set(options)
    word = name.strip().lstrip("-").replace("-", "_")
    lower = word.lower()
    for candidate in (f"{section}.{lower}" if section else lower, lower):
        if find_key(candidate):
            return candidate
        if candidate in IN_SECTION:
            return IN_SECTION[candidate]
    if section and (found := _leaves().get(f"{section}_{lower}")):  # `eval: {steps: 5}`
        return found
    for option in known:
        if lower.replace("_", "") == option.lower().replace("_", ""):
            return option
    if lower in sections():
        return None
    flat = lower.replace(".", "_")
    section = section or _section_of(flat)
    rest = flat.removeprefix(section.replace(".", "_") + "_") if section else flat
    if found := IN_SECTION.get(f"{section}.{rest}"):
        return found
    for candidate in (flat, lower.rpartition(".")[2], rest):
        found = ALIASES.get(candidate) or (_leaves().get(flat) if candidate == flat else None)
        if found and (found in known or not found.isupper()):
            return found
    return _names().get(flat) or _leaves().get(flat) or _leaves().get(rest) or _by_likeness(flat, rest, section, known)


def plain_word(name: str) -> str:
    """Returns the last part of a key, flag or variable as tables have it: `--rdzv-endpoint` is `rdzv_endpoint`, `SLURM_GRES` is `gres`."""
    flat = name.strip().lstrip("-").replace("-", "_").lower().rpartition(".")[2]
    return flat if flat.startswith("kubernetes_") else flat.removeprefix(_section_of(flat).replace(".", "_") + "_")


def environment_hint(word: str, text: str) -> str | None:
    """Returns what to type for what only the environment says, such as where the runs are."""
    name = OF_ENVIRONMENT.get(word)
    named = "; in it RUN_NAME= names a run" if word == "output_dir" else ""
    return f"`export {name}={text}` moves all {'runs' if name == 'RUNS_DIR' else 'caches'}{named}" if name else None


def ambient_key(name: str) -> str | None:
    """Returns the key that a variable of the environment without `SFT_` seems to mean."""
    key = variables().get(name) or (suggest(name) if name in OF_CONTAINERS else None)
    return key if key and find_key(key) and not key.startswith(OF_LAUNCHES) else None


def settings(name: str, text: str) -> Mapping[str, str]:
    """Returns what `name: text` of another tool is here, key or variable -> value; empty where the value stays as it is or is not known."""
    word = plain_word(name)
    if word == "rdzv_endpoint" and (found := ENDPOINT.fullmatch(text.strip())):
        return {"MASTER_ADDR": found["host"]} | ({"MASTER_PORT": found["port"]} if found["port"] else {})
    if word == "gres" and (found := GRES.fullmatch(text.strip())):
        return {"NUM_GPUS": found["count"] or "1"}
    value = {"1": "true", "yes": "true", "": "true", "0": "false", "no": "false"}.get(text.strip().lower(), text.strip().lower())
    return SETTINGS.get(word, {}).get(value, {})


def _section_of(flat: str) -> str:
    """Returns the section that a variable's name begins with, the longest; or nothing."""
    found = [section for section in sections() if section and flat.startswith(section.replace(".", "_") + "_")]
    return max(found, key=len, default="")


@functools.cache
def _names() -> Mapping[str, str]:
    """Returns flat name -> key: `train_learning_rate` -> `train.learning_rate`."""
    return {variable_name(key).lower(): key for key in [*schema_keys(), *extra_keys()]}


@functools.cache
def _leaves() -> Mapping[str, str]:
    """Returns last part -> key; where two sections share one, the first in this order of use."""
    found: dict[str, str] = {}
    for key in [*(key for key in schema_keys() if key.startswith("train.")), *schema_keys(), *extra_keys()]:
        found.setdefault(key.rpartition(".")[2], key)
    return found


def _by_likeness(flat: str, rest: str, section: str, known: set[str]) -> str | None:
    """Looks in the section first, then everywhere; a far match would mislead more than none."""
    if section:
        inside = [key.removeprefix(section + ".") for key in [*schema_keys(), *extra_keys()] if key.startswith(section + ".")]
        if close := get_close_matches(rest, inside, n=1, cutoff=0.7):
            return f"{section}.{close[0]}"
    if close := get_close_matches(flat, _names(), n=1, cutoff=0.92):  # a slip in the section's name
        return _names()[close[0]]
    pool = {**{option.lower(): option for option in known}, **ALIASES_OF_KEYS, **_leaves()}
    if close := get_close_matches(rest, pool, n=1, cutoff=0.75):
        return pool[close[0]]
    close = get_close_matches(flat, _names(), n=1, cutoff=0.85)
    return _names()[close[0]] if close else None


ALIASES_OF_KEYS: Mapping[str, str] = {name: key for name, key in ALIASES.items() if not key.isupper()}


def closest_section(name: str) -> str | None:
    """Returns the section of a file (`data`) that a mistyped one (`bata`) stands for."""
    close = get_close_matches(
        name.lower(), [section for section in sections() if section and "." not in section], n=1, cutoff=0.7
    )
    return close[0] if close else None


def refusal(key: str) -> tuple[str | None, str] | None:
    """Returns (name to use, why) for a `train.` field of `TrainingArguments` that is decided elsewhere."""
    section, _, leaf = key.partition(".")
    return REFUSED.get(leaf) if section == "train" else None


def closest_file(path: Path, folder: Path) -> str | None:
    """Returns a YAML file beside `path` or in `folder` whose name is close to it, as the user would type it."""
    beside = list(path.parent.glob("*.yaml")) if path.parent.is_dir() and str(path.parent) != "." else []
    shipped = list(folder.glob("*.yaml")) if folder.is_dir() else []
    known = {p.stem.lower(): p for p in [*shipped, *beside]}
    close = get_close_matches(path.name.lower().removesuffix(".yaml"), known, n=1, cutoff=0.65)
    if not close:
        return None
    found = known[close[0]]
    return f"configs/{found.name}" if found in shipped else str(found)


def unknown_key(key: str, place: str, node: Node) -> UserError:
    if not key:
        return UserError("a key is empty; expected a name", place=place)
    if key in sections():
        first = {"data": "train_path", "model": "name", "tuning": "mode"}.get(key)
        hint = f"did you mean `{key}.{first}: {shown(node)}`?" if first and isinstance(node.value, str) else None
        return UserError(f"`{key}` is `{shown(node)}`; expected a mapping of its keys", place=place, hint=hint)
    if refused := refusal(key):
        instead, why = refused
        return UserError(f"`{key}` is not taken: {why}", place=place, hint=f"use `{instead}`" if instead else None)
    section, _, leaf = key.rpartition(".")
    if leaf == "<<":
        return UserError("YAML 1.2 has no merge key `<<`", place=place, hint="`extends:` takes the keys of another file")
    if SECRET.fullmatch(leaf):
        return UserError(f"unknown key `{key}`", place=place, hint=SECRETS_HINT)
    word = plain_word(leaf)
    if hint := INSTEAD.get(word) or environment_hint(word, shown(node)):
        return UserError(f"unknown key `{key}`", place=place, hint=hint)
    if meant := settings(leaf, node.text if node.text is not None else str(node.value)):
        return UserError(f"unknown key `{key}`", place=place, hint=f"here that is {_listed(meant)}")
    inner = next((one for one in sections() if not section and one.endswith(f".{leaf.removesuffix('_config')}")), None)
    better = inner or (None if section or leaf.lower() in ALIASES else closest_section(leaf)) or suggest(leaf, section)
    if better == "data.train_path" and isinstance(node.value, list):
        better = "data.sources"
    hint = f"did you mean `{better}`?" if better else "docs/configuration.md lists every key"
    return UserError(f"unknown key `{key}`", place=place, hint=hint)


def _listed(meant: Mapping[str, str]) -> str:
    return " and ".join(f"`{key}={value}`, typed" if key.isupper() else f"`{key}: {value}`" for key, value in meant.items())
