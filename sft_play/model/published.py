"""Carry over what a base's folder holds besides trained weights into every complete model made from it.

Tensors that the model's class does not load, such as a head that predicts further tokens, are carried over unchanged.
Tensors that would change the model's answers are refused, since `config.json` then describes another model. Code and
the settings of generation and processors are copied too.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import load_state_dict

from sft_play.errors import CheckpointError, DataError
from sft_play.files import read_json, read_object, write_json
from sft_play.model import parallel
from sft_play.model.tokenizer import ends_of_answers
from sft_play.plan.shape import TEXT_WITHIN
from sft_play.text import list_some

ALONE, INDEX = "model.safetensors", "model.safetensors.index.json"
TRAINED, CARRIED = "model-trained.safetensors", "model-carried.safetensors"
"""With carried tensors, the file of the trained and that of the carried ones; an index lists both."""
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

COMPUTED = re.compile(r"rotary_emb\.inv_freq|(^|\.)position_ids$|\.masked_bias$")
"""Buffers that every release of transformers computes, although old ones also saved them."""
PREDICTS = re.compile(r"(?:^|\.)(?:mtp|nextn)")
PREDICTS_IN_LAYER = re.compile(r"(.+?\.\d+)\.(?:eh_proj|enorm|hnorm|shared_head)\.")
"""Parts of a layer that predicts further tokens, listed after the model's own layers (DeepSeek V3, GLM 4.5)."""
BASE = "_base"
"""Attribute of a model that was read from a folder: its `Base`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The folder that a model was read from."""

    folder: Path
    carried: tuple[str, ...]
    """Tensors that its class does not load, by their names in the files."""
    takes_code: bool
    """Whether the folder's code runs."""


def note_base(model: Any, folder: Path, *, takes_code: bool, stage: bool = False, plain: bool = True) -> None:
    """Compare a model that was just read with the files of its folder, and store the result as its `Base`.

    A `stage` has only some of the model's layers. Without `plain` the files belong to another program, whose tensor
    names are unknown. Raise `CheckpointError` for tensors that would change its answers.
    """
    untaken: dict[str, str] = {}
    if plain:
        with torch.device("meta"):  # complete even for a stage, and neither quantised nor sharded
            outline = (type(model).__mro__[1] if stage else type(model))(copy.deepcopy(model.config))
        files = tensor_files(folder)
        untaken = _untaken(model, outline, files)
        _refuse(outline, untaken, folder)
        _untie(model, outline, files, folder, stage=stage)
    if getattr(model, "generation_config", None) is not None:  # transformers refuses to save settings without effect
        model.generation_config = GenerationConfig()
    model.__dict__[BASE] = Base(folder=folder, carried=tuple(untaken), takes_code=takes_code)


def base_of(model: Any) -> Base:
    """Return the `Base` that `note_base` stored, also for a model with adapters."""
    base: Base = getattr(parallel.without_adapters(model), BASE)
    return base


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return tensor -> file of the weights that transformers reads from a folder."""
    for alone, index in ((ALONE, INDEX), PICKLED):
        if (folder / alone).is_file():
            return dict.fromkeys(_names_in(folder / alone), folder / alone)
        if (folder / index).is_file():
            return {name: folder / file for name, file in read_json(folder / index)["weight_map"].items()}
    return {}


def _names_in(file: Path) -> list[str]:
    return list(load_state_dict(str(file), map_location="meta"))


def _read(names: Iterable[str], files: Mapping[str, Path]) -> dict[str, Tensor]:
    """Return tensors by name, unchanged from the files."""
    inside: dict[Path, list[str]] = {}
    for name in names:
        inside.setdefault(files[name], []).append(name)
    tensors: dict[str, Tensor] = {}
    for file, file_names in inside.items():
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in file_names}
        else:
            loaded = load_state_dict(str(file))
            tensors |= {name: loaded[name].clone() for name in file_names}
    return tensors


# Which tensors a class loads.


def model_class(settings: Any) -> Any:
    """Return transformers' class for a model whose text part is trained. Raise `DataError` if there is none."""
    if type(settings) in MODEL_FOR_CAUSAL_LM_MAPPING or not type(settings).__module__.startswith("transformers."):
        return AutoModelForCausalLM
    if settings.model_type in TEXT_WITHIN:
        return AutoModelForImageTextToText
    raise DataError(
        f"`{settings.model_type}` is not a language model of transformers, nor one of the image and text models whose"
        f" text part can be trained ({', '.join(sorted(TEXT_WITHIN))})",
        hint="use the text model of the same family, if there is one",
    )


def _untaken(model: Any, outline: Any, files: Mapping[str, Path]) -> dict[str, str]:
    """Return name in the files -> name in the model, for tensors that the model does not load."""
    rules = get_model_conversion_mapping(outline, hf_quantizer=getattr(model, "hf_quantizer", None))
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    places = dict.fromkeys([*outline.state_dict(), *model.state_dict()], True)
    untaken = {}
    for name in files:
        renamed, _ = rename_source_key(name, renamings, converters, outline.base_model_prefix, places)
        if renamed not in places and name not in places:
            untaken[name] = renamed
    return untaken


