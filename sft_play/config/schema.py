"""The configuration: frozen, typed, with each key's meaning, unit and default in one place.

People write YAML; `config.load` turns it into a `Config`. The text under each field is its documentation:
`config.reference` renders it into `docs/configuration.md` and `configs/schema.json`. `auto` means that the plan decides,
and that `plan.json` keeps the reason. One module, however long: a key is looked up here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model is tuned."""

    name: str = ""
    """Hub id (`Qwen/Qwen2.5-7B-Instruct`) or folder with `config.json`, weights and tokenizer. Required, unless `model.init: random`
    has a shape."""
    revision: str | None = None
    """Hub branch, tag or commit; the commit that was used is kept in the stamp."""
    max_seq_len: int = 2048
    """Longest row in tokens, at least 8."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the frozen or fully tuned weights; `auto` follows the hardware and the mode."""
    attn_implementation: Literal["auto", "varlen", "sdpa", "eager", "flash_attention_2", "flex_attention"] = "auto"
    """Attention kernel; `auto` on GPUs of compute capability 8.0 or more, in bf16 or fp16, is `flash_attention_2` where it is installed,
    else `varlen`, torch's own flash attention over rows of any length; on CPUs `varlen`, each row by itself; elsewhere `sdpa`."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. A model of the hub needs `model.revision` to be a full commit then.
    `SFT_MODEL_TRUST_REMOTE_CODE=true` is refused."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` starts from scratch: a Llama of the shape below (`vocab_size`, `hidden_size`, `attention_heads`, `layers`), or a model of
    `model.name`'s own shape, with random weights made from `train.seed`. Needs `tuning.mode: full`."""
    tokenizer: str | None = None
    """Folder or hub id of another tokenizer than the model's; `train` makes a byte-level BPE from the training data (from scratch
    only, and the default there where `model.name` is not given)."""
    vocab_size: int | None = None
    """From scratch: tokens of the vocabulary, the rows of the embedding."""
    hidden_size: int | None = None
    """From scratch: width of the model, a multiple of `model.attention_heads`."""
    attention_heads: int | None = None
    """From scratch: attention heads of each layer."""
    layers: int | None = None
    """From scratch: transformer layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """The shape of the adapters (`tuning.mode: lora` or `qlora`)."""

    r: int = 16
    """Rank of the adapters, at least 1."""
    alpha: float = 32.0
    """Scale: the adapter's output is multiplied by alpha / r."""
    dropout: float = 0.0
    """Dropout before the adapter, 0 to below 1."""
    target_modules: Auto | list[str] = "auto"
    """Names of the linear layers that get an adapter, a list or `q_proj,v_proj`; `auto` (or `all-linear`) is every linear layer of the text
    model but the head and a mixture's routers; its experts are typed: `experts.gate_up_proj`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningConfig:
    """How the model is tuned."""

    task: Literal["sft", "cpt", "mixed"] = "sft"
    """`sft`: conversations; `cpt`: continued pretraining on documents and plain text, every token trained; `mixed`: both."""
    mode: Literal["qlora", "lora", "full"] = "lora"
    """`qlora`: adapters over a quantised base; `lora`: adapters over the base as it is; `full`: every weight."""
    backend: Literal["bnb", "unsloth"] = "bnb"
    """Library that loads and quantises the base: bitsandbytes with PEFT, or Unsloth (one NVIDIA GPU)."""
    quantization: Literal["nf4", "int8"] = "nf4"
    """For `qlora`: 4-bit NormalFloat with double quantisation, or 8-bit integers."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """The adapters' shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """One place that rows come from."""

    path: str
    """File (json, jsonl, csv, parquet, arrow, txt, md, html, docx, pdf; also compressed), glob, folder, or hub dataset id."""
    name: str | None = None
    """What the source is called in counts and scores; its path when not given."""
    format: Literal["auto", "messages", "sharegpt", "prompt_completion", "instruction", "question_answer", "text", "tokens"] = (
        "auto"
    )
    """How a row becomes a training example; `auto` goes by the columns."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Names of the file's columns where they are not the format's own: `{question: frage, answer: antwort}`; `messages.role`,
    `messages.content` and `messages.role.user` are those within a conversation."""
    filter: str | None = None
    """Keep only the rows for which this condition over columns holds: `lang == "en" and score >= 3`."""
    weight: float | None = None
    """Share of this source in what is trained, relative to the other sources' weights, in units of `data.mix_by`."""
    rows: int | None = None
    """Take so many rows, chosen by `train.seed`, and no more."""
    split: str | None = None
    """Split of a hub dataset (`train`, `test[:500]`)."""
    config: str | None = None
    """Configuration name of a hub dataset."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset."""
    streaming: bool = False
    """Read a hub dataset row by row instead of downloading all of it first; `rows` then takes the first ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StyleConfig:
    """Text around every turn, in training, evaluation and `make infer` alike."""

    system_prefix: str = ""
    """Before every system turn."""
    system_suffix: str = ""
    """After every system turn."""
    user_prefix: str = ""
    """Before every user turn."""
    user_suffix: str = ""
    """After every user turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What the model is tuned and scored on."""

    sources: list[DataSource] = field(default_factory=list)
    """Training data, in order."""
    validation: float | list[DataSource] | None = None
    """Held-out data: sources of their own, or a fraction (0 to below 1) of the training rows, chosen by a hash of the row."""
    train_path: str | None = None
    """Short for a single entry of `data.sources`."""
    val_path: str | None = None
    """Short for a single entry of `data.validation`."""
    group_by: str | None = None
    """Column by which rows belong together (a document, an author): a group is wholly training or wholly validation."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Rows with exactly the same content as an earlier one of the split: leave out (counted), or keep."""
    overlong: Literal["error", "drop", "truncate", "truncate_answers", "split"] = "error"
    """Rows longer than `model.max_seq_len`: refuse, leave out (counted), cut (the oldest turns first, an answer never; `truncate_answers`:
    the last answer's end too), or split into several rows (a conversation between its turns, a document anywhere)."""
    bad_rows: Literal["stop", "drop"] = "stop"
    """Rows that cannot be read, or that the chat template refuses: end the preparation, or leave them out (counted). Either way one file
    holds all of them, with their places and reasons."""
    mix_by: Literal["tokens", "rows"] = "tokens"
    """What the weights of sources count."""
    exhausted: Literal["repeat", "stop"] = "repeat"
    """With weights, when a source has no more rows: `repeat` begins it again until every source was seen once; `stop` ends the epoch
    with the first source that runs dry."""
    chat_template: str | None = None
    """Another template than the tokenizer's: a name (`chatml`, `llama3`, `gemma`, `mistral`, `qwen3`, `phi3`, `zephyr`, `vicuna`,
    `alpaca`) or a Jinja file."""
    system: str | None = None
    """System turn for every conversation that has none, in training, evaluation and answers alike."""
    style: StyleConfig = field(default_factory=StyleConfig)
    """Text around every turn."""
    num_proc: int | Auto = "auto"
    """Processes that prepare the data; `auto` is the processor's cores, and one for small data."""
    sync: Literal["rsync", "shared"] = "rsync"
    """How the machines of a cluster get prepared data, base model and checkpoints: `rsync` copies what they need; `shared` expects run
    folder and cache on a file system that all of them see."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The optimisation. Every other field of the pinned `transformers.TrainingArguments` is accepted here too."""

    batch_size: int | Auto = "auto"
    """Rows (with packing: packs) per device and micro-step; `auto` is the largest that fits."""
    grad_accum: int | Auto = "auto"
    """Micro-steps per optimizer step; `auto` is what reaches the global batch."""
    global_batch_size: int | Auto = "auto"
    """Rows per optimizer step over all devices. `auto` is the product where batch and accumulation are both given, else 32, or what a given
    batch makes at once where that is more."""
    packing: Literal["auto", "off", "on"] = "auto"
    """Put the rows of each global batch into as few sequences of `model.max_seq_len` tokens as fit, without attention between rows; the
    update stays the same. `auto` is on where it saves more than 10 % of the micro-steps. `true` and `false` are `on` and `off`."""
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens are learnt: every assistant turn, the last one only, or everything."""
    epochs: float = 3.0
    """Passes over the training rows."""
    max_steps: int = -1
    """Optimizer steps; -1 goes by `train.epochs`."""
    learning_rate: float | Auto = "auto"
    """Peak learning rate; `auto` is 2e-4 for adapters, 2e-5 for `full`, and 6e-4 from scratch."""
    learning_rate_scaling: Literal["none", "sqrt", "linear"] = "none"
    """How the learning rate, typed or `auto`, follows the global batch. Rates are taken as quoted for 32 rows, the default: with
    G rows a step `sqrt` multiplies by the square root of G / 32 (the rule for Adam), `linear` by G / 32 (for SGD)."""
    lr_scheduler_type: str = "cosine"
    """Schedule of transformers (`linear`, `cosine`, `constant`, `constant_with_warmup`, ...)."""
    warmup_ratio: float = 0.03
    """Share of all steps over which the learning rate rises; ignored only when `train.warmup_steps` is given."""
    warmup_steps: int | None = None
    """Steps over which the learning rate rises; replaces `train.warmup_ratio`."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; 0 is off."""
    optim: str = "auto"
    """Optimizer of transformers (`adamw_torch_fused`, `paged_adamw_8bit`, ...); `auto` goes by mode and hardware."""
    seed: int = 42
    """Seed of initialisation, order and dropout."""
    bf16: bool | Auto = "auto"
    """bfloat16 computation; `true` where the hardware lacks it is an error."""
    fp16: bool = False
    """float16 computation with loss scaling."""
    gradient_checkpointing: bool | Auto = "auto"
    """Recompute activations in the backward pass: less memory, about a third more time (half as much again with adapters)."""
    ddp_find_unused_parameters: bool = False
    """Let DDP look for parameters without a gradient."""
    ddp_broadcast_buffers: bool = False
    """Let DDP send rank 0's buffers before every forward pass."""
    ddp_bucket_cap_mb: int | None = None
    """Size of DDP's gradient buckets in MiB."""
    kernels: Literal["auto", "off", "liger"] = "auto"
    """Triton kernels for norms, rotary embeddings and SwiGLU: `auto` takes Liger's where they are installed and know GPUs and model."""
    dataloader_num_workers: int | Auto = "auto"
    """Processes that load batches, per rank; `auto` is 2 with a GPU, else 0."""
    dataloader_pin_memory: bool | Auto = "auto"
    """Copy batches to pinned memory; `auto` is on with a GPU."""
    eval_strategy: Literal["auto", "no", "steps", "epoch"] = "auto"
    """When to evaluate; `auto` is `epoch` when there are validation rows."""
    eval_steps: int | None = None
    """Optimizer steps between evaluations (`eval_strategy: steps`)."""
    predict_with_generate: bool | Auto = "auto"
    """Score generated answers (ROUGE) at each evaluation; `auto` is off while training and on in `make eval`."""
    generation_num_beams: int = 1
    """Beams; 1 is greedy."""
    generation_max_new_tokens: int = 128
    """Longest answer in tokens."""
    eval_accumulation_steps: int | None = None
    """Taken from other trainers' files, without effect: evaluation adds up losses and keeps no logits on the device."""
    eval_do_concat_batches: bool = True
    """The same: no results of batches are kept that could be joined."""
    logging_steps: int = 1
    """Optimizer steps between rows in `metrics.jsonl`."""
    save_strategy: Literal["no", "steps", "epoch"] = "steps"
    """When to write a checkpoint. One is always written at the end, unless `no`."""
    save_steps: int = 50
    """Optimizer steps between checkpoints (`save_strategy: steps`)."""
    save_total_limit: int | None = 3
    """Checkpoints kept beside the best one; older ones are removed after a newer one is complete."""
    load_best_model_at_end: bool = False
    """Publish the best checkpoint's weights in `model/`, not the last's."""
    metric_for_best_model: str = "eval_loss"
    """Which metric is best: `eval_loss` (lower), `eval_rougeL` (higher), ..."""
    early_stopping_patience: int | None = None
    """Stop after so many evaluations in a row without a better `train.metric_for_best_model`."""
    early_stopping_threshold: float = 0.0
    """How much better counts as better, for early stopping."""
    async_save: bool = False
    """Write checkpoints in the background while training goes on, where memory holds a copy of the states."""
    spike_guard: Literal["off", "report", "skip"] = "off"
    """What to do with a step whose gradient norm jumps: `report` writes it down with its rows, `skip` leaves the update out too."""
    spike_factor: float = 10.0
    """How many times the median gradient norm of the last 50 steps counts as a jump."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further `TrainingArguments`, checked against the table of the pinned release. Written directly under `train.`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """How answers are generated and scored."""

    metrics: list[str] = field(default_factory=lambda: ["rouge1", "rouge2", "rougeL"])
    """Scores of generated answers: `rouge1`, `rouge2`, `rougeL`, `bleu`, `chrf`, `exact_match`, `f1`; `evaluate:NAME` takes one of the
    `evaluate` library, from the hub or a local path."""
    max_seconds: float | None = None
    """Time for generating answers at one evaluation; what was not reached is said (`scored 180 of 500`)."""
    samples: int = 200
    """Validation rows that are answered and scored, chosen by seed; loss always uses all rows."""
    batch_size: int | Auto = "auto"
    """Prompts answered together on a device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """How processes are started."""

    strategy: Literal["auto", "ddp", "zero1", "zero2", "zero3", "fsdp2"] = "auto"
    """How the work is shared out; `auto` goes by the command and by what fits."""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """Communication library: `nccl` between GPUs, `gloo` between CPUs. `mpi` is refused: torch's wheels lack it."""
    timeout_seconds: int = 1800
    """How long a collective operation may wait for a rank."""
    hang_seconds: float | Auto = "auto"
    """How long a rank that lives may make no step before the run is ended with the stacks of all ranks. `auto` is 600 s or ten times
    the longest step so far, whichever is more, with other limits while loading, saving and evaluating."""
    max_restarts: int = 0
    """How often a launch goes on by itself from the last checkpoint after a rank was lost; 0 is never."""
    auto_resume: bool = False
    """Go on with the run of that `RUN_NAME` when it exists, so that the same command starts and continues it."""
    balance: Literal["auto", "off"] = "auto"
    """With unlike devices: give each rank the share of every step that its memory and its measured speed allow, or equal shares."""
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Send gradients between ranks in 16 bits, or as factors of low rank (DDP only)."""
    powersgd_rank: int = 4
    """Rank of the factors of `compression: powersgd`."""
    local_steps: int = 1
    """Optimizer steps that each rank makes by itself between two averages of the trained weights (DDP only, as DiLoCo does); 1 is
    ordinary training, where every step is shared."""
    outer_learning_rate: float = 1.0
    """With `launch.local_steps`: step size of the outer Nesterov optimizer; 1 with momentum 0 is the plain average of the ranks."""
    outer_momentum: float = 0.0
    """With `launch.local_steps`: momentum of the outer Nesterov optimizer. DiLoCo's 0.9, with a step size of 0.7, is for long runs."""
    network: str | None = None
    """Speed of the network between machines, such as `1Gbit`, for the plan; a cluster's inventory states it too."""
    slow_network: Literal["refuse", "allow"] = "refuse"
    """Whether a strategy that sends the weights themselves (ZeRO-3, FSDP2) may run over a network on which that takes most of the time."""
    join_seconds: int = 600
    """How long a node waits for the other nodes of a run before it gives up."""
    silent_seconds: int = 20
    """How long a machine of a run may give no sign of life before it counts as lost; more for a network that stalls."""
    elastic: str | None = None
    """`MIN:MAX` machines (`2:4`): a run continues from the last checkpoint with those that are left, and takes one that returns."""
    max_oom_retries: int = 3
    """How often a run that ran out of memory goes on by itself, with half the micro-batch and twice the accumulation; 0 is never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmConfig:
    """What `make slurm` asks the scheduler for. Nodes and GPUs come from the plan."""

    partition: str | None = None
    """Partition; the cluster's default when not given."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    time: str = "24:00:00"
    """Longest time of the job, as sbatch takes it (`days-hours:minutes:seconds`)."""
    gpu_type: str | None = None
    """Type of GPU as the cluster names it (`--gpus-per-node=TYPE:COUNT`)."""
    cpus_per_gpu: int = 8
    """CPU cores for each GPU; without GPUs, for each process."""
    memory: str | None = None
    """Memory of a node (`200G`); the partition's default when not given."""
    constraint: str | None = None
    """Feature that the nodes must have."""
    warning_seconds: int = 120
    """How long before the end of its time the run is asked to save and leave."""
    max_requeues: int = 20
    """How often a job that was preempted, ran out of time or lost a peer is queued again to go on; 0 is never."""
    array: str | None = None
    """Task indices of a job array (`0-3`, `1-10%1`): each task is a run of its own, named `RUN_NAME-INDEX`."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the launch, such as `module load cuda`. These, and nothing else, are given to a shell."""
    options: list[str] = field(default_factory=list)
    """Further sbatch options (`--exclusive`, `--mail-type=END`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesConfig:
    """What `make kubernetes` renders. Pods and GPUs come from the plan."""

    kind: Literal["pytorchjob", "trainjob", "job", "skypilot"] = "pytorchjob"
    """`pytorchjob` (Training Operator v1), `trainjob` (Trainer v2), `job` (no operator: an indexed Job), `skypilot` (a task for clouds)."""
    image: str = "sft-play:latest"
    """Container image, made by the `Dockerfile` of this project; SkyPilot machines install this folder unless it is given."""
    namespace: str | None = None
    """Namespace; that of the current context when not given."""
    models_claim: str | None = "models"
    """PersistentVolumeClaim that holds models and prepared data; read and written by all pods. SkyPilot takes only a name that is typed,
    as that of a volume (Kubernetes and RunPod), else the machine's disk."""
    runs_claim: str | None = "runs"
    """PersistentVolumeClaim that holds run folders; for SkyPilot as `kubernetes.models_claim`."""
    tracking_claim: str | None = None
    """PersistentVolumeClaim of a tracker's files (Aim), mounted at `/tracking`."""
    create_claims: bool = False
    """Render the claims too; needs `kubernetes.storage_class`."""
    storage_class: str | None = None
    """Storage class of the claims that are rendered."""
    access_mode: Literal["auto", "ReadWriteMany", "ReadWriteOnce"] = "auto"
    """Access mode of the claims that are rendered; `auto`: `ReadWriteMany` where there are several pods, else `ReadWriteOnce`."""
    storage_size: str = "200Gi"
    """Size of each claim that is rendered."""
    token_secret: str | None = None
    """Name of a Secret whose key `HF_TOKEN` holds the hub's token; the token itself never stands in a file."""
    pull_secret: str | None = None
    """Name of a Secret with which the image is pulled."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name under which the cluster counts GPUs."""
    cpus: int = 8
    """CPU cores of a pod."""
    memory: str = "64Gi"
    """Memory of a pod, `/dev/shm` included."""
    shm: str = "16Gi"
    """Size of `/dev/shm`."""
    port: int = 29500
    """Port on which the ranks meet."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels that the nodes must have."""
    replica_selectors: list[Mapping[str, str]] = field(default_factory=list)
    """Labels for the node of each pod, in order of ranks, where pods need different GPUs: a PyTorchJob's Master may differ from its
    Workers; what a kind of job cannot say is refused."""
    tolerations: list[Mapping[str, str]] = field(default_factory=list)
    """Taints of nodes that the pods bear, such as `[{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]`."""
    infiniband: bool = False
    """Use InfiniBand: asks for the rdma resource and unlimited locked memory."""
    rdma_resource: str = "rdma/ib"
    """Name under which the cluster counts InfiniBand devices."""
    rdma_count: int = 1
    """InfiniBand devices of a pod."""
    hca: str | None = None
    """Adapters for NCCL (`NCCL_IB_HCA`), such as `mlx5`."""
    max_restarts: int = 10
    """How often in a row pods that lost a peer or were killed are started again without a newer checkpoint; 0 is never."""
    finished_seconds: int = 604800
    """Seconds after its end until a finished PyTorchJob or Job is removed; a TrainJob stays until it is deleted."""
    queue: str | None = None
    """Kueue queue (label `kueue.x-k8s.io/queue-name`)."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the pods, such as NCCL's; they win over ours. No secrets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The whole configuration of a run."""

    model: ModelConfig
    tuning: TuningConfig = field(default_factory=TuningConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
