"""Names that people know from other tools, and the right name for one that is mistyped."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path

from sft_play.config.keys import REFUSED, extra_keys, find_key, schema_keys, sections, variable_name, variables
from sft_play.config.reader import shown
from sft_play.config.yaml_files import Node
from sft_play.errors import HUB_LOGIN, SECRET, UserError

SECRETS_HINT = (
    f"tokens and passwords come from the environment (`HF_TOKEN` for the hub) or from {HUB_LOGIN}, and are never"
    " written down"
)

ELSEWHERE: Mapping[str, str] = {
    "model.name": "model_name_or_path model_id pretrained_model_name_or_path model_name model_path base_model base_model_config",
    "model.revision": "model_revision",
    "model.dtype": "torch_dtype",
    "model.max_seq_len": "max_seq_length max_length seq_len sequence_length max_sequence_length model_max_length block_size "
    "context_length sequence_len cutoff_len",
    "model.layers": "num_layers num_hidden_layers n_layer n_layers",
    "model.attention_heads": "num_attention_heads num_heads n_head n_heads",
    "model.hidden_size": "d_model n_embd",
    "model.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
    "model.vocab_size": "num_words vocabulary_size",
    "model.init": "from_scratch",
    "model.attn_implementation": "attention_implementation use_flash_attention_2 flash_attention flash_attn",
    "tuning.task": "stage task",
    "tuning.quantization": "load_in_4bit load_in_8bit bnb_4bit_quant_type quantization_bit quantization_method",
    "tuning.mode": "use_peft use_lora use_qlora peft_type adapter finetuning_type",
    "tuning.lora.r": "lora_r lora_rank rank_lora",
    "tuning.lora.alpha": "lora_alpha",
    "tuning.lora.dropout": "lora_dropout",
    "tuning.lora.target_modules": "lora_target_modules target_modules lora_target_linear lora_target",
    "data.train_path": "dataset_name dataset_path train_file train_data data_path train_dataset datasets dataset",
    "data.val_path": "validation_file eval_file eval_dataset val_data",
    "data.validation": "test_datasets val_set_size val_size",
    "train.batch_size": "per_device_train_batch_size per_device_batch_size batch_size_per_device micro_batch_size_per_gpu bs "
    "micro_batch_size",
    "train.grad_accum": "gradient_accumulation_steps gradient_accumulation grad_accumulation accumulation_steps grad_acc",
    "train.global_batch_size": "effective_batch_size total_batch_size",
    "train.epochs": "num_epochs num_train_epochs epoch n_epochs",
    "train.learning_rate": "lr",
    "train.lr_scheduler_type": "scheduler lr_scheduler",
    "train.optim": "optimizer",
    "train.max_grad_norm": "grad_clip gradient_clipping",
    "train.warmup_ratio": "warmup",
    "train.weight_decay": "wd",
    "train.max_steps": "steps num_steps",
    "train.eval_strategy": "evaluation_strategy evals_per_epoch",
    "train.gradient_checkpointing": "use_gradient_checkpointing activation_checkpointing",
    "train.generation_max_new_tokens": "max_new_tokens eval_max_new_tokens",
    "train.generation_num_beams": "num_beams",
    "train.dataloader_num_workers": "num_workers",
    "train.dataloader_pin_memory": "pin_memory",
    "train.bf16": "mixed_precision",
    "train.save_steps": "save_interval save_every",
    "train.logging_steps": "log_interval",
    "train.save_strategy": "saves_per_epoch",
    "eval.batch_size": "per_device_eval_batch_size eval_batch_size",
    "eval.samples": "max_samples",
    "launch.sequence_parallel": "sequence_parallel_size context_parallel_size sp_size cp_size ulysses_size",
    "launch.tensor_parallel": "tensor_parallel_size tp_size tp",
    "launch.strategy": "strategy",
    "launch.backend": "distributed_backend",
    "launch.timeout_seconds": "ddp_timeout timeout nccl_timeout",
    "NUM_GPUS": "num_gpu gpus n_gpus ngpus gpu_count world_size num_processes nproc_per_node nproc ntasks ntasks_per_node "
    "gpus_per_node",
    "NODE_RANK": "rank node_rank machine_rank local_rank",
    "NUM_NODES": "nnodes num_machines nodes",
    "MASTER_ADDR": "master_address main_process_ip",
    "MASTER_PORT": "main_process_port",
    "RUN_NAME": "rdzv_id job_name name experiment_name",
    "RUN": "run resume_from_checkpoint",
    "CONFIG": "config_file cfg",
    "DEEPSPEED_CONFIG": "deepspeed deepspeed_config_file",
    "CHECKPOINT": "checkpoint_path",
}
"""Key or variable -> its names elsewhere (transformers, TRL, PEFT, Axolotl, LLaMA-Factory, launchers): lower case,
without section.
"""

ELSEWHERE_IN_SECTION: Mapping[str, str] = {
    "tuning.lora.r": "tuning.rank tuning.lora.rank train.lora_r",
    "tuning.mode": "tuning.method tuning.type",
    "tuning.quantization": "tuning.bits",
    "tuning.lora.dropout": "tuning.dropout",
    "tuning.lora.target_modules": "tuning.lora.modules",
    "model.name": "model.path model.id",
    "model.max_seq_len": "model.length",
    "data.train_path": "data.path data.train data.file",
    "data.val_path": "data.test data.val data.valid data.eval data.validation_path",
    "data.sources": "data.files data.train_files",
    "launch.timeout_seconds": "launch.timeout",
    "NUM_GPUS": "launch.num_gpus",
    "NUM_NODES": "launch.num_nodes",
    "RUN_NAME": "train.output",
    "eval.samples": "eval.num_samples",
    "train.generation_max_new_tokens": "eval.max_new_tokens",
    "train.generation_num_beams": "eval.num_beams",
    "train.lr_scheduler_type": "train.scheduler",
    "train.optim": "train.optimizer",
}
"""The same for names that mean something only in their section."""
ALIASES, IN_SECTION = (
    {name: key for key, names in table.items() for name in names.split()} for table in (ELSEWHERE, ELSEWHERE_IN_SECTION)
)

NF4, INT8 = ({"tuning.mode": "qlora", "tuning.quantization": kind} for kind in ("nf4", "int8"))
LORA = {"tuning.mode": "lora"}
BACKENDS = {name: {"launch.backend": name.replace("mpi", "auto")} for name in ("nccl", "gloo", "mpi")}
SETTINGS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "load_in_4bit": {"true": NF4, "false": LORA},
    "load_in_8bit": {"true": INT8, "false": LORA},
    "quantization_bit": {"4": NF4, "8": INT8},
    "use_qlora": {"true": NF4},
    "use_lora": {"true": LORA},
    "use_peft": {"true": LORA},
    "use_flash_attention_2": {"true": {"model.attn_implementation": "flash_attention_2"}},
    "flash_attention": {"true": {"model.attn_implementation": "flash_attention_2"}},
    "mixed_precision": {
        "bf16": {"train.bf16": "true"},
        "fp16": {"train.fp16": "true"},
        "false": {"train.bf16": "false"},
    },
    "backend": BACKENDS,
    "distributed_backend": BACKENDS,
    "dist_backend": BACKENDS,
    "no_nccl": {"true": {"launch.backend": "gloo"}},
    "zero_stage": {
        stage: {"launch.strategy": f"zero{number}"} for stage, number in {"true": 1, "2": 2, "3": 3}.items()
    },
}
"""Settings elsewhere whose value is another one here: name -> value -> key or variable -> value here."""
REMOVED: dict[str, str] = {
    "soak": "it was removed in 0.2.0: the test suite kills trainings (`tests/distributed/test_soak.py`)",
    "kills": "it was removed in 0.2.0, as `make soak`",
    "elastic": (
        "it was removed in 0.2.0: `launch.max_restarts` starts again once all machines are back, `make resume` with"
        " fewer of them"
    ),
    "powersgd": "it was removed in 0.2.0: `fp16` and `bf16` halve what travels, `launch.local_steps` divides it",
    "powersgd_rank": "it was removed in 0.2.0, as `launch.compression: powersgd`",
    "skypilot": "it was removed in 0.2.0: `pytorchjob`, `trainjob` and `job` are what a cluster takes",
    "scale": "it was removed in 0.2.0: NUM_GPUS=, NUM_NODES= or HARDWARE= plans for each number of devices",
    "bench": "it was removed in 0.2.0: run `make bench` on each machine",
}
"""Commands, keys, variables and values of 0.1.0 -> what there is instead; for one release."""
ENDPOINT = re.compile(r"(?P<host>[^:]+|\[[^]]+\])(:(?P<port>\d+))?")
GRES = re.compile(r"(gres/)?gpu(:[\w.-]+)??(:(?P<count>\d+))?", re.IGNORECASE)
STAGES = "`train-distributed LAUNCH_STRATEGY=pipeline` puts consecutive layers on GPUs one after the other"
LAYERS = "`LAUNCH_TENSOR_PARALLEL=2` lets two GPUs hold slices of each layer"
SLICES = "`LAUNCH_SEQUENCE_PARALLEL=2` lets two GPUs hold slices of each line"
OF_DEEPSPEED, OF_FSDP = (f"the command says so: `{command}`" for command in ("train-deepspeed", "train-fsdp"))
OF_CPU = "the CPU is used where no GPU is seen; `export CUDA_VISIBLE_DEVICES=` hides GPUs"
INSTEAD: dict[str, str] = {
    "pipeline": STAGES,
    "pipeline_parallel": STAGES,
    "pipeline_parallel_size": STAGES,
    "pp_size": STAGES,
    "rdzv_backend": "machines meet at `MASTER_ADDR`: leave it out",
    "standalone": "one machine is the default: leave it out",
    "multi_gpu": "the command says so: `train-distributed` starts a process on each GPU",
    "use_deepspeed": OF_DEEPSPEED,
    "use_fsdp": OF_FSDP,
    "fsdp": OF_FSDP,
    "cpu": OF_CPU,
    "use_cpu": OF_CPU,
    "gpu_ids": "`export CUDA_VISIBLE_DEVICES=0,1` chooses GPUs, and each command uses those that it sees",
    "do_train": "the command decides this: omit it",
    "do_eval": "the command decides this: omit it",
    "overwrite_output_dir": "each run has its own folder: omit it",
} | REMOVED
"""Names elsewhere that nothing here stands for -> what there is."""
OF_ZERO = "`LAUNCH_STRATEGY=zero2` (or `zero1`, `zero3`), or the command says so: `train-deepspeed`"
VALUES: Mapping[str, str] = INSTEAD | {"deepspeed": OF_ZERO, "zero": OF_ZERO, "tp": LAYERS, "pp": STAGES, "sp": SLICES}
"""Values elsewhere that nothing here stands for -> what there is."""
OF_ENVIRONMENT: Mapping[str, str] = {
    "output_dir": "RUNS_DIR",
    "runs_dir": "RUNS_DIR",
    "sft_play_cache": "SFT_PLAY_CACHE",
}
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
    "CLUSTER": (
        "an inventory of machines; `CLUSTER_HOSTS=...` and the like change it for one call, see docs/home-cluster.md"
    ),
    "RUN_NAME": "name of a new run: letters, digits, `_ . + = -`",
    "MODEL": "a hub model or a folder instead of a run, see docs/evaluation.md",
    "CHECKPOINT": (
        "`best`, `last` or `step-000040` (`step-40`, `40`) instead of the final model; for `eval` also `base`"
    ),
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
    "PRICE_PER_HOUR": "price of one machine, for the cost of the run, see docs/forecast.md",
    "SWEEP": "YAML file of a sweep: `metric`, `keys` with their values; see docs/watching.md",
    "SLURM": "`1` makes a sweep one Slurm job array, see docs/slurm.md",
    "WHY": "`1` shows the plan's reasons and the launch's variables; `plan` shows reasons unless it is `0`",
    "TENSORBOARD_PORT": "instead of 6006; the next free port if taken",
    "MIXED_PRECISION": "answer for `setup-accelerate`: `no`, `bf16` or `fp16`",
    "STRATEGY": "answer for `setup-accelerate`",
    "RANK": "rank whose log is shown (0)",
    "FOLLOW": "`1` follows the log until the run ends",
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
    """Return the key (`train.learning_rate`) or variable (`NUM_GPUS`) that `name` probably means, or `None`.

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
    """Return the last part of a key, flag or variable as tables have it: `--rdzv-endpoint` is `rdzv_endpoint`,
    `SLURM_GRES` is `gres`.
    """
    flat = name.strip().lstrip("-").replace("-", "_").lower().rpartition(".")[2]
    return flat if flat.startswith("kubernetes_") else flat.removeprefix(_section_of(flat).replace(".", "_") + "_")


