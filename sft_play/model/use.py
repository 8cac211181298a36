"""A run's model, read to answer: adapters over the base that they were trained over, or all weights."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from sft_play.config.schema import Config
from sft_play.errors import CheckpointError
from sft_play.files import read_json
from sft_play.launch.environment import visible_cards
from sft_play.model import quantise
from sft_play.model.load import first_lines, read_model, tell
from sft_play.model.resolve import check_trained, refuse_untrusted_code, resolve_model, runs_code
from sft_play.model.tokenizer import load_tokenizer, with_chat
from sft_play.plan.detect import compare_versions, detect
from sft_play.plan.plan import LaunchRequest, Plan, make_stamp
from sft_play.plan.request import devices_for
from sft_play.plan.shape import VARLEN
from sft_play.runs.checkpoints import kind_of
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared, ResolvedModel
from sft_play.runs.stamp import Purpose, Stamp, compare, refuse

if TYPE_CHECKING:
    from sft_play.config.call import Call


def best_device() -> str:
    """Return the device to answer on: the best GPU, which alone is visible from then on, or the CPU. Raise `HardwareError`.

    Why a GPU that the driver shows is not used is said.
    """
    hardware = detect()
    if hardware.kind == "cuda":
        indices, _ = devices_for(hardware, LaunchRequest(), wants_one=True)
        os.environ.update(visible_cards(indices, hardware.devices))
    if torch.cuda.is_available():
        return "cuda"
    if hardware.kind == "cuda":
        why = next((problem.text for problem in compare_versions(hardware)), "torch finds none of the GPUs that the driver shows")
        print(f"warning: {why}; the CPU answers\nhint: `make doctor` says what to do", file=sys.stderr)
    return "cpu"


def load_for_use(run: RunFolder, checkpoint: Path | None, device: str | torch.device | None = None) -> tuple[Any, Any]:
    """Return (model, tokenizer) in evaluation mode on `device`.

    `checkpoint` is a checkpoint's folder, or `None` for the run's final model. A quantised base is quantised again as in
    training, also for a run of Unsloth, whose nf4 is the same. Raise `CheckpointError` when stamps, base and weights do not
    belong together.
    """
    from sft_play.config.load import read_config

    device = str(device or best_device())
    folder = checkpoint or run.model
    config, plan, prepared = read_config(run.config).config, Plan.load(run.plan), Prepared.load(run.prepared)
    base = check_base(folder, config, plan, prepared, "infer")
    if base is None:
        model = read_model(folder, config.model, dtype=use_dtype(plan, device), attention=use_attention(plan, device))
    else:
        model = add_trained_adapter(read_base(config, plan, base, device), folder)
    tokenizer = tokenizer_of(folder, prepared.model, config)
    return to_answer(model, device), tokenizer


def find_plain(call: Call, name: str) -> tuple[Config, ResolvedModel]:
    """Return the configuration and the place of a model that no run made, downloaded when it must. Raise `UserError`, `DataError`."""
    from sft_play.config.call import note_consent
    from sft_play.config.layers import Override
    from sft_play.config.load import load_config
    from sft_play.plan.architecture import offline_unless_reachable

    loaded = load_config(None, [Override(key="model.name", text=name, origin=f"MODEL={name}"), *call.overrides])
    note_consent(call, loaded)
    if not Path(name).expanduser().is_dir():
        offline_unless_reachable()
    settings = loaded.config.model
    model = resolve_model(settings)
    if not (settings.trust_remote_code and runs_code(Path(model.path))):
        refuse_untrusted_code(Path(model.path), name)
    return loaded.config, model


def load_plain(config: Config, model: ResolvedModel) -> tuple[Any, Any]:
    """Return (model, tokenizer) of `find_plain` in evaluation mode on the best device, in the type that its weights are kept in."""
    device, folder = best_device(), Path(model.path)
    kept = stored_dtype(folder)
    dtype = torch.float32 if kept == "float16" and device == "cpu" else getattr(torch, kept)
    found = read_model(folder, config.model, dtype=dtype)
    tokenizer = load_tokenizer(folder, trust=config.model.trust_remote_code)
    return to_answer(found, device), tokenizer


def stored_dtype(folder: Path) -> str:
    """Return the type that a folder's weights are kept in, by its `config.json`; `float32` when it does not say."""
    config = read_json(folder / "config.json")
    text = config.get("text_config") or {}
    name = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or "float32")
    return name if name in ("float32", "bfloat16", "float16") else "float32"


