"""The weights of a checkpoint or a published model: gathered over the ranks first, written by rank 0 afterwards.

Gathering is a collective operation; writing is none, so a disk that is full on rank 0 keeps no other rank waiting. The files have one
form under every strategy: whole, as safetensors that any tool loads, with configuration, tokenizer and template.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from sft_play.files import write_text
from sft_play.runs.stamp import Stamp
from sft_play.training.holdings import local_part

if TYPE_CHECKING:
    from sft_play.training.trainer import SftTrainer


def gather_weights(trainer: SftTrainer, *, clone: bool) -> dict[str, Any] | None:
    """Returns the whole model's state dict on rank 0, `None` on the others. Collective.

    With `clone` what training goes on to change is copied to host memory, so that it can be written meanwhile.
    """
    whole = _whole_state(trainer)
    if not trainer.is_world_process_zero():
        return None
    return _copied(whole, trainer.model) if clone else whole


def write_weights(trainer: SftTrainer, weights: Mapping[str, Any], folder: Path) -> None:
    """Writes weights, configuration and tokenizer into `folder`. Rank 0 alone; may run in a thread. Raises `OSError`."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    model.save_pretrained(str(folder), state_dict=dict(weights))
    trainer.processing_class.save_pretrained(str(folder))
    write_text(folder / "README.md", model_card(trainer.stamp, trainer.run.name))
    usual = next(folder.glob("*.json")).stat().st_mode
    for path in folder.glob("*model*.safetensors"):
        path.chmod(usual & 0o777)  # safetensors writes aside, for its owner alone


def model_card(stamp: Stamp, run: str) -> str:
    """Returns what a person who finds the folder must know, in place of PEFT's empty form; no path of this machine."""
    local = stamp.base_model.startswith((".", "/", "~")) or stamp.base_model.count("/") != 1 or Path(stamp.base_model).exists()
    base = Path(stamp.base_model).name if local else stamp.base_model
    adapter = stamp.mode != "full"
    facts = "" if local else f"base_model: {base}\n"
    lora = f", rank {stamp.lora['r']}, alpha {stamp.lora['alpha']:g}" if stamp.lora else ""
    return (
        f"---\n{facts}library_name: {'peft' if adapter else 'transformers'}\npipeline_tag: text-generation\ntags: [sft-play]\n---\n\n"
        f"# {run}\n\n{'LoRA adapters over' if adapter else 'All weights, tuned from'} `{base}`, trained by SFT-Play: {stamp.mode}{lora}, "
        f"rows of up to {stamp.max_seq_len} tokens, {stamp.global_batch_size} rows a step, {stamp.precision}, seed {stamp.seed}.\n\n"
        f"Try it: `make infer RUN={run}`. `stamp.json` says all that made it.\n"
    )


def predicted_bytes(trainer: SftTrainer) -> int:
    """Returns the size of the weights that `write_weights` will write: what is trained, or the whole of a fully tuned model."""
    chosen = [p for p in trainer.model.parameters() if p.requires_grad]
    return sum(int(getattr(p, "ds_numel", p.numel())) * p.element_size() for p in chosen)


def _whole_state(trainer: SftTrainer) -> dict[str, Any]:
    if trainer.is_fsdp_enabled:
        # accelerate's own `get_state_dict` would gather a frozen base too, at every save; adapters alone are written.
        frozen = trainer.config.tuning.mode != "full"
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=frozen)
        whole = get_model_state_dict(trainer.model, options=options)
        tied = getattr(trainer.model, "all_tied_weights_keys", {})  # gathered twice: the head and the embedding that it is
        return {name: value for name, value in whole.items() if name not in tied}
    if trainer.is_deepspeed_enabled:
        if trainer.plan.strategy == "zero3" and trainer.config.tuning.mode != "full":
            return trainer.deepspeed._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        return trainer.accelerator.get_state_dict(trainer.deepspeed)
    return trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False).state_dict()


def _copied(state: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Returns `state` with every tensor that may change copied, those that share memory sharing their copy.

    Frozen parameters never change, and what was gathered is a copy already. Tied weights must stay tied: they are written once.
    """
    frozen = {_address(p) for p in model.parameters() if not p.requires_grad}
    living = {_address(p) for p in (*model.parameters(), *model.buffers())}
    copies: dict[tuple[Any, ...], Tensor] = {}
    copied: dict[str, Any] = {}
    for name, value in state.items():
        if not torch.is_tensor(value) or _address(value) not in living - frozen:
            copied[name] = value
            continue
        key = (_address(value), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        copied[name] = copies[key]
    return copied


def _address(tensor: Tensor) -> int:
    return int(local_part(tensor).untyped_storage().data_ptr())  # a DTensor's own storage has none