def environment_hint(word: str, text: str) -> str | None:
    """Return what to type for what only the environment says, such as where the runs are."""
    name = OF_ENVIRONMENT.get(word)
    named = "; in it RUN_NAME= names a run" if word == "output_dir" else ""
    return f"`export {name}={text}` moves all {'runs' if name == 'RUNS_DIR' else 'caches'}{named}" if name else None


def ambient_key(name: str) -> str | None:
    """Return the key that a variable of the environment without `SFT_` seems to mean."""
    key = variables().get(name) or (suggest(name) if name in OF_CONTAINERS else None)
    return key if key and find_key(key) and not key.startswith(OF_LAUNCHES) else None


def settings(name: str, text: str) -> Mapping[str, str]:
    """Return what `name: text` of another tool is here, key or variable -> value; empty where the value stays as it is
    or is not known.
    """
    word = plain_word(name)
    if word == "rdzv_endpoint" and (found := ENDPOINT.fullmatch(text.strip())):
        return {"MASTER_ADDR": found["host"]} | ({"MASTER_PORT": found["port"]} if found["port"] else {})
    if word == "gres" and (found := GRES.fullmatch(text.strip())):
        return {"NUM_GPUS": found["count"] or "1"}
    value = {"1": "true", "yes": "true", "": "true", "0": "false", "no": "false"}.get(
        text.strip().lower(), text.strip().lower()
    )
    return SETTINGS.get(word, {}).get(value, {})


