"""Read a run's model for answering (adapters over their base, or all weights), and merge it (`make merge RUN=`)."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken

from sft_play.config.load import load_config, read_config
from sft_play.config.schema import Config
from sft_play.errors import CheckpointError, DataError, HardwareError, UserError, first_line
from sft_play.files import (
    file_sha256,
    free_bytes,
    read_json,
    read_object,
    sync_path,
    typed_path,
    write_json,
)
from sft_play.launch.environment import visible_cards
from sft_play.launch.run_folder import find_run
from sft_play.model import kernels, lora, published
from sft_play.model.convert import embedded_folder
from sft_play.model.load import (
    bnb_settings,
    read_model,
    tell,
)
from sft_play.model.resolve import (
    check_trained,
    count_numbers,
    quantization_in,
    refuse_untrusted_code,
    resolve_model,
    runs_code,
)
from sft_play.model.tokenizer import ends_of_answers, load_tokenizer, with_chat, write_chat
from sft_play.plan.detect import compare_versions, detect
from sft_play.plan.hardware import ram_bytes
from sft_play.plan.plan import LaunchRequest, Plan, make_stamp
from sft_play.plan.ranks import devices_for
from sft_play.plan.shape import VARLEN
from sft_play.runs.adapters import made_folder
from sft_play.runs.checkpoints import kind_of, label_of, model_files, weight_files, weights_folder
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import Room, sync_below, with_spare
from sft_play.runs.prepared import ParentAdapter, Prepared, ResolvedModel, common_system, needs_system
from sft_play.runs.stamp import MADE, Purpose, Stamp, compare, refuse
from sft_play.text import as_typed, gib

if TYPE_CHECKING:
    from sft_play.config.call import Call


def best_device() -> str:
    """Return the device to answer on: the best GPU, made the only visible one, or the CPU. Raise `HardwareError`.

    A warning says why a GPU that the driver shows is not used.
    """
    hardware = detect()
    if hardware.kind == "cuda":
        indices, _ = devices_for(hardware, LaunchRequest(), wants_one=True)
        os.environ.update(visible_cards(indices, hardware.devices))
    if torch.cuda.is_available():
        return "cuda"
    if hardware.kind == "cuda":
        why = next(
            (problem.text for problem in compare_versions(hardware)),
            "torch finds none of the GPUs that the driver shows",
        )
        tell(f"warning: {why}; the CPU answers\nhint: `make doctor` says what to do")
    return "cpu"


def load_for_use(run: RunFolder, checkpoint: Path | None, device: str | torch.device | None = None) -> tuple[Any, Any]:
    """Return (model, tokenizer) in evaluation mode on `device`.

    `checkpoint` is a checkpoint's folder, or `None` for the run's final model. A quantised base is quantised again as
    in training, also for an Unsloth run, whose nf4 is the same. Raise `CheckpointError` if stamps, base and weights do
    not belong together.
    """
    device = str(device or best_device())
    folder = checkpoint or run.model
    config, plan, prepared, base = _read_run(run, folder, "infer")
    if base is None:
        model = read_model(folder, config.model, dtype=use_dtype(plan, device), attention=use_attention(plan, device))
    else:
        model = lora.read_adapter(read_base(config, plan, base, device), folder)
    tokenizer = tokenizer_of(folder, prepared.model, config)
    return to_answer(model, device), tokenizer


def _read_run(run: RunFolder, folder: Path, purpose: Purpose) -> tuple[Config, Plan, Prepared, ResolvedModel | None]:
    """Return a run's configuration, plan and prepared data, and the base of the weights in `folder` (`check_base`)."""
    config, plan, prepared = read_config(run.config).config, Plan.load(run.plan), Prepared.load(run.prepared)
    return config, plan, prepared, check_base(folder, config, plan, prepared, purpose)


def find_plain(call: Call, name: str) -> tuple[Config, ResolvedModel]:
    """Return the configuration and record of a plain model, downloaded if needed. Raise `UserError`, `DataError`."""
    from sft_play.config.call import note_consent
    from sft_play.config.layers import Override
    from sft_play.plan.architecture import offline_unless_reachable

    loaded = load_config(None, [Override(key="model.name", text=name, origin=f"MODEL={name}"), *call.overrides])
    note_consent(loaded)
    if not typed_path(name).is_dir():
        offline_unless_reachable()
    settings = loaded.config.model
    model = resolve_model(settings)
    if not (settings.trust_remote_code and runs_code(Path(model.path))):
        refuse_untrusted_code(Path(model.path), name)
    return loaded.config, model


