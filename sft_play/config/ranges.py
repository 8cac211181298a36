"""Which numbers the keys take, and which fields of `TrainingArguments` are refused, with what to use in their place."""

from __future__ import annotations

from collections.abc import Mapping

from sft_play.config.types import Range

POSITIVE = Range(minimum=1)
FROM_ZERO = Range(minimum=0)
SHARE = Range(minimum=0, below=1)

RANGES: Mapping[str, Range] = {
    "model.max_seq_len": Range(minimum=8),
    "model.vocab_size": POSITIVE,
    "model.hidden_size": POSITIVE,
    "model.attention_heads": POSITIVE,
    "model.layers": POSITIVE,
    "tuning.lora.r": POSITIVE,
    "tuning.lora.alpha": Range(above=0),
    "tuning.lora.dropout": SHARE,
    "data.validation": SHARE,
    "data.num_proc": Range(minimum=1, maximum=1024),
    "train.batch_size": POSITIVE,
    "train.grad_accum": POSITIVE,
    "train.global_batch_size": POSITIVE,
    "train.epochs": Range(above=0),
    "train.max_steps": Range(minimum=1, also=-1),
    "train.learning_rate": FROM_ZERO,
    "train.warmup_ratio": Range(minimum=0, maximum=1),
    "train.warmup_steps": FROM_ZERO,
    "train.weight_decay": FROM_ZERO,
    "train.max_grad_norm": FROM_ZERO,
    "train.seed": Range(minimum=0, maximum=2**32 - 1),
    "train.ddp_bucket_cap_mb": POSITIVE,
    "train.dataloader_num_workers": FROM_ZERO,
    "train.eval_steps": POSITIVE,
    "train.generation_num_beams": POSITIVE,
    "train.generation_max_new_tokens": POSITIVE,
    "train.eval_accumulation_steps": POSITIVE,
    "train.logging_steps": POSITIVE,
    "train.save_steps": POSITIVE,
    "train.save_total_limit": POSITIVE,
    "train.adam_beta1": SHARE,
    "train.adam_beta2": SHARE,
    "train.adam_epsilon": Range(above=0),
    "train.neftune_noise_alpha": FROM_ZERO,
    "train.torch_empty_cache_steps": POSITIVE,
    "train.eval_delay": FROM_ZERO,
    "train.dataloader_prefetch_factor": POSITIVE,
    "train.early_stopping_patience": POSITIVE,
    "train.early_stopping_threshold": FROM_ZERO,
    "train.spike_factor": Range(above=1),
    "eval.max_seconds": Range(above=0),
    "eval.samples": POSITIVE,
    "eval.batch_size": POSITIVE,
    "launch.timeout_seconds": POSITIVE,
    "launch.hang_seconds": Range(above=0),
    "launch.max_restarts": FROM_ZERO,
    "launch.max_oom_retries": FROM_ZERO,
}

ROW_ORDER = "rows follow a permutation made from `train.seed`, so that any number of processes trains on the same batches"
WHOLE = "a checkpoint is always complete, so that a run can be resumed"
UPLOAD = "nothing is uploaded while training; `make merge` writes a folder that `hf upload` takes"
COMMAND = "the command says what is done"
DEVICE = "hide GPUs with `CUDA_VISIBLE_DEVICES=`"
SCORES = "evaluation is token-weighted over all ranks, with the scores of `make eval`"
LAUNCHED = "the launcher gives every process its place"

