"""The configuration: frozen, typed, with each key's meaning, unit and default in one place.

People write YAML; `config.load` turns it into a `Config`. The text under each field is its documentation:
`scripts/render_reference.py` renders it into `docs/configuration.md` and `configs/schema.json`. `auto` means that the
plan decides, and that `plan.json` keeps the reason. The sections `slurm` and `kubernetes` are in `config.schedulers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal

from sft_play.config.reader import FromZero, Positive, Range
from sft_play.config.schedulers import KubernetesConfig, SlurmConfig

Auto = Literal["auto"]
AboveZero = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(minimum=0)]
Share = Annotated[float, Range(minimum=0, below=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model is tuned."""

    name: str = ""
    """Hub id (`Qwen/Qwen2.5-7B-Instruct`), folder with `config.json`, weights and tokenizer, or a run with a complete
    model.
    """
    adapter: str | None = None
    """A LoRA adapter to [continue from](training.md#continue-from-an-adapter): a run, a PEFT folder, or a hub id."""
    revision: str | None = None
    """Hub branch, tag or commit."""
    max_seq_len: Annotated[int, Range(minimum=8)] = 2048
    """Longest row in tokens."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; `auto`: by hardware and mode."""
    attn_implementation: Literal["auto", "varlen", "sdpa", "eager", "flash_attention_2", "flex_attention"] = "auto"
    """[Attention kernel](training.md#what-is-fast); `auto`: the fastest possible."""
    trust_remote_code: bool = False
    """Run the model's own Python code; a hub model then needs a full commit as `model.revision`."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` trains [from scratch](pretraining.md#from-scratch), with `tuning.mode: full`."""
    tokenizer: str | None = None
    """From scratch: folder or hub id of a tokenizer, or `train`: made from the training data."""
    vocab_size: Positive | None = None
    """From scratch: vocabulary size."""
    hidden_size: Positive | None = None
    """From scratch: a multiple of `model.attention_heads`."""
    attention_heads: Positive | None = None
    """From scratch: heads per layer."""
    layers: Positive | None = None
    """From scratch: number of layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """The shape of the adapters (`tuning.mode: lora` or `qlora`)."""

    r: Positive = 16
    """Rank."""
    alpha: AboveZero = 32.0
    """The adapter's output is multiplied by alpha / r."""
    dropout: Share = 0.0
    """Dropout before the adapter."""
    target_modules: Auto | list[str] = "auto"
    """Layers with an adapter; `auto` (or `all-linear`): [all linear ones](models.md#adapters-tuninglora) but the head,
    routers and experts.
    """
    variant: Literal["lora", "dora"] = "lora"
    """`dora`: also a trained length for each output."""
    rslora: bool = False
    """Multiply by alpha / sqrt(r) instead."""
    init: Literal["default", "pissa", "olora", "orthogonal"] = "default"
    """How adapters start ([shapes](models.md#shapes-of-adapters))."""
    plus_ratio: AboveZero | None = None
    """LoRA+: learning rate of the B matrices as a multiple of the others'."""
    rank_pattern: Mapping[str, Positive] = field(default_factory=dict)
    """Ranks of modules that differ: `{down_proj: 8}`."""
    alpha_pattern: Mapping[str, AboveZero] = field(default_factory=dict)
    """Alphas of modules that differ."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules trained completely, such as `embed_tokens`."""
    embeddings: Auto | Literal["none", "new", "all"] = "auto"
    """Trained rows of embedding and head; `auto`: `new` with `data.new_tokens`."""
    bias: Literal["none", "lora_only", "all"] = "none"
    """Trained biases: of the modules with an adapter, or all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningConfig:
    """How the model is tuned."""

    task: Literal["sft", "cpt", "mixed"] = "sft"
    """`sft`: conversations; `cpt`: plain text and documents; `mixed`: both."""
    mode: Literal["qlora", "lora", "full"] = "lora"
    """Adapters on a quantised base, adapters, or every weight."""
    backend: Literal["bnb", "unsloth"] = "bnb"
    """bitsandbytes with PEFT, or Unsloth."""
    quantization: Literal["nf4", "int8"] = "nf4"
    """For `qlora`: 4-bit NormalFloat or 8-bit integers."""
    adapter: Literal["continue", "merge"] = "continue"
    """Train the weights of `model.adapter` further, or merge them into the base first."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """The adapters' shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """One place that rows come from."""

    path: str
    """[File](data.md#sources), glob, folder or hub dataset id."""
    name: str | None = None
    """Name in counts and scores; default: the path."""
    format: Literal[
        "auto", "messages", "sharegpt", "prompt_completion", "instruction", "question_answer", "text", "tokens"
    ] = "auto"
    """[Form of a row](data.md#formats); `auto`: by its columns."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The file's column names if they differ: `{question: frage}`; [inside conversations](data.md#sources) too."""
    filter: str | None = None
    """Condition for keeping a row: `lang == "en" and score >= 3`."""
    weight: float | None = None
    """Share relative to the other sources."""
    rows: Positive | None = None
    """At most this many, chosen by `train.seed`."""
    split: str | None = None
    """Split of a hub dataset (`train`, `test[:500]`) or of a folder (`train`)."""
    config: str | None = None
    """Configuration of a hub dataset, or of the README of a folder."""
    revision: str | None = None
    """Hub dataset: branch, tag or commit."""
    streaming: bool = False
    """Hub dataset: do not download it; `rows` takes the first ones."""
    ELSEWHERE = MappingProxyType(
        {  # without an annotation, which would make it a field
            **dict.fromkeys(("type", "formatting"), "format"),
            "field_messages": "columns: {messages: VALUE}",
            "message_field_role": "columns: {messages.role: VALUE}",
            "message_field_content": "columns: {messages.content: VALUE}",
            **dict.fromkeys(
                ("message_property_mappings", "tags"), "columns: {messages.role: NAME, messages.content: NAME}"
            ),
            "roles_to_train": "train.loss_on: assistant",
            "subset": "config",
            **dict.fromkeys(("share", "ratio", "proportion"), "weight"),
            "num_samples": "rows",
        }
    )
    """Names in Axolotl and LLaMA-Factory -> ours, with `VALUE` for what was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StyleConfig:
    """Text around every turn, in training, evaluation and `make infer` alike."""

    system_prefix: str = ""
    """Text before system turns, in training, evaluation and `make infer` alike."""
    system_suffix: str = ""
    """After system turns."""
    user_prefix: str = ""
    """Before user turns."""
    user_suffix: str = ""
    """After user turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What the model is tuned and scored on."""

    sources: list[DataSource] = field(default_factory=list)
    """Training data, in order."""
    validation: Share | list[DataSource] | None = None
    """Held-out data: sources, or a fraction of the training rows."""
    train_path: str | None = None
    """Short for one entry of `data.sources`."""
    val_path: str | None = None
    """Short for one entry of `data.validation`."""
    group_by: str | None = None
    """Column whose equal values never split between training and validation."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Exact repeats within a split."""
    overlong: Literal["error", "drop", "truncate", "truncate_answers", "split"] = "error"
    """[Rows longer](data.md#rows-that-are-too-long) than `model.max_seq_len`."""
    bad_rows: Literal["stop", "drop"] = "stop"
    """Rows that cannot be read or formatted."""
    mix_by: Literal["tokens", "rows"] = "tokens"
    """Unit of the sources' weights."""
    exhausted: Literal["repeat", "stop"] = "repeat"
    """With weights, when a source ends: restart it until all were seen once, or end the epoch."""
    chat_template: str | None = None
    """Instead of the tokenizer's: `chatml`, `llama3`, `gemma`, `mistral`, `qwen3`, `deepseek_r1`, `phi3`, `zephyr`,
    `vicuna`, `alpaca` or a Jinja file.
    """
    system: str | None = None
    """System turn for conversations without one."""
    style: StyleConfig = field(default_factory=StyleConfig)
    """Text around every turn."""
    new_tokens: list[str] = field(default_factory=list)
    """[Tokens to add](models.md#new-tokens) to the vocabulary: `["<tool>"]`."""
    num_proc: Annotated[int, Range(minimum=1, maximum=1024)] | Auto = "auto"
    """Preparing processes; `auto`: one per core."""
    sync: Literal["rsync", "shared"] = "rsync"
    """In a cluster: copy data, model and checkpoints, or expect run folder and cache on a shared disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileSettings:
    """Steps of a run that are measured operator by operator."""

    steps: FromZero = 0
    """How many."""
    start: Annotated[int, Range(minimum=2)] = 10
    """First of them."""
    ranks: list[FromZero] = field(default_factory=lambda: [0])
    """Ranks that write a trace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Optimisation, evaluation during training, logging and saving."""

    batch_size: Positive | Auto = "auto"
    """Rows (with packing: packs) per device and micro-step; `auto`: the most that fit."""
    grad_accum: Positive | Auto = "auto"
    """Micro-steps per optimizer step; `auto`: what reaches the global batch."""
    global_batch_size: Positive | Auto = "auto"
    """Rows per optimizer step; `auto`: 32, or what [the keys above](planning.md#the-batch) give."""
    packing: Literal["auto", "off", "on"] = "auto"
    """[Pack rows](training.md#packing) into sequences of `model.max_seq_len`; `auto`: if it saves over 10 % of
    micro-steps.
    """
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    """Trained tokens: all answers, the last one, or everything."""
    loss: Literal["nll", "dft"] = "nll"
    """What is minimised: cross-entropy, or [DFT](training.md#losses)."""
    label_smoothing_factor: Annotated[float, Range(minimum=0, below=1)] = 0.0
    """Share of each target that is spread over the vocabulary."""
    epochs: AboveZero = 3.0
    """Passes over the training rows."""
    max_steps: Annotated[int, Range(minimum=1, also=-1)] = -1
    """Optimizer steps; -1: by `train.epochs`, which counts if it is set later than steps."""
    learning_rate: Annotated[float, Range(minimum=0, maximum=10)] | Auto = "auto"
    """Peak; `auto`: 2e-4 for adapters, 2e-5 for `full`, 6e-4 from scratch."""
    lr_scheduler_type: str = "cosine"
    """[Schedule](training.md#optimizers-and-schedules) of transformers."""
    warmup_ratio: Annotated[float, Range(minimum=0, maximum=1)] = 0.03
    """Share of steps."""
    warmup_steps: FromZero | None = None
    """Instead of `train.warmup_ratio`."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    max_grad_norm: NotNegative = 1.0
    """Gradient clipping; 0: off."""
    optim: str = "auto"
    """[Optimizer](training.md#optimizers-and-schedules); `auto`: by mode and hardware."""
    seed: Annotated[int, Range(minimum=0, maximum=2**32 - 1)] = 42
    """Initialisation, order, dropout."""
    bf16: bool | Auto = "auto"
    """Compute in bfloat16; `true` is an error if unsupported."""
    fp16: bool = False
    """Compute in float16 with loss scaling."""
    gradient_checkpointing: bool | Auto = "auto"
    """Recompute activations: less memory, a third more time."""
    activation_offload: Literal["off", "on"] = "off"
    """Keep the inputs of recomputed layers in [the machine's memory](planning.md#activation-offload)."""
    ddp_find_unused_parameters: bool = False
    """As in torch's DDP."""
    ddp_broadcast_buffers: bool = False
    """As in torch's DDP."""
    ddp_bucket_cap_mb: Positive | None = None
    """DDP's gradient buckets, MiB."""
    kernels: Literal["auto", "off", "liger"] = "auto"
    """Triton kernels; `auto`: Liger if installed and supported."""
    dataloader_num_workers: FromZero | Auto = "auto"
    """Loading processes per rank; `auto`: 2 with a GPU, else 0."""
    dataloader_pin_memory: bool | Auto = "auto"
    """Pinned memory; `auto`: with a GPU."""
    eval_strategy: Literal["auto", "no", "steps", "epoch"] = "auto"
    """When to evaluate; `auto`: `epoch` with validation rows."""
    eval_steps: Positive | None = None
    """Steps between evaluations."""
    predict_with_generate: bool | Auto = "auto"
    """Score answers; `auto`: in `make eval` only."""
    generation_num_beams: Positive = 1
    """Beams; 1: greedy."""
    generation_max_new_tokens: Positive = 128
    """Longest answer in tokens."""
    eval_accumulation_steps: Positive | None = None
    """Accepted, no effect."""
    eval_do_concat_batches: bool = True
    """Accepted, no effect."""
    logging_steps: Positive = 1
    """Steps between rows of `metrics.jsonl`."""
    save_strategy: Literal["no", "steps", "epoch"] = "steps"
    """When to save; unless `no`, also at the end."""
    save_steps: Positive = 50
    """Steps between checkpoints."""
    save_total_limit: Positive | None = 3
    """Checkpoints kept besides the best."""
    load_best_model_at_end: bool = False
    """`model/` gets the best checkpoint, not the last."""
    metric_for_best_model: str = "eval_loss"
    """`eval_loss` (lower is better), `eval_rougeL` (higher), ..."""
    early_stopping_patience: Positive | None = None
    """Evaluations without improvement until the run stops."""
    early_stopping_threshold: NotNegative = 0.0
    """Smallest improvement that counts."""
    async_save: bool = False
    """Save in the background."""
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    """Where the time of some steps goes."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further `TrainingArguments`, written directly under `train.`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """How answers are generated and scored."""

    metrics: list[str] = field(default_factory=lambda: ["rouge1", "rouge2", "rougeL"])
    """[Scores](evaluation.md#what-is-measured): `rouge1`, `rouge2`, `rougeL`, `bleu`, `chrf`, `exact_match`, `f1`,
    `valid_json`, `json_match`, `accuracy`, `macro_f1`, `evaluate:NAME`.
    """
    max_seconds: AboveZero | None = None
    """Time limit for generating answers in one evaluation."""
    samples: Positive = 200
    """Validation rows that are answered; the loss uses all."""
    batch_size: Positive | Auto = "auto"
    """Prompts answered together per device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """How processes are started."""

    strategy: Literal["auto", "ddp", "zero1", "zero2", "zero3", "fsdp2", "pipeline"] = "auto"
    """Parallelism; `auto`: by [the command and what fits](planning.md#choices)."""
    stages: Positive | Auto = "auto"
    """Ranks of one pipeline; `auto`: all."""
    sequence_parallel: Positive = 1
    """Ranks that share [each row's tokens](parallelism.md)."""
    tensor_parallel: Positive = 1
    """Ranks that share each layer's weights; needs a fast link."""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """`auto`: `nccl` for GPUs, `gloo` for CPUs; `mpi` is refused."""
    timeout_seconds: Positive = 1800
    """Longest wait in a collective."""
    hang_seconds: AboveZero | Auto = "auto"
    """Longest time without a step; `auto`: 600 s or ten times the longest step."""
    max_restarts: FromZero = 0
    """Restarts after a lost rank."""
    auto_resume: bool = False
    """Continue the run `RUN_NAME` if it exists."""
    balance: Literal["auto", "off"] = "auto"
    """Unlike devices: shares by memory and speed; `off`: equal."""
    compression: Literal["none", "fp16", "bf16"] = "none"
    """Gradients in 16 bits (DDP only)."""
    local_steps: Positive = 1
    """Steps between two averages of the weights (DDP only); 1: ordinary training."""
    outer_learning_rate: AboveZero = 1.0
    """Step size of the outer optimizer of [local steps](slow-networks.md#local-steps)."""
    outer_momentum: Share = 0.0
    """Its momentum."""
    network: str | None = None
    """Speed between machines (`1Gbit`), for the plan."""
    slow_network: Literal["refuse", "allow"] = "refuse"
    """ZeRO-3 and FSDP2 if sending weights would take most of a step."""
    join_seconds: Positive = 600
    """Longest wait for other nodes."""
    silent_seconds: Positive = 20
    """Silence after which a machine counts as lost."""
    notify: str | None = None
    """[Notifications](watching.md#notifications): URL, or `$MY_NOTIFY`, a variable with a URL or a shell command."""
    max_oom_retries: FromZero = 3
    """Retries after out of memory, each with half the micro-batch."""


OWN_WORD: Mapping[str, str] = {
    "launch.notify": "a command that is run, or an address that is called",
    "slurm.setup": "shell lines of a job",
    "slurm.options": "options of sbatch, which name files and programs",
    "kubernetes.": "images, claims, Secrets and variables of pods",
    "train.report_to": "servers that receive facts of the run",
}
"""Keys (`section.`: all of a section) whose value becomes a command, a path to write or an address to call -> which.

They only count if this user typed them or wrote them in their own file, never from a run's folder (`config.load`). List
further keys of this kind here.
"""


def needs_own_word(key: str) -> bool:
    """Return whether a key is one of `OWN_WORD`."""
    return key in OWN_WORD or f"{key.partition('.')[0]}." in OWN_WORD


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The complete configuration of a run."""

    model: ModelConfig
    tuning: TuningConfig = field(default_factory=TuningConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