def load_plain(config: Config, model: ResolvedModel) -> tuple[Any, Any]:
    """Return (model, tokenizer) of `find_plain` in evaluation mode on the best device, in its stored dtype."""
    device, folder = best_device(), Path(model.path)
    stored = stored_dtype(folder)
    dtype = torch.float32 if stored == "float16" and device == "cpu" else getattr(torch, stored)
    network = read_model(folder, config.model, dtype=dtype)
    tokenizer = load_tokenizer(folder, trust=config.model.trust_remote_code)
    return to_answer(network, device), tokenizer


def stored_dtype(folder: Path) -> str:
    """Return the dtype of a folder's weights by its `config.json`, or `float32` if that does not say."""
    config = read_json(folder / "config.json")
    text = config.get("text_config") or {}
    name = str(
        config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or "float32"
    )
    return name if name in ("float32", "bfloat16", "float16") else "float32"


def check_base(folder: Path, config: Config, plan: Plan, prepared: Prepared, purpose: Purpose) -> ResolvedModel | None:
    """Compare the stamp of `folder` with the run and its current base; return the base, or `None` for full weights.

    Differences that matter less are printed as warnings. Raise `CheckpointError` if they do not belong together, or if
    there are no weights.
    """
    kind = kind_of(folder)
    if kind is None:
        hint = "the run has not published any, or they were removed"
        raise CheckpointError("there are no weights here", place=str(folder), hint=hint)
    check_trained(folder)
    base = current_base(config, prepared) if kind == "adapter" else prepared.model
    now = make_stamp(config, plan, replace(prepared, model=base))
    tell(*refuse(compare(Stamp.load(folder), now, purpose), f"`{folder.name}`"))
    return base if kind == "adapter" else None


def current_base(config: Config, prepared: Prepared) -> ResolvedModel:
    """Return the run's current base: in its old place with today's fingerprint, or downloaded again."""
    folder, source = Path(prepared.model.path), prepared.model.source
    if source != "folder" and (folder / "config.json").is_file():  # in a cache, named by its content
        return prepared.model
    if source == MADE:
        here = made_folder(folder.name)
        if not (here / "config.json").is_file():
            raise CheckpointError(
                "the base, which the preparation made, is not in the cache",
                place=str(folder),
                hint="`make data` with RUN= of this run makes it again",
            )
        return replace(prepared.model, path=str(here))
    if source == "embedded":  # even if the hub is reachable now, since its files are not rounded to 4 bits
        return replace(prepared.model, path=str(embedded_folder()))
    name = prepared.model.path if source == "folder" else prepared.model.name
    revision = prepared.model.revision or config.model.revision
    again = resolve_model(replace(config.model, name=name, revision=revision))
    return with_chat(replace(again, name=prepared.model.name), prepared.model.chat)


def require_same_base(config: Config, prepared: Prepared) -> ResolvedModel:
    """Return the run's base, with the files of the training. Raise `CheckpointError` if they have changed."""
    base = current_base(config, prepared)
    for what, then, now in (
        ("weights or configuration", prepared.model.fingerprint, base.fingerprint),
        ("tokenizer or chat template", prepared.model.tokenizer_fingerprint, base.tokenizer_fingerprint),
    ):
        if then != now:
            raise CheckpointError(
                f"the {what} of the base have changed since the run: they were `{then[:12]}...` and are"
                f" `{now[:12]}...`",
                place=base.path,
                hint="restore the base model's files; MODEL= scores them as they are now",
            )
    return base


def read_base(config: Config, plan: Plan, base: ResolvedModel, device: str) -> Any:
    """Return the base as in training, on `device`: quantised in the same way, or plain."""
    folder = Path(base.path)
    settings = None
    if config.tuning.mode == "qlora" and not quantization_in(folder):
        settings = bnb_settings(config.tuning, replace(plan, strategy="single"))
    return read_model(
        folder,
        config.model,
        dtype=use_dtype(plan, device),
        attention=use_attention(plan, device),
        quantization_config=settings,
        device=device if device != "cpu" else None,
    )