REFUSED: Mapping[str, tuple[str | None, str]] = {
    "output_dir": ("RUN_NAME", "a run's files are in `runs/RUN_NAME/`, and `RUNS_DIR` moves `runs/`"),
    "per_device_train_batch_size": ("train.batch_size", "it is named differently here"),
    "per_device_eval_batch_size": ("eval.batch_size", "it is named differently here"),
    "num_train_epochs": ("train.epochs", "it is named differently here"),
    "gradient_accumulation_steps": ("train.grad_accum", "it is named differently here"),
    "activation_checkpointing": ("train.gradient_checkpointing", "it is named differently here"),
    "activation_checkpointing_kwargs": ("train.gradient_checkpointing", "the plan decides how activations are recomputed"),
    "gradient_checkpointing_kwargs": ("train.gradient_checkpointing", "the plan decides how activations are recomputed"),
    "auto_find_batch_size": ("train.batch_size", "it would change the global batch; `auto` finds what fits and keeps it"),
    "average_tokens_across_devices": (None, "it is always on: the loss is exact over all tokens of the global batch"),
    "label_smoothing_factor": (None, "the loss is the cross entropy of the label tokens"),
    "use_cache": (None, "it is off in training and on when answers are generated"),
    "bf16_full_eval": ("train.bf16", "evaluation computes as training does"),
    "fp16_full_eval": ("train.fp16", "evaluation computes as training does"),
    "log_on_each_node": (None, "every rank has a log of its own, and rank 0 writes to the console"),
    "prediction_loss_only": ("train.predict_with_generate", SCORES),
    "eval_use_gather_object": (None, SCORES),
    "include_for_metrics": (None, SCORES),
    "batch_eval_metrics": (None, SCORES),
    "logging_nan_inf_filter": (None, "a loss that is no number stops the run"),
    "dataloader_in_order": (None, ROW_ORDER),
    "dataloader_multiprocessing_context": (None, "workers start as torch starts them on this system"),
    "save_only_model": (None, WHOLE),
    "save_on_each_node": (None, "rank 0 writes to the run folder"),
    "enable_jit_checkpoint": (None, WHOLE),
    "push_to_hub": (None, UPLOAD),
    "hub_token": (None, "give the token as the environment variable `HF_TOKEN`, which is not kept in the run folder"),
    "hub_private_repo": (None, UPLOAD),
    "hub_model_id": (None, UPLOAD),
    "hub_strategy": (None, UPLOAD),
    "hub_always_push": (None, UPLOAD),
    "hub_revision": (None, UPLOAD),
    "ignore_data_skip": (None, "a resumed run goes on with the row after the last one it trained on"),
    "restore_callback_states_from_checkpoint": (None, "a resumed run goes on to the same losses as an uninterrupted one"),
    "data_seed": ("train.seed", ROW_ORDER),
    "use_cpu": (None, DEVICE),
    "accelerator_config": (None, "the plan decides; `make plan` shows it"),
    "parallelism_config": ("launch.strategy", "the plan decides; `make plan` shows it"),
    "dataloader_drop_last": (None, "no row is ever left out; " + ROW_ORDER),
    "remove_unused_columns": (None, "rows are prepared before the run and hold only what the model takes"),
    "label_names": (None, "labels are the tokens of the answers"),
    "train_sampling_strategy": (None, ROW_ORDER),
    "length_column_name": (None, ROW_ORDER),
    "ddp_backend": ("launch.backend", "it is named differently here"),
    "ddp_timeout": ("launch.timeout_seconds", "it is named differently here"),
    "fsdp": ("launch.strategy", "`launch.strategy: fsdp2` or `make train-fsdp` shards the model"),
    "fsdp_config": ("launch.strategy", "`launch.strategy: fsdp2` or `make train-fsdp` shards the model"),
    "deepspeed": ("DEEPSPEED_CONFIG", "`make train-deepspeed DEEPSPEED_CONFIG=file.json` takes a JSON of your own"),
    "do_train": (None, COMMAND),
    "do_eval": ("train.eval_strategy", COMMAND),
    "do_predict": ("train.predict_with_generate", COMMAND),
    "resume_from_checkpoint": (None, "`make resume RUN=` goes on from the newest valid checkpoint"),
    "local_rank": (None, LAUNCHED),
}
"""Field -> (name to use, why). The plan or a command decides these, or they are named differently."""
