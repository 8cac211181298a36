"""Names from other tools, and suggestions for mistyped ones."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path

from sft_play.config.keys import REFUSED, as_meant, extra_keys, find_key, schema_keys, sections, variable_name
from sft_play.config.reader import Mismatch, convert, fields_of, shown
from sft_play.config.schema import DataSource
from sft_play.config.yaml_files import YamlNode, scalar_text
from sft_play.errors import HUB_LOGIN, SECRET, UserError, mask

SECRETS_HINT = (
    f"tokens and passwords come from the environment (`HF_TOKEN` for the hub) or from {HUB_LOGIN}, and are never"
    " written down"
)

ELSEWHERE: Mapping[str, str] = {
    "model.name": (
        "model_name_or_path model_id pretrained_model_name_or_path model_name model_path base_model"
        " base_model_config model.path model.id"
    ),
    "model.adapter": (
        "adapter_name_or_path adapters lora_model_dir peft_model_id adapter_path lora_path resume_adapter"
    ),
    "model.revision": "model_revision",
    "model.dtype": "torch_dtype",
    "model.max_seq_len": (
        "max_seq_length max_length seq_len sequence_length max_sequence_length model_max_length block_size"
        " context_length sequence_len cutoff_len model.length"
    ),
    "model.layers": "num_layers num_hidden_layers n_layer n_layers",
    "model.attention_heads": "num_attention_heads num_heads n_head n_heads",
    "model.hidden_size": "d_model n_embd",
    "model.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
    "model.vocab_size": "num_words vocabulary_size",
    "model.init": "from_scratch",
    "train.loss": "loss_type loss_function use_dft_loss use_dft dft",
    "train.label_smoothing_factor": "label_smoothing",
    "train.neftune_noise_alpha": "noisy_embedding_alpha neftune_alpha",
    "model.attn_implementation": "attention_implementation use_flash_attention_2 flash_attention flash_attn",
    "tuning.task": "stage task",
    "tuning.quantization": "bnb_4bit_quant_type quantization_method tuning.bits",
    "tuning.mode": (
        "load_in_4bit load_in_8bit quantization_bit use_peft use_lora use_qlora peft_type finetuning_type"
        " tuning.method tuning.type"
    ),
    "tuning.lora.r": "lora_r lora_rank rank_lora tuning.rank tuning.lora.rank train.lora_r",
    "tuning.lora.alpha": "lora_alpha",
    "tuning.lora.dropout": "lora_dropout tuning.dropout",
    "tuning.lora.target_modules": (
        "lora_target_modules target_modules lora_target_linear lora_target tuning.lora.modules"
    ),
    "tuning.lora.variant": "use_dora dora peft_use_dora",
    "tuning.lora.rslora": "use_rslora peft_use_rslora",
    "tuning.lora.init": "init_lora_weights pissa_init init_weights peft_init_lora_weights",
    "tuning.lora.plus_ratio": "loraplus_lr_ratio lorap_lr_ratio loraplus_ratio",
    "tuning.lora.modules_to_save": "lora_modules_to_save additional_target",
    "tuning.lora.bias": "lora_bias",
    "data.new_tokens": ("add_tokens add_special_tokens new_special_tokens additional_tokens tokens resize_vocab"),
    "data.train_path": (
        "dataset_name dataset_path train_file train_data data_path train_dataset data.path data.train data.file"
    ),
    "data.val_path": (
        "validation_file eval_file eval_dataset val_data data.test data.val data.valid data.eval data.validation_path"
    ),
    "data.validation": "test_datasets val_set_size val_size",
    "data.sources": "datasets data.files data.train_files",
    "data.num_proc": "preprocessing_num_workers dataset_num_proc dataset_processes",
    "train.batch_size": (
        "per_device_train_batch_size per_device_batch_size batch_size_per_device micro_batch_size_per_gpu bs"
        " micro_batch_size"
    ),
    "train.grad_accum": (
        "gradient_accumulation_steps gradient_accumulation grad_accumulation accumulation_steps grad_acc"
    ),
    "train.global_batch_size": "effective_batch_size total_batch_size",
    "train.epochs": "num_epochs num_train_epochs epoch n_epochs",
    "train.learning_rate": "lr",
    "train.lr_scheduler_type": "scheduler lr_scheduler",
    "train.optim": "optimizer use_muon",
    "train.max_grad_norm": "grad_clip gradient_clipping",
    "train.warmup_ratio": "warmup",
    "train.weight_decay": "wd",
    "train.max_steps": "steps num_steps",
    "train.eval_strategy": "evaluation_strategy",
    "train.gradient_checkpointing": "use_gradient_checkpointing activation_checkpointing",
    "train.activation_offload": "activation_offloading enable_activation_offloading offload_activations",
    "train.generation_max_new_tokens": "max_new_tokens eval_max_new_tokens",
    "train.generation_num_beams": "num_beams",
    "train.dataloader_num_workers": "num_workers",
    "train.dataloader_pin_memory": "pin_memory",
    "train.bf16": "mixed_precision",
    "train.kernels": "enable_liger_kernel",
    "train.loss_on": (
        "assistant_only_loss completion_only_loss train_on_inputs train_on_responses_only roles_to_train"
        " train_on_prompt mask_history"
    ),
    "train.save_steps": "save_interval save_every",
    "train.logging_steps": "log_interval",
    "eval.batch_size": "per_device_eval_batch_size eval_batch_size",
    "eval.samples": "eval.num_samples eval.max_samples max_eval_samples",
    "launch.sequence_parallel": "sequence_parallel_size context_parallel_size sp_size cp_size ulysses_size",
    "launch.tensor_parallel": "tensor_parallel_size tp_size tp",
    "launch.strategy": (
        "strategy zero_stage pipeline_parallel pipeline_parallel_size pp_size use_deepspeed use_fsdp fsdp multi_gpu"
    ),
    "launch.backend": "backend distributed_backend dist_backend",
    "launch.timeout_seconds": "ddp_timeout timeout nccl_timeout",
    "NUM_GPUS": (
        "num_gpu gpus n_gpus ngpus gpu_count world_size num_processes nproc_per_node nproc ntasks ntasks_per_node"
        " gpus_per_node launch.num_gpus gres slurm.gres"
    ),
    "NODE_RANK": "rank node_rank machine_rank",
    "NUM_NODES": "nnodes num_machines nodes launch.num_nodes",
    "MASTER_ADDR": "master_address main_process_ip rdzv_endpoint",
    "MASTER_PORT": "main_process_port",
    "RUN_NAME": "rdzv_id job_name name experiment_name train.output",
    "RUN": "run",
    "CONFIG": "config_file cfg",
    "DEEPSPEED_CONFIG": "deepspeed deepspeed_config_file",
    "CHECKPOINT": "checkpoint_path",
}
"""Key or variable -> its names elsewhere (transformers, TRL, PEFT, Axolotl, LLaMA-Factory, launchers): lower case, and
with a section if they mean it only there.
"""
MEANT: Mapping[str, str] = {
    "load_in_4bit: true": "tuning.mode: qlora",
    "quantization_bit: 4": "tuning.mode: qlora",
    **dict.fromkeys(
        ("load_in_8bit: true", "quantization_bit: 8"), "tuning.mode: qlora` and `tuning.quantization: int8"
    ),
    **{
        f"{name}: {mode}": f"tuning.mode: {mode}"
        for name in ("adapter", "finetuning_type")
        for mode in ("lora", "qlora", "full")
    },
    **dict.fromkeys(("adapter: ", "adapter: null"), "tuning.mode: full"),
    **dict.fromkeys(("sample_packing: false", "neat_packing: false"), "train.packing: off"),
    **dict.fromkeys(("use_peft: true", "use_lora: true", "peft_type: lora"), "tuning.mode: lora"),
    "use_peft: false": "tuning.mode: full",
    "use_qlora: true": "tuning.mode: qlora",
    "use_dora: true": "tuning.lora.variant: dora",
    "use_dft_loss: true": "train.loss: dft",
    "stage: pt": "tuning.task: cpt",
    "lora_target_linear: true": "tuning.lora.target_modules: auto",
    **{
        f"{name}: {value}": "train.loss_on: assistant"
        for name, value in (
            *(("assistant_only_loss", "true"), ("completion_only_loss", "true"), ("train_on_responses_only", "true")),
            *(("train_on_inputs", "false"), ("train_on_prompt", "false"), ("roles_to_train", "[assistant]")),
        )
    },
    **dict.fromkeys(("train_on_inputs: true", "train_on_prompt: true"), "train.loss_on: all"),
    "mask_history: true": "train.loss_on: last",
    **dict.fromkeys(
        ("flash_attention: true", "use_flash_attention_2: true", "flash_attn: auto"),
        "model.attn_implementation: auto",
    ),
    "flash_attn: fa2": "model.attn_implementation: flash_attention_2",
    "flash_attn: sdpa": "model.attn_implementation: sdpa",
    "gradient_checkpointing: unsloth": "train.gradient_checkpointing: true",
    "enable_liger_kernel: true": "train.kernels: liger",
    "use_unsloth: true": "tuning.backend: unsloth",
    "saves_per_epoch: 1": "train.save_strategy: epoch",
    "evals_per_epoch: 1": "train.eval_strategy: epoch",
}
"""Name and value elsewhere -> key and value that do the same here, where the value is another word."""
ALIASES = {name.replace(".", "_"): key for key, names in ELSEWHERE.items() for name in names.split()}

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
    "learning_rate_scaling": "it was removed in 0.2.0: type the `train.learning_rate` that goes with the batch",
    "bench": "it was removed in 0.2.0: run `make bench` on each machine",
    **dict.fromkeys(("spike_guard", "spike_factor"), "it was removed in 0.2.0: `train.max_grad_norm` bounds each step"),
    **dict.fromkeys(
        ("benchmarks", "benchmark_limit"),
        "it was removed in 0.2.0: `lm_eval --model hf` scores what `make merge` writes",
    ),
}
"""Commands, keys, variables and values of 0.1.0 -> what replaces them; kept for one release."""
STAGES = "`train-distributed LAUNCH_STRATEGY=pipeline` puts consecutive layers on GPUs one after the other"
OF_ZERO = "`LAUNCH_STRATEGY=zero2` (or `zero1`, `zero3`), or the command says so: `train-deepspeed`"
PREFERENCES = (
    "training on preferences or rewards is not supported; `columns: {completion: chosen}` of a source learns the chosen"
    " answers"
)
INSTEAD: dict[str, str] = REMOVED | {
    **dict.fromkeys(
        ("dpo", "rl", "rlhf", "kto", "orpo", "simpo", "cpo", "ipo", "grpo", "ppo", "rm", "reward", "reward_model"),
        PREFERENCES,
    ),
    **dict.fromkeys(("pref_beta", "pref_loss", "pref_ftx", "dpo_beta", "rl_beta", "ref_model"), PREFERENCES),
    **dict.fromkeys(
        ("sample_packing", "neat_packing"),
        "`train.packing: on`; a step then still counts rows, not packs: for as many tokens, raise"
        " `train.global_batch_size` to the rows that those packs hold",
    ),
    **dict.fromkeys(
        ("elasticpolicy", "elastic_policy", "kubernetes_elastic_policy"),
        "a job has the fixed number of pods that NUM_NODES says, and `kubernetes.max_restarts` starts them again",
    ),
    "evals_per_epoch": "`train.eval_steps` counts steps, and `train.eval_strategy: epoch` evaluates after each epoch",
    "saves_per_epoch": "`train.save_steps` counts steps, and `train.save_strategy: epoch` saves after each epoch",
    "strict": "omit it: unknown keys are always refused",
    "dataset_prepared_path": "omit it: prepared rows are cached, and `export SFT_PLAY_CACHE=folder` moves all caches",
    "trust_remote_code": "omit it, or `model.trust_remote_code: true` for a model that brings code",
    "adapter": "`MODEL_ADAPTER=RUN` trains on from an adapter, and `TUNING_MODE=lora` trains a new one",
    "tools": 'they are given with each row, `{"messages": [...], "tools": [...]}`: make infer INPUT=rows.jsonl',
    "pipeline": STAGES,
    "pp": STAGES,
    "zero": OF_ZERO,
    "cpu": "the CPU is used where no GPU is seen; `export CUDA_VISIBLE_DEVICES=` hides GPUs",
    "gpu_ids": "`export CUDA_VISIBLE_DEVICES=0,1` chooses GPUs, and each command uses those that it sees",
    "output_dir": "`export RUNS_DIR=folder` moves all runs; in it RUN_NAME= names a run",
    "runs_dir": "`export RUNS_DIR=folder` moves all runs",
    **dict.fromkeys(
        ("max_samples", "max_train_samples"),
        "`rows` of an entry of `data.sources` limits what is trained, and `eval.samples` what is answered",
    ),
    "dataset": "`data.train_path` takes a file, a folder or a hub dataset, and `data.sources` several",
    **dict.fromkeys(("model_type", "tokenizer_type"), "omit it: the files of the model say it"),
    **dict.fromkeys(
        ("pad_to_sequence_len", "eval_sample_packing", "group_by_length"),
        "omit it: the plan chooses between padded, flattened and packed rows (`train.packing`)",
    ),
    **dict.fromkeys(
        ("overwrite_output_dir", "overwrite_cache"),
        "omit it: each run has a new folder, and data are prepared again when they or their settings change",
    ),
    "plot_loss": "omit it: `report.html` of each run plots its losses",
    "dataset_dir": "paths of `data.sources` count from the folder in which you type the command",
    "special_tokens": "omit it: a tokenizer brings its own, and `data.new_tokens` adds others",
    "dataset_text_field": "`columns: {text: NAME}` of an entry of `data.sources` names the column",
    **{
        name: f"trackers read their own variables: `export {name.upper()}=...` (docs/watching.md)"
        for name in ("wandb_project", "wandb_entity", "wandb_name", "wandb_run_id", "wandb_watch", "wandb_log_model")
    },
    **dict.fromkeys(
        ("eos_token", "bos_token", "pad_token", "unk_token"),
        "omit it: the tokenizer has it, and `data.chat_template` says how turns end",
    ),
    "sft_play_cache": "`export SFT_PLAY_CACHE=folder` moves all caches",
}
"""Names and values that are neither key nor variable here -> what to use instead."""
VALUES: Mapping[str, str] = INSTEAD | {
    "deepspeed": OF_ZERO,
    "alpaca": "`format: instruction` is that, and `auto` finds it by the columns",
    **dict.fromkeys(
        ("chat_template", "chatml", "openai"), "`format: messages` is that, and `auto` finds it by the columns"
    ),
    "completion": "`format: text` is learnt completely (`tuning.task: cpt`), `prompt_completion` has answers",
}
OF_PROGRAMS = re.compile(r"(CUDA|NCCL|GLOO|OMP|HF|TRANSFORMERS|TOKENIZERS|TORCH|PYTORCH|WANDB|MLFLOW|COMET|AIM)_\w+")
"""Variables that other programs read from the environment."""
OWN_VARIABLES = frozenset({
    "CACHE", "SERVE_TOKEN", "MAX_RESTARTS", "TIME_SCALE",
    "CAUSE_FILE", "CONSENT", "FETCH", "LAUNCH", "OWN_FOLDER", "PANEL", "PREPARED",
})  # fmt: skip
"""Variables of this program in the environment, without `SFT_PLAY_`: users set the first ones, processes the others."""


VARIABLES: Mapping[str, str] = {
    "CONFIG": "a YAML file or a preset's name",
    "RUN": "a run's name or folder",
    "CLUSTER": "an inventory of machines, see docs/home-cluster.md",
    "CLUSTER_HOSTS": "the hosts of the inventory to use, in this order",
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
    "ACCELERATE_CONFIG": "a file of accelerate, see docs/launching.md#your-own-accelerate-config",
    "DEEPSPEED_CONFIG": "a DeepSpeed JSON, see docs/launching.md#your-own-deepspeed-json",
    "HARDWARE": "hardware to plan for, see docs/planning.md",
    "SOURCE": "source of the memory figures: `formula`, `trace` or `probe`, see docs/planning.md",
    "PRICE_PER_HOUR": "price of one machine, for the cost of the run, see docs/forecast.md",
    "SWEEP": "YAML file of a sweep: `metric`, `keys` with their values; see docs/watching.md",
    "SLURM": "`1` makes a sweep one Slurm job array, see docs/slurm.md",
    "WHY": "`1` shows the plan's reasons and the launch's variables; `plan`, `slurm` and `kubernetes` show reasons"
    " unless it is `0`",
    "TENSORBOARD_PORT": "instead of 6006; the next free port if taken",
    "MIXED_PRECISION": "answer for `setup-accelerate`: `no`, `bf16` or `fp16`",
    "STRATEGY": "answer for `setup-accelerate`",
    "RANK": "rank whose log is shown (0)",
    "FOLLOW": "`1` follows the log until the run ends",
    "PROMPT": "one question, see docs/use.md",
    "SYSTEM": "system turn for questions without one; `trained`: that of all training rows",
    "INPUT": "a file of questions",
    "OUTPUT": "the file for the answers",
    "OUT": "what is written: a folder for `merge` and `kubernetes`, else a file",
    "HOST": "address to listen on (127.0.0.1); with another one `serve` and `ui` need a token, see docs/security.md",
    "PORT": "port of `serve` (8000) or `ui` (8600); the next free port if taken",
    "A": "a run, checkpoint or model (`NAME`, `NAME@step-000040`, `NAME@model`, a folder) whose stamp is compared",
    "B": "with this one's",
    "SPLIT": "rows that `inspect` shows: `train` or `validation`",
    "SEARCH": "only rows with these words",
    "HTML": "`1` writes a page, see docs/data.md",
    "SUBMIT": "`1` submits the script with `sbatch`, see docs/slurm.md",
    "REPO": "a hub repository, `owner/name`",
    "YES": "`1`: `push` uploads",
    "MERGED": "`1`: `push` takes the weights that `merge` wrote into the run's folder",
    "PRIVATE": "`0`: `push` makes a public repository",
    "RUNS": "runs to compare",
    "METRIC": "the score to compare by",
    "ROWS": "number of answers or rows shown",
    "JSON": "`1` prints JSON instead of text",
}
"""Name -> meaning, as `sft-play COMMAND --help` shows it."""


def suggest(name: str, section: str = "", options: Iterable[str] = VARIABLES) -> str | None:
    """Return the key (`train.learning_rate`) or variable (`NUM_GPUS`) that `name` probably means, or `None`.

    `name` may be a YAML key, dotted or not, a variable or a flag; `section` is the section that it is in.
    """
    word, names = plain_word(name), _known(frozenset(options))
    if find_key(name.lstrip("-").lower()):
        return name.lstrip("-").lower()
    if word in sections() and not section:
        return None
    section = section.replace(".", "_") or _section_of(word)
    leaf = word.removeprefix(f"{section}_")
    whole = f"{section}_{leaf}" if section else word
    for candidate in (whole, leaf, word.rpartition("_")[2] if "." in name else leaf):
        if candidate in names:
            return names[candidate]
    longer = {key for word, key in names.items() if word.startswith(f"{whole}_")}
    if len(longer) == 1:
        return longer.pop()
    for candidate, cutoff in ((whole, 0.87), (leaf, 0.75)):
        if close := get_close_matches(candidate, names, n=1, cutoff=cutoff):
            return names[close[0]]
    return None


def plain_word(name: str) -> str:
    """Normalise a key, flag or variable: `--rdzv-endpoint` becomes `rdzv_endpoint`, `tuning.rank` `tuning_rank`."""
    return name.strip().lstrip("-").replace("-", "_").replace(".", "_").lower()


def _section_of(word: str) -> str:
    """Return the longest section that a word begins with, or an empty string."""
    names = [section.replace(".", "_") for section in sections() if section]
    return max((name for name in names if word.startswith(f"{name}_")), key=len, default="")


@functools.cache
def _known(options: frozenset[str]) -> Mapping[str, str]:
    """Return word -> key or option for the last part of each key (a key of training wins), names elsewhere, options and
    complete keys.
    """
    keys = [*schema_keys(), *extra_keys()]
    of_training = [key for key in keys if key.startswith("train.")]
    names = {key.rpartition(".")[2]: key for key in reversed([*of_training, *keys])}
    names |= {alias: key for alias, key in ALIASES.items() if not key.isupper() or key in options}
    names |= {option.lower(): option for option in options}
    return names | {variable_name(key).lower(): key for key in keys}


def refusal(key: str, place: str | None = None, spell: Callable[[str], str] = str) -> UserError | None:
    """Return the error for a refused field of `TrainingArguments`, or `None`; `spell` writes the key to use instead."""
    section, _, leaf = key.partition(".")
    if section != "train" or leaf not in REFUSED:
        return None
    instead, why = REFUSED[leaf]
    return UserError(
        f"`{key}` is not supported: {why}", place=place, hint=f"use `{spell(instead)}`" if instead else None
    )


def closest_file(path: Path, folder: Path, typed: str = "configs") -> str | None:
    """Return a YAML file next to `path` or in `folder`, which users type as `typed`, with a similar name."""
    files = {p.stem.lower(): f"{typed}/{p.name}" for p in folder.glob("*.yaml")}
    files |= {p.stem.lower(): str(p) for ending in ("yaml", "yml") for p in path.parent.glob(f"*.{ending}")}
    close = get_close_matches(re.sub(r"\.ya?ml$", "", path.name.lower()), files, n=1, cutoff=0.65)
    return files[close[0]] if close else None


TEMPLATES = Path(__file__).parent.parent / "data" / "chat_templates"
TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")


def template_names() -> list[str]:
    """Return the names that `data.chat_template` accepts."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def unknown_template(value: str, place: str | None = None) -> UserError | None:
    """Return the error for a `data.chat_template` that is neither a template's name nor a file."""
    names = template_names()
    if value in names or "/" in value or value.endswith(TEMPLATE_SUFFIXES):
        return None
    with contextlib.suppress(OSError):  # of a name that no disk takes
        if Path(value).is_file():
            return None
    close = get_close_matches(value.lower(), names, n=1) or [name for name in names if value.lower().startswith(name)]
    meant = f"did you mean `{close[0]}`? " if close else ""
    return UserError(
        f"`data.chat_template` is `{value}`, which is neither a template's name nor a file",
        place=place,
        hint=f"{meant}names are {', '.join(names)}; anything else is the path of a Jinja file",
    )