def _section_of(flat: str) -> str:
    """Return the section that a variable's name begins with, the longest; or nothing."""
    found = [section for section in sections() if section and flat.startswith(section.replace(".", "_") + "_")]
    return max(found, key=len, default="")


@functools.cache
def _names() -> Mapping[str, str]:
    """Return flat name -> key: `train_learning_rate` -> `train.learning_rate`."""
    return {variable_name(key).lower(): key for key in [*schema_keys(), *extra_keys()]}


@functools.cache
def _leaves() -> Mapping[str, str]:
    """Return last part -> key; where two sections share one, the first in this order of use."""
    found: dict[str, str] = {}
    for key in [*(key for key in schema_keys() if key.startswith("train.")), *schema_keys(), *extra_keys()]:
        found.setdefault(key.rpartition(".")[2], key)
    return found


def _by_likeness(flat: str, rest: str, section: str, known: set[str]) -> str | None:
    """Look in the section first, then everywhere; a far match would mislead more than none."""
    if section:
        inside = [
            key.removeprefix(section + ".") for key in [*schema_keys(), *extra_keys()] if key.startswith(section + ".")
        ]
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
    """Return the section of a file (`data`) that a mistyped one (`bata`) stands for."""
    close = get_close_matches(
        name.lower(), [section for section in sections() if section and "." not in section], n=1, cutoff=0.7
    )
    return close[0] if close else None


