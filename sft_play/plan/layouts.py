"""Which model families keep flattened rows apart by position ids alone. `tests/numerics/test_layouts.py` proves each."""

from __future__ import annotations

FLATTENED_MODEL_TYPES = frozenset({
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3", "gemma3_text", "gpt2", "phi3", "smollm3", "granite", "olmo2",
})  # fmt: skip

FLATTENED_TOKENS = 4096
"""Longest flattened micro-batch without flash attention on a GPU: the block mask is quadratic in it."""