def hint_elsewhere(name: str) -> str | None:
    """Return a hint for a name that is neither key nor variable here."""
    word, bare = _with_and_without_section(name)
    if instead := INSTEAD.get(word) or INSTEAD.get(bare):
        return instead
    if SECRET.fullmatch(name):
        return SECRETS_HINT
    return REFUSED[bare][1] if bare in REFUSED and bare not in ALIASES else None


def _with_and_without_section(name: str) -> tuple[str, str]:
    word = plain_word(name)
    return word, word.removeprefix(f"{_section_of(word)}_")


def meant_key(name: str, value: str) -> str | None:
    """Return the key and value of `MEANT` for those of another tool, with or without a section of ours."""
    return next(
        (MEANT[pair] for each in _with_and_without_section(name) if (pair := f"{each}: {value.lower()}") in MEANT), None
    )


def _instead(leaf: str, better: str | None, node: YamlNode) -> str:
    """Return what to write instead of an unknown key: the key `better`, if any, with the value if it takes that."""
    if same := meant_key(leaf, shown(node)):
        return f"did you mean `{same}`?"
    if node.value is None:
        return "omit it: it has no value"
    if elsewhere := hint_elsewhere(leaf):
        return elsewhere
    if not better:
        return "docs/configuration.md lists every key"
    key = find_key(better)
    if key and isinstance(node.value, str) and (by_value := VALUES.get(node.value.lower())) == PREFERENCES:
        return by_value
    if key and not isinstance(node.value, (dict, list)):
        takes, problems = as_meant(better, node), list[Mismatch]()
        written = takes if not isinstance(takes.value, list) else node
        convert(takes, key.annotation, better, problems)
        if not problems and not (better == "data.chat_template" and unknown_template(str(node.value))):
            return f"did you mean `{better}: {mask('', shown(written))}`?"
    return f"omit it, or set `{better}`" if node.value is False else f"did you mean `{better}`?"


def unknown_key(key: str, place: str, node: YamlNode) -> UserError:
    """Return the error for an unknown key in a file, with a suggestion if there is one."""
    if key in sections():
        return UserError(f"`{key}` is `{shown(node)}`; expected a mapping of its keys", place=place)
    if refused := refusal(key, place):
        return refused
    section, _, leaf = key.rpartition(".")
    if section == "data" and leaf in fields_of(DataSource):
        source = scalar_text([{"path": "FILE", leaf: node.plain()}])
        hint = f"it belongs to a source: `data.sources: {source}` instead of `train_path`"
        return UserError(f"unknown key `{key}`", place=place, hint=hint)
    better = suggest(leaf, section)
    if isinstance(node.value, dict):  # a section by another name, such as `training`
        named = (n for n in sections() if n not in ("", section) and leaf.lower().startswith(n.rpartition(".")[2]))
        better = next(named, better)
    return UserError(f"unknown key `{key}`", place=place, hint=_instead(leaf, better, node))