def refusal(key: str, place: str | None = None, spell: Callable[[str], str] = str) -> UserError | None:
    """Return the error of a `train.` field of `TrainingArguments` that is decided elsewhere; `spell` writes the key to
    use instead.
    """
    section, _, leaf = key.partition(".")
    if section != "train" or leaf not in REFUSED:
        return None
    instead, why = REFUSED[leaf]
    return UserError(f"`{key}` is not taken: {why}", place=place, hint=f"use `{spell(instead)}`" if instead else None)


def closest_file(path: Path, folder: Path) -> str | None:
    """Return a YAML file next to `path` or in `folder` whose name is close to it, as the user would type it."""
    known = {p.stem.lower(): f"configs/{p.name}" for p in folder.glob("*.yaml")}
    if path.parent != Path():
        known |= {p.stem.lower(): str(p) for p in path.parent.glob("*.yaml")}
    close = get_close_matches(path.name.lower().removesuffix(".yaml"), known, n=1, cutoff=0.65)
    return known[close[0]] if close else None


def hint_elsewhere(name: str, text: str, say: Callable[[Mapping[str, str]], str]) -> str | None:
    """Return what there is here for `name: text` of another tool; `say` puts keys and their values in words."""
    if SECRET.fullmatch(name):
        return SECRETS_HINT
    word = plain_word(name)
    if hint := INSTEAD.get(word) or environment_hint(word, text):
        return hint
    meant = settings(name, text)
    return f"here that is {say(meant)}" if meant else None


def unknown_key(key: str, place: str, node: Node) -> UserError:
    if not key:
        return UserError("a key is empty; expected a name", place=place)
    if key in sections():
        first = {"data": "train_path", "model": "name", "tuning": "mode"}.get(key)
        hint = f"did you mean `{key}.{first}: {shown(node)}`?" if first and isinstance(node.value, str) else None
        return UserError(f"`{key}` is `{shown(node)}`; expected a mapping of its keys", place=place, hint=hint)
    if refused := refusal(key, place):
        return refused
    section, _, leaf = key.rpartition(".")
    if leaf == "<<":
        return UserError(
            "YAML 1.2 has no merge key `<<`", place=place, hint="`extends:` takes the keys of another file"
        )
    text = node.text if node.text is not None else str(node.value)
    if hint := hint_elsewhere(leaf, text, _listed):
        return UserError(f"unknown key `{key}`", place=place, hint=hint)
    inner = next((one for one in sections() if not section and one.endswith(f".{leaf.removesuffix('_config')}")), None)
    better = inner or (None if section or leaf.lower() in ALIASES else closest_section(leaf)) or suggest(leaf, section)
    if better == "data.train_path" and isinstance(node.value, list):
        better = "data.sources"
    hint = f"did you mean `{better}`?" if better else "docs/configuration.md lists every key"
    return UserError(f"unknown key `{key}`", place=place, hint=hint)


def _listed(meant: Mapping[str, str]) -> str:
    return " and ".join(
        f"`{key}={value}`, typed" if key.isupper() else f"`{key}: {value}`" for key, value in meant.items()
    )
