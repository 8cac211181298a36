"""A model's `config.json` and shape: from a folder, the hub's cache, the hub, the table of the presets' models, or the
keys of a new model.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sft_play.config.reader import record_of
from sft_play.config.schema import ModelConfig
from sft_play.errors import DataError, UserError, first_line
from sft_play.files import read_json, text_sha256, write_json
from sft_play.plan.shape import DEFAULT_ATTENTION, FORMULA_MODEL_TYPES, TIED_BY_DEFAULT, ModelShape
from sft_play.runs.folder import OFFLINE, cache_folder, hint_gone, hub_cache, is_offline, meant_model, model_folder
from sft_play.runs.prepared import Prepared

LONG_POSITIONS = 4096
ROPE_THETA, LONG_ROPE_THETA = 10_000.0, 500_000.0


def is_scratch(model: ModelConfig) -> bool:
    """Return whether the model's shape comes from configuration keys instead of another model's `config.json`."""
    return model.init == "random" and not model.name


def trains_tokenizer(model: ModelConfig) -> bool:
    """Return whether the tokenizer is trained on the training data: on request, or by default for a new model."""
    return model.tokenizer == "train" or (is_scratch(model) and model.tokenizer is None)


def label(model: ModelConfig) -> str:
    """Return the model's name in stamps, plans and messages, where `model.name` may be empty."""
    if not is_scratch(model):
        return f"{model.name} (random weights)" if model.init == "random" else model.name
    return (
        f"from scratch ({model.layers} x {model.hidden_size}, {model.attention_heads} heads, {model.vocab_size} tokens)"
    )


def intermediate_size(hidden_size: int) -> int:
    """Return the width of the feed-forward part: 8/3 of the model's, rounded up."""
    multiple = 256 if hidden_size >= 1024 else 64
    return -(-8 * hidden_size // (3 * multiple)) * multiple


def scratch_architecture(model: ModelConfig) -> dict[str, Any]:
    """Return the `config.json` of a model whose shape the keys determine, without the ids of special tokens.

    What the keys leave open follows Llama 3: as many heads for keys and values as for queries, a gated feed-forward
    part of 8/3 of the width (Touvron et al. 2023, arXiv 2302.13971, section 2.2), no biases, tied head and embedding.
    """
    assert model.hidden_size and model.attention_heads and model.layers and model.vocab_size, (
        "checked by `config.rules`"
    )
    theta = ROPE_THETA if model.max_seq_len <= LONG_POSITIONS else LONG_ROPE_THETA
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": intermediate_size(model.hidden_size),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.attention_heads,
        "num_key_value_heads": model.attention_heads,
        "head_dim": model.hidden_size // model.attention_heads,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
    }


REACH_SECONDS = 4.0


def hub_reachable() -> bool:
    """Return whether the hub answers within a few seconds; never under `HF_HUB_OFFLINE`."""
    if is_offline():
        return False
    proxied = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    address = urlsplit(proxied or os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=REACH_SECONDS):
            return True
    except (OSError, UnicodeError):
        return False


def offline_unless_reachable() -> bool:
    """Return whether the hub answers; if not, switch its libraries to their offline mode.

    Otherwise they would retry for half a minute; offline they use what is cached, or report at once what is missing.
    Call this before they are imported, since that is when they read their variables.
    """
    reached = hub_reachable()
    if not reached:
        os.environ |= dict.fromkeys(OFFLINE, "1")
    return reached


TABLE = Path(__file__).with_name("shapes.json")
BIASES = ("attention_bias", "mlp_bias", "use_bias")
"""Keys of `config.json` for weights that the formulas do not count."""


def shape_of(model: ModelConfig) -> ModelShape:
    """Return the shape of the configured model. Raise `DataError` if it cannot be determined."""
    row, path = known_models().get(model.name), None if is_scratch(model) else config_file(model)
    if path is None and row and "shape" in row:
        return record_of(row["shape"], ModelShape)
    place = str(path or model.name)
    try:
        return shape_of_config(architecture_of(model), place, trusts_code=model.trust_remote_code)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"cannot be read: {error}", place=place) from None