def _refuse(outline: Any, untaken: Mapping[str, str], folder: Path) -> None:
    """Raise `CheckpointError` for tensors of the text model or its head, unless its family is known to ignore them."""
    modules = dict(outline.named_modules())
    embedding, head = outline.get_input_embeddings(), outline.get_output_embeddings()
    text = [name.rpartition(".")[0] for name, module in modules.items() if module is embedding]
    text += [name for name, module in modules.items() if module is head]
    ignored = [re.compile(pattern) for pattern in getattr(outline, "_keys_to_ignore_on_load_unexpected", None) or ()]
    predicting = tuple(f"{match[1]}." for name in untaken if (match := PREDICTS_IN_LAYER.match(name)))

    def is_refused(name: str, renamed: str) -> bool:
        if COMPUTED.search(name) or PREDICTS.search(name) or name.startswith(predicting):
            return False
        if any(pattern.search(renamed) for pattern in ignored):
            return False
        owner = renamed
        while owner not in modules:
            owner = owner.rpartition(".")[0]
        return any(not part or owner == part or owner.startswith(f"{part}.") for part in text)

    refused = [name for name, renamed in untaken.items() if is_refused(name, renamed)]
    if refused:
        shown = list_some([f"`{name}`" for name in refused], 3)
        raise CheckpointError(
            f"the weights contain {shown}, which the model in `config.json` does not have: its answers would"
            " differ from those of the published model",
            place=str(folder),
            hint="correct `config.json`, or download the model again",
        )


def _untie(model: Any, outline: Any, files: Mapping[str, Path], folder: Path, *, stage: bool) -> None:
    """Set `tie_word_embeddings` to false if the files hold a head and an embedding that differ."""
    for tied, own in getattr(outline, "all_tied_weights_keys", {}).items():
        if not (tied in files and own in files) or torch.equal(*_read([tied, own], files).values()):
            continue
        if stage or model.get_parameter(tied) is model.get_parameter(own):  # ZeRO-3 compares nothing
            raise CheckpointError(
                f"`{tied}` and `{own}` differ, but `config.json` says `tie_word_embeddings: true`",
                place=str(folder / "config.json"),
                hint="set it to false there",
            )
        for part in (model.config, model.config.get_text_config()):
            part.tie_word_embeddings = False


# What is written in addition to weights.


def complete(model: Any, tokenizer: Any, folder: Path) -> None:
    """Add to a complete model, just saved in `folder`, what its base's folder holds and saving omits."""
    base = base_of(model)
    carry(base, folder)
    for name in PROCESSORS:
        if (base.folder / name).is_file() and not (folder / name).exists():
            shutil.copyfile(base.folder / name, folder / name)
    own, whole = read_json(folder / "config.json"), read_json(base.folder / "config.json")
    for part in (own, own.get("text_config") or {}):
        part.update({"use_cache": True} if "use_cache" in part else {})  # training had turned it off
    if own["model_type"] != whole["model_type"] and own["model_type"] == (whole.get("text_config") or {}).get(
        "model_type"
    ):
        # Only the text part was trained; the vision tower is carried over.
        own = whole | {name: own[name] for name in ("dtype", "tie_word_embeddings")} | {"text_config": own}
    write_json(folder / "config.json", own)
    settings = folder / "generation_config.json"
    before = read_object(base.folder / settings.name, follow=True) or read_object(settings)
    # Otherwise older releases of transformers may replace the file's settings by those of `config.json`.
    before.pop("_from_model_config", None)
    write_json(settings, before | ends_of_answers(tokenizer))


def carry(base: Base, folder: Path) -> None:
    """Write the carried tensors into a separate file, and an index of all files."""
    files = tensor_files(folder)
    carried = _read([name for name in base.carried if name not in files], tensor_files(base.folder))
    if not carried:
        return
    save_file(
        {name: tensor.contiguous() for name, tensor in carried.items()}, folder / CARRIED, metadata={"format": "pt"}
    )
    if (folder / ALONE).is_file():
        (folder / ALONE).rename(folder / TRAINED)
        files = dict.fromkeys(files, folder / TRAINED)
    places = {name: path.name for name, path in files.items()} | dict.fromkeys(carried, CARRIED)
    size = sum((folder / name).stat().st_size for name in set(places.values()))
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))})


def let_all_read(folder: Path) -> None:
    """Give the weights, which safetensors makes readable for the owner only, the mode of the other files."""
    usual = next(folder.glob("*.json")).stat().st_mode
    for path in folder.glob("*model*.safetensors"):
        path.chmod(usual & 0o777)


def copy_code(model: Any, folder: Path) -> None:
    """Copy all code of a custom model's base and no other, so that it is the code that the user allowed to run."""
    if base_of(model).takes_code:
        copy_modules(base_of(model).folder, folder)


def copy_modules(base: Path, folder: Path) -> None:
    """Replace the Python files of `folder` by those of `base`."""
    for path in folder.rglob("*.py"):
        path.unlink()
    for path in base.rglob("*.py"):
        target = folder / path.relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