def tokenizer_of(weights: Path, base: ResolvedModel, config: Config) -> Any:
    """Return the tokenizer published with trained weights, or else the base's with the run's template."""
    own = has_tokenizer(weights)
    chat = None if own else base.chat
    return load_tokenizer(weights if own else base.path, chat, trust=config.model.trust_remote_code, base=base.path)


def has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").is_file()


def to_answer(model: Any, device: str) -> Any:
    """Return the model on `device`, ready to generate; bitsandbytes has placed its weights and refuses `.to`."""
    if not (getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)):
        model = model.to(device)
    model.config.get_text_config().use_cache = True
    return model.eval()


def use_dtype(plan: Plan, device: str) -> torch.dtype:
    """Return the dtype to answer in: on a GPU the training's compute dtype, on a CPU its weights' dtype, not fp16."""
    if device.startswith("cuda") and plan.precision != "fp32":
        return kernels.COMPUTE_TYPES[plan.precision]
    return torch.float32 if plan.weights_dtype == "float16" else getattr(torch, plan.weights_dtype)


def use_attention(plan: Plan, device: str) -> str | None:
    """Return the training's attention kernel, or `None` for the family's default if it needs a GPU or a training."""
    trained = plan.attn_implementation
    return trained if trained == "eager" or (device.startswith("cuda") and trained != VARLEN) else None


# Merge adapters into their base at full precision, into a model that any tool loads, and compare the answers.


EXACT = 1e-4
"""Largest allowed difference of logits, as a share of the largest logit, for float32 sums in another order."""
ROUNDED = 0.05
"""The same for weights that are rounded to 16 bits when saved."""
PROMPTS = (
    "What is a file?",
    "Write one line of Python that adds two numbers.",
    "Name three colours, and say which you like.",
)
"""Prompts for the comparison of both models."""


def merge(run: RunFolder, weights: Path, out: Path) -> dict[str, Any]:
    """Publish the merged model of `weights` (a run's `model/` or a checkpoint) as `out`; copy a full model.

    Return `folder`, `step`, `dtype`, `parameters` and `size_bytes`; for adapters also the largest `difference` between
    the merged and the adapter model's logits in float32, the same for the model read again (`saved_difference`), and
    the `largest_logit`, which are `None` for a full model. The folder is written under a temporary name, read again,
    compared and renamed. `out` must not exist. Raise `HardwareError` for too little disk or memory, `CheckpointError`
    if the merged model answers differently from the adapter model.
    """
    config, _, prepared, base = _read_run(run, weights, "merge")
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        merged = (
            _merge_adapter(config, Path(base.path), weights, tokenizer_of(weights, base, config), partial)
            if base
            else _copy_full(config, prepared, weights, partial)
        )
        _stamp(run, weights, partial)
        published.let_all_read(partial)
        sync_below(partial)
        partial.rename(out)
        sync_path(out.parent)
    except OSError as error:
        raise HardwareError(
            f"the merged model cannot be written: {error.strerror or error}",
            place=str(out),
            hint="OUT= names another place",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {"folder": str(out), "step": Stamp.load(out).step, **merged}


def _copy_full(settled: Config, prepared: Prepared, weights: Path, partial: Path) -> dict[str, Any]:
    _require_disk(partial, _size(weights))
    for path in model_files(weights):
        shutil.copy2(path, partial / path.name)
    if not (settled.model.trust_remote_code and runs_code(weights)):
        refuse_untrusted_code(weights, str(weights))
    elif any(weights.rglob("*.py")):
        published.copy_modules(weights, partial)
    tokenizer = tokenizer_of(partial, prepared.model, settled)
    if not has_tokenizer(partial):
        tokenizer.save_pretrained(partial)
    settings = partial / "generation_config.json"
    write_json(settings, read_object(settings) | ends_of_answers(tokenizer))
    compared = dict.fromkeys(("difference", "saved_difference", "largest_logit"))
    return {
        "dtype": stored_dtype(weights),
        "parameters": count_numbers(weights),
        "size_bytes": _size(partial),
        **compared,
    }


def write_merged_base(config: Config, base: ResolvedModel, adapter: ParentAdapter, target: Path) -> None:
    """Write the base with an adapter merged as by `make merge`."""
    tokenizer = load_tokenizer(base.path, trust=config.model.trust_remote_code)
    _merge_adapter(config, Path(base.path), Path(adapter.path), tokenizer, target)


def write_with_new_tokens(config: Config, base: ResolvedModel, target: Path) -> None:
    """Write the base with rows for `data.new_tokens`. Raise `DataError` for an existing token.

    Each row starts at the mean of the pieces into which the token was split. A vocabulary padded to a multiple stays
    padded.
    """
    tokens, folder = list(config.data.new_tokens), Path(base.path)
    tokenizer = load_tokenizer(folder, trust=config.model.trust_remote_code)
    if present := next((token for token in tokens if token in tokenizer.get_vocab()), None):
        raise DataError(
            f"`data.new_tokens` names `{present}`, which the vocabulary of `{base.name}` has",
            hint="omit it: it is one token",
        )
    if existing := quantization_in(folder):
        raise DataError(
            f"`data.new_tokens` needs plain embeddings, and the base is quantised ({existing})",
            hint="use the unquantised model; `tuning.mode: qlora` quantises it",
        )
    dtype = stored_dtype(folder)
    model = read_model(folder, config.model, dtype=getattr(torch, dtype))
    pieces = {token: tokenizer(token, add_special_tokens=False)["input_ids"] for token in tokens}
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=math.gcd(rows, 128), mean_resizing=False)
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    tables = {id(part): part.data for end in ends for part in end.parameters()}
    for table in tables.values():
        for token, before in pieces.items():
            table[tokenizer.convert_tokens_to_ids(token)] = table[before].float().mean(0).to(table.dtype)
    _save(model, tokenizer, target, dtype)