def check_length(model: ModelConfig, positions: int) -> None:
    """Raise `UserError` if rows may be longer than the model's `positions`."""
    if model.max_seq_len > positions:
        raise UserError(
            f"`model.max_seq_len` is {model.max_seq_len}, but `{label(model)}` has {positions} positions",
            hint=f"MODEL_MAX_SEQ_LEN={positions} at most",
        )


def positions_in(config: Mapping[str, Any]) -> int:
    """Return the positions in a parsed `config.json`, or in its text part; 2**31 where it specifies none."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    return int(text.get("max_position_embeddings") or text.get("n_positions") or 2**31)


def config_file(model: ModelConfig) -> Path | None:
    """Return the path of the model's `config.json` on this machine, which need not exist in a model folder.

    `None` where it must be fetched.
    """
    folder = model_folder(model.name)
    return folder / "config.json" if folder.is_dir() else _cached_config(model)


def local_folder(name: str, what: str = "model") -> Path | None:
    """Return the folder that a model's or tokenizer's name means, or `None` for a hub id. Raise `DataError`."""
    path = model_folder(name)
    if path.is_dir():
        return path
    if path.is_file():
        parts = "safetensors" if what == "model" else "its files"
        raise DataError(f"is a file; a {what} is a folder with {parts}, or a hub id", place=name)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(f"there is no such {what} folder", place=name, hint=hint_gone(name))
    return None


def shape_of_config(config: dict[str, Any], place: str, *, trusts_code: bool = False) -> ModelShape:
    """Return the shape of an architecture, by formula or counted on the model itself. Raise `DataError`.

    A family that only the model's own code implements, which the plan does not run, counts as a Llama where that code
    is trusted.
    """
    try:
        if config.get("model_type") in FORMULA_MODEL_TYPES and not any(config.get(key) for key in BIASES):
            return shape_from_config(config)
        try:
            counted = _count_model(config, place)
            return replace(counted, moving_rope=has_moving_rope(config), router_loss=asks_for_router_loss(config))
        except DataError:
            if not (trusts_code and config.get("auto_map")):
                raise
            return shape_from_config(config)
    except KeyError as error:
        raise DataError(f"lacks {error}, so its memory cannot be planned", place=place) from None


EXPANDED = frozenset({"mxfp4", "fp8", "mxfp8"})
"""Quantisation methods of weights that the preparation expands to bfloat16."""


def is_expanded(config: Mapping[str, Any]) -> bool:
    """Return whether preparation expands these weights: MXFP4 (OpenAI's gpt-oss) or FP8 (DeepSeek V3)."""
    parts = (config, config.get("text_config") or {})
    return any((part.get("quantization_config") or {}).get("quant_method") in EXPANDED for part in parts)


def as_trained(config: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of the weights that are trained."""
    if not is_expanded(config):
        return config
    text = {"text_config": {**config["text_config"], "quantization_config": None}} if config.get("text_config") else {}
    return {**config, **text, "quantization_config": None}


def _count_model(config: dict[str, Any], place: str) -> ModelShape:
    """Return the shape counted on the model itself, without weights.

    Raise `DataError` for a model that transformers does not know, or that SFT-Play does not train.
    """
    (row,) = ask([{"count": config}])
    if "error" in row:
        raise DataError(row["error"], place=place, hint=row.get("hint"))
    return record_of(row, ModelShape)


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a parsed `config.json` of a Llama-like family. Raise `KeyError` for a missing key."""
    kind = str(config.get("model_type", "unknown"))
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    return ModelShape(
        model_type=kind,
        hidden_size=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        ffn_size=int(config.get("intermediate_size") or 4 * hidden),
        vocab_size=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", kind in TIED_BY_DEFAULT)),
        max_positions=positions_in(config),
        qkv_bias=kind == "qwen2",
        norms_per_layer=4 if kind in ("gemma2", "gemma3_text") else 2,
        qk_norm=kind in ("gemma3_text", "qwen3"),
        gated=kind != "arcee",
        quantization=quantization_of(config),
        attention_dropout=float(config.get("attention_dropout") or 0.0),
        sliding_window=int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0,
        moving_rope=has_moving_rope(config),
        router_loss=asks_for_router_loss(config),
        attention=("flash_attention_2",) if kind == "gemma2" else DEFAULT_ATTENTION,  # its scores are capped
    )


def has_moving_rope(config: Mapping[str, Any]) -> bool:
    """Return whether a parsed `config.json` has rotary angles that depend on the longest position of a sequence."""
    text = config.get("text_config") or config
    settings = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kinds = [
        str(part.get("rope_type") or part.get("type"))
        for part in (settings, *settings.values())
        if isinstance(part, Mapping)
    ]
    return any(kind in ("longrope", "su") or "dynamic" in kind for kind in kinds)


def asks_for_router_loss(config: Mapping[str, Any]) -> bool:
    """Return whether a parsed `config.json` adds the router's balancing loss to the loss."""
    return any(bool(part.get("output_router_logits")) for part in (config, config.get("text_config") or {}))


def quantization_of(config: Mapping[str, Any]) -> str:
    """Return how a parsed `config.json` says that weights are quantised, as in `ModelShape.quantization`."""
    settings = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    method = str(settings.get("quant_method") or "")
    if settings.get("load_in_8bit"):
        return "bitsandbytes int8"
    if settings.get("load_in_4bit"):
        return f"bitsandbytes {settings.get('bnb_4bit_quant_type', 'fp4')}"
    return method or ("an unknown method" if settings else "")


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the models that can be planned without their files, each with `config.json` or a counted `ModelShape`."""
    rows: dict[str, dict[str, Any]] = read_json(TABLE)
    return rows


def _cached_config(model: ModelConfig) -> Path | None:
    """Return the `config.json` of an earlier download, without importing the hub's library."""
    folder = hub_cache() / f"models--{model.name.replace('/', '--')}"
    revision = model.revision or "main"
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    path = folder / "snapshots" / commit / "config.json"
    return path if path.is_file() else None


def _fetch_config(model: ModelConfig) -> Path:
    """Fetch only `config.json` from the hub. Raise `DataError`."""
    local_folder(model.name)
    if not hub_reachable():
        raise hub_refusal(model)
    from huggingface_hub import hf_hub_download

    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "4")
    try:
        return Path(hf_hub_download(model.name, "config.json", revision=model.revision))
    except Exception as error:
        raise hub_refusal(model, error) from error


def hub_refusal(model: ModelConfig, error: Exception | None = None) -> DataError:
    """Return why the hub did not provide the model; without an error, it cannot be reached."""
    from huggingface_hub import errors, get_token

    page = f"https://huggingface.co/{model.name}"
    denied = getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
    # Without a token the hub also denies access to repositories that do not exist.
    unknown = isinstance(error, errors.RepositoryNotFoundError)
    if isinstance(error, errors.GatedRepoError) or (denied and (get_token() or not unknown)):
        token = "the token that is set has no access to it" if get_token() else "no token is set"
        hint = f"accept its licence at {page}, then set HF_TOKEN to a token from https://huggingface.co/settings/tokens"
        return DataError(f"the model is gated, and {token}", place=model.name, hint=hint)
    if unknown:
        hint = f"{meant_model(model.name)}check the name at {page}; for a private or gated model set HF_TOKEN"
        return DataError("the hub has no such model, or it is private", place=model.name, hint=hint)
    if isinstance(error, errors.RevisionNotFoundError):
        return DataError(f"the model has no revision `{model.revision}`", place=model.name)
    if isinstance(error, (errors.HfHubHTTPError, errors.HFValidationError)):
        return DataError(f"the hub answered: {first_line(error)}", place=model.name, hint=f"check the name at {page}")
    hint = (
        "check the network; or set `model.name` to a folder, or HF_HOME to a cache that contains the model. A plan"
        f" needs no more than a folder with its `config.json`, or for these nothing: {', '.join(known_models())}"
    )
    return DataError(
        "no such folder, and the hub cannot be reached", place=model.name, hint=meant_model(model.name) + hint
    )


def architecture_of(model: ModelConfig, prepared: Prepared | None = None) -> dict[str, Any]:
    """Return the parsed `config.json` of the weights that are trained.

    Raise `DataError` if neither a file, the table nor the hub has it, `OSError` or `ValueError` if it cannot be read.
    """
    if prepared is None and is_scratch(model):
        return scratch_architecture(model)
    path = Path(prepared.model.path) / "config.json" if prepared else config_file(model)
    row = known_models().get(model.name)
    config: dict[str, Any] = row["config"] if row and path is None else read_json(path or _fetch_config(model))
    if not isinstance(config, dict):
        raise ValueError("it contains no JSON object")
    return as_trained(config)


TRACE_VERSION = 12
"""Increase this when a trace, a count or a probe changes, so that cached results of the older one are not used."""


def key_of(question: Mapping[str, Any]) -> str:
    """Return the name of a question's cached answer: a hash of everything that it depends on."""
    return text_sha256(json.dumps([TRACE_VERSION, versions(), question], sort_keys=True))[:32]


def ask(questions: Sequence[Mapping[str, Any]], *, starts: bool = True) -> list[dict[str, Any]]:
    """Return the cached answer to each question of `Tracer.ask`; others are asked and cached unless they are errors.

    Empty where an answer is not known and `starts` forbids to ask.
    """
    paths = [cache_folder() / "traces" / f"{key_of(question)}.json" for question in questions]
    unknown = {path: question for path, question in zip(paths, questions, strict=True) if not path.is_file()}
    results = running_tracer().ask(list(unknown.values())) if unknown and starts else [{}] * len(unknown)
    answers = dict(zip(unknown, results, strict=True))
    for path, answer in answers.items():
        if answer and "error" not in answer:
            write_json(path, answer)
    return [answers[path] if path in answers else read_json(path) for path in paths]


TRACE_SECONDS = 300
"""A trace takes seconds; after minutes it counts as hung."""
PACKAGES = ("torch", "transformers", "peft", "accelerate")


@cache
def running_tracer() -> Tracer:
    """Return this process's tracer, shared by counts and traces so that torch is imported once.

    It ends with `end_tracer`, or with this process.
    """
    return Tracer()


def end_tracer() -> None:
    """End this process's tracer."""
    if running_tracer.cache_info().currsize:
        running_tracer().close()
        running_tracer.cache_clear()


class Tracer:
    """A `python -m sft_play.trace` process, ended by `close`."""

    def __init__(self) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`, like the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sft_play.trace"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )

    def ask(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the result of each request (a case, or `{"count": architecture}`), or `{"error": "..."}`."""
        assert self._process.stdin and self._process.stdout
        line = b""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(requests).encode() + b"\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], TRACE_SECONDS)
            line = self._process.stdout.readline() if ready else b""
        if not line:
            error = f"the trace {self._failure()}"
            end_tracer()
            return [{"error": error}] * len(requests)
        answers: list[dict[str, Any]] = json.loads(line)
        return answers

    def _failure(self) -> str:
        """Return how the process failed, with the last line of its stderr."""
        try:
            code = self._process.wait(timeout=5)  # its output closes a moment before it ends
        except subprocess.TimeoutExpired:
            return f"took longer than {TRACE_SECONDS} s"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"ended with code {code}" + (f": {lines[-1].strip()[:300]}" if lines else "")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._stderr.close()


@cache
def versions() -> str:
    """Return the versions of the packages that determine what a step allocates."""
    from importlib.metadata import version

    return " ".join(f"{name}=={version(name)}" for name in PACKAGES)