def check_base(folder: Path, config: Config, plan: Plan, prepared: Prepared, purpose: Purpose) -> ResolvedModel | None:
    """Compare the stamp of `folder` with the run and with the base as it is now; return the base, `None` for full weights.

    Prints what only deserves a warning. Raise `CheckpointError` for what does not belong together, or where there are no
    weights.
    """
    kind = kind_of(folder)
    if kind is None:
        hint = "the run has not published any, or they were removed"
        raise CheckpointError("there are no weights here", place=str(folder), hint=hint)
    check_trained(folder)
    base = current_base(config, prepared) if kind == "adapter" else prepared.model
    now = make_stamp(config, plan, dataclasses.replace(prepared, model=base))
    tell(*refuse(compare(Stamp.load(folder), now, purpose), f"`{folder.name}`"))
    return base if kind == "adapter" else None


def current_base(config: Config, prepared: Prepared) -> ResolvedModel:
    """Return the run's base as it is now: in its old place with the fingerprint it has today, or fetched again."""
    kept, source = Path(prepared.model.path), prepared.model.source
    if source != "folder" and (kept / "config.json").is_file():  # in a cache, under its content's name
        return prepared.model
    if source == "embedded":  # also when the hub can be reached by now: its files are not rounded to 4 bits
        from sft_play.model.embedded import embedded_folder

        return dataclasses.replace(prepared.model, path=str(embedded_folder()))
    name = prepared.model.path if source == "folder" else prepared.model.name
    revision = prepared.model.revision or config.model.revision
    again = resolve_model(dataclasses.replace(config.model, name=name, revision=revision))
    return with_chat(dataclasses.replace(again, name=prepared.model.name), prepared.model.chat)


def require_same_base(config: Config, prepared: Prepared) -> ResolvedModel:
    """Return the run's base, whose files are those that it was trained over. Raise `CheckpointError` when they have changed."""
    base = current_base(config, prepared)
    for what, then, now in (
        ("weights or configuration", prepared.model.fingerprint, base.fingerprint),
        ("tokenizer or chat template", prepared.model.tokenizer_fingerprint, base.tokenizer_fingerprint),
    ):
        if then != now:
            raise CheckpointError(
                f"the {what} of the base have changed since the run: they were `{then[:12]}...` and are `{now[:12]}...`", place=base.path,
                hint="restore the base model's files; MODEL= scores them as they are now",
            )  # fmt: skip
    return base


def read_base(config: Config, plan: Plan, base: ResolvedModel, device: str) -> Any:
    """Return the base as training saw it, on `device`: quantised in the same way, or plain."""
    folder = Path(base.path)
    settings = None
    if config.tuning.mode == "qlora" and quantise.quantisation_of(folder) is None:
        settings = quantise.bnb_settings(config.tuning, dataclasses.replace(plan, strategy="single"))
    return read_model(
        folder,
        config.model,
        dtype=use_dtype(plan, device),
        attention=use_attention(plan, device),
        quantization_config=settings,
        device=device if device != "cpu" else None,
    )


def add_trained_adapter(base: Any, folder: Path) -> Any:
    """Return `base` with the adapter of `folder`. Raise `CheckpointError` for weights that are missing or do not fit."""
    from peft import PeftModel

    from sft_play.model import lora

    try:
        with warnings.catch_warnings(), lora.as_named():
            # An adapter whose weights are not found loads as the zero function: the model would behave as if untrained.
            warnings.filterwarnings("error", message=".*missing adapter keys.*")
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)  # peft 0.21's own
            config = lora.saved_config(base, folder)
            return PeftModel.from_pretrained(base, str(folder), config=config, is_trainable=False, autocast_adapter_dtype=False)
    except (RuntimeError, ValueError, UserWarning, OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the adapter does not fit the base model: {first_lines(error)[:400]}", place=str(folder)
        ) from error


def tokenizer_of(weights: Path, base: ResolvedModel, config: Config) -> Any:
    """Return the tokenizer that was published with trained weights, else the base's with the run's template."""
    own = has_tokenizer(weights)
    chat = None if own else base.chat
    return load_tokenizer(weights if own else base.path, chat, trust=config.model.trust_remote_code)


def has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").is_file()


def to_answer(model: Any, device: str) -> Any:
    """Return the model on `device`, ready to generate. bitsandbytes has placed its weights already and refuses `.to`."""
    if not (getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)):
        model = model.to(device)
    model.config.get_text_config().use_cache = True
    return model.eval()


def use_dtype(plan: Plan, device: str) -> torch.dtype:
    """Return the type to answer in: the training's computation type on a GPU, its weights' type on a CPU (never fp16 there)."""
    if device.startswith("cuda") and plan.precision != "fp32":
        return quantise.COMPUTE_TYPES[plan.precision]
    return torch.float32 if plan.weights_dtype == "float16" else getattr(torch, plan.weights_dtype)


def use_attention(plan: Plan, device: str) -> str | None:
    """Return the attention kernel: the training's, or `None` for the family's usual one where that one is for GPUs or training only."""
    trained = plan.attn_implementation
    return trained if trained == "eager" or (device.startswith("cuda") and trained != VARLEN) else None