def _merge_adapter(config: Config, folder: Path, weights: Path, tokenizer: Any, partial: Path) -> dict[str, Any]:
    """Write the base in `folder` with the adapter `weights` merged into it; return the facts of `merge`."""
    prompts = [_ids(tokenizer, prompt) for prompt in PROMPTS]
    model = lora.read_adapter(_full_precision_base(config, folder, partial), weights).eval()
    adapter_logits = _logits(model, prompts)
    try:
        model = model.merge_and_unload()
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"PEFT cannot merge this adapter: {first_line(error)}",
            place=str(weights),
            hint="`tuning.adapter: continue`, `infer`, `eval` and `serve` take it as it is",
        ) from error
    merged_logits = _logits(model, prompts)
    scale, difference = _compare(merged_logits, adapter_logits, EXACT, "the merged model")
    tell(
        f"merged in float32: logits differ by at most {difference:.2e} from the adapter model's (allowed"
        f" {EXACT * scale:.2e})"
    )
    dtype = "float32" if quantization_in(folder) else stored_dtype(folder)
    parameters = sum(p.numel() for p in model.parameters())
    _save(model, tokenizer, partial, dtype)
    del model
    gc.collect()
    allowed = EXACT if dtype == "float32" else ROUNDED
    saved = read_model(partial, config.model, dtype=getattr(torch, dtype)).eval()
    _, saved_difference = _compare(_logits(saved, prompts), adapter_logits, allowed, "the saved model")
    tell(f"saved as {dtype} and read again: at most {saved_difference:.2e} (allowed {allowed * scale:.2e})")
    return {
        "dtype": dtype,
        "parameters": parameters,
        "size_bytes": _size(partial),
        "difference": difference,
        "saved_difference": saved_difference,
        "largest_logit": scale,
    }


def _full_precision_base(config: Config, folder: Path, partial: Path) -> Any:
    """Return the base in float32, from its own weights, or from quantised ones if there are no others."""
    existing = quantization_in(folder)
    parameters = count_numbers(folder, four_bit=existing.startswith("bitsandbytes") and not existing.endswith("int8"))
    if (needed := 4 * parameters) > (free := ram_bytes()[1]):
        raise HardwareError(
            f"merging in float32 needs {gib(needed)} of memory and {gib(free)} are free",
            hint="merge on a machine with more memory; `infer` and `eval` work without merging",
        )
    _require_disk(partial, parameters * (4 if existing else getattr(torch, stored_dtype(folder)).itemsize))
    if not existing:
        if config.tuning.mode == "qlora":
            tell(
                "QLoRA: the base is read again unquantised; the adapters, trained and scored on its quantised form, are"
                " merged into that, and answer a little differently"
            )
        return read_model(folder, config.model, dtype=torch.float32)
    tell(f"the base exists only quantised ({existing}): its weights are dequantised to float32 and merged")
    return read_model(folder, config.model, dtype=torch.float32).dequantize()


def _save(model: Any, tokenizer: Any, partial: Path, dtype: str) -> None:
    """Write weights, configuration, tokenizer with template, and the base's other files."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    model.config.dtype = dtype
    model.config.get_text_config().use_cache = True
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    # Hidden because transformers would import it, which takes seconds.
    hides = sys.modules.setdefault("deepspeed", None) is None  # type: ignore[arg-type]
    model.save_pretrained(partial)
    if hides:
        del sys.modules["deepspeed"]
    tokenizer.save_pretrained(partial)
    published.copy_code(model, partial)
    published.complete(model, tokenizer, partial)


def _stamp(run: RunFolder, weights: Path, partial: Path) -> None:
    sums = {path.name: file_sha256(path) for path in weight_files(weights)}
    source = {"run": run.name, "weights": label_of(run, weights), "sha256": sums}
    write_json(partial / "stamp.json", {**read_object(weights / "stamp.json"), "merged_from": source})


def _ids(tokenizer: Any, prompt: str) -> torch.Tensor:
    text = write_chat(tokenizer, [{"role": "user", "content": prompt}], add_generation_prompt=True)
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])


def _logits(model: Any, prompts: list[Any]) -> list[Any]:
    with torch.no_grad():
        return [model(input_ids=ids, use_cache=False).logits.float() for ids in prompts]


def _compare(merged: list[Any], expected: list[Any], allowed: float, what: str) -> tuple[float, float]:
    """Return the largest logit and the largest difference. Raise `CheckpointError` above the share `allowed`."""
    scale = max(float(logits.abs().max()) for logits in expected)
    difference = max(float((a - b).abs().max()) for a, b in zip(merged, expected, strict=True))
    if not difference <= allowed * scale:
        raise CheckpointError(
            f"{what} does not answer like the adapter model: logits differ by {difference:.3g}, and at most "
            f"{allowed * scale:.3g} ({allowed:g} of the largest, {scale:.3g}) is allowed; nothing was published"
        )
    return scale, difference


def _require_disk(place: Path, needed: int) -> None:
    room = Room(with_spare(needed), free_bytes(place))
    if not room.enough:
        hint = "free some disk space, or name a place on another disk with OUT="
        raise HardwareError(f"there is no space for the merged model: {room}", place=str(place.parent), hint=hint)


def _size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.iterdir() if p.is_file())


def _next_steps(out: Path) -> str:
    """Return commands that use a merged model; one with its own code must be trusted in each of them."""
    coded = any(out.rglob("*.py"))
    model = as_typed(out)
    infer = f"make infer MODEL={model} PROMPT=..." + (
        " MODEL_TRUST_REMOTE_CODE=true" if coded else f", make serve MODEL={model}"
    )
    vllm, python = (" --trust-remote-code", ", trust_remote_code=True") if coded else ("", "")
    python = f'`AutoModelForCausalLM.from_pretrained("{out}"{python})`'
    return f"next: {infer}, `vllm serve {shlex.quote(str(out))}{vllm}`, or in Python {python} of transformers"


def main(call: Call) -> int:
    """Merge, and show the comparison and the model's folder."""
    if "RUN" not in call.options:
        raise UserError("`RUN` is missing", hint="make merge RUN=name-of-a-run")
    run = find_run(call.options["RUN"], writes="OUT" not in call.options)
    weights = weights_folder(run, call.options.get("CHECKPOINT"))
    out = typed_path(call.options.get("OUT") or str(run.path / "merged"))
    if out.exists():  # checked before torch is imported, which takes seconds
        raise UserError(
            f"`{out}` exists already, and a merged model overwrites nothing", hint="choose another OUT=, or remove it"
        )

    started = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # libraries print there; stdout is for the result
        merged = merge(run, weights, out)
    if call.json:
        print(json.dumps(merged))
    else:
        seconds = time.perf_counter() - started
        size = f"{merged['parameters']:,} parameters, {merged['dtype']}, {merged['size_bytes'] / 2**20:.1f} MiB"
        print(f"{out}: step {merged['step']} of the run, {size}, in {seconds:.0f} s", flush=True)
        tell(_next_steps(out))
        if (system := common_system(run)) is not None:
            tell(f"note: {needs_system(system)}: prompts need it too")
        if out == run.path / "merged":
            tell(f"to the hub: make push RUN={run.typed} REPO=owner/name MERGED=1")
    return 0
