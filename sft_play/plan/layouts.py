"""What model families can do: keep rows apart without a mask, flattened or padded on the right, and which attention kernels they have.

Facts of the pinned transformers, so that the plan knows them without importing it; `tests/numerics/test_layouts.py` proves the
first set family by family and compares the others with the library.
"""

from __future__ import annotations

FLATTENED_MODEL_TYPES = frozenset({
    "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "gpt2", "gpt_neox",
    "granite", "granitemoe", "llama", "ministral3", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2",
})  # fmt: skip
"""Rows of these in one line need position ids only, and rows padded on the right nothing. Others carry a state from token to token
(mamba, qwen3_next), count positions themselves (opt), or were not tried."""

CHUNKED_HEAD_MODEL_TYPES = FLATTENED_MODEL_TYPES
"""Families whose loss in chunks equals the whole one, changes to logits after the head included (Gemma 2 bends them, Granite and
Cohere scale them); `tests/numerics/test_chunked_loss.py` proves each."""

VARLEN = "varlen"
"""Our name for attention over rows of unlike length (`model.varlen`): torch's own flash attention, on a CPU one call per row."""

BY_LENGTHS = frozenset({VARLEN, "flash_attention_2"})
"""Attention that tells the rows of a line apart by their lengths, without a mask."""

VARLEN_MODEL_TYPES = FLATTENED_MODEL_TYPES - {"gemma2", "nemotron", "qwen2_moe", "stablelm"}
"""Families that `varlen` computes. Gemma 2 bends its scores, the layers of nemotron and stablelm do not pass the lengths on, and those of
qwen2_moe not their window."""

LIGER_MODEL_TYPES = frozenset({"granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"})
"""Dense families with SwiGLU in which Liger replaces every norm and feed-forward part (`tests/numerics/test_kernels.py`)."""

FLATTENED_TOKENS = 4096
"""Longest flattened micro-batch of several rows on a GPU where attention is not by lengths: the block mask is quadratic in it."""

WITHOUT_SDPA = frozenset({
    "big_bird", "bigbird_pegasus", "blip", "bloom", "codegen", "cpmant", "deepseek_v4", "falcon_mamba", "flint", "gemma2", "git",
    "got_ocr2", "gpt_neo", "gpt_neox_japanese", "gpt_oss", "gptj", "granite_swa", "granitemoe_swa", "hy_v4", "inkling2", "inkling2_text",
    "mamba", "mamba2", "megatron-bert", "mimo_v2_flash", "mpt", "mvp", "openai-gpt", "pp_chart2table", "prophetnet", "reformer", "rembert",
    "roformer", "rwkv", "trocr", "vaultgemma", "xglm", "xlm", "xlnet", "xlstm",
})  # fmt: skip
"""Families that refuse `attn_implementation="sdpa"`: soft-capped or sink logits, or no attention at all."""

WITHOUT_FLASH_ATTENTION = frozenset({
    "axk2", "big_bird", "bigbird_pegasus", "blip", "blip-2", "bloom", "blt", "codegen", "cpmant", "deepseek_ocr2", "deepseek_v32",
    "deepseek_v4", "doge", "dots3_note", "dots3_note_text", "evolla", "falcon_mamba", "git", "glm5_next", "glm_moe_dsa", "got_ocr2",
    "gpt_neox_japanese", "hy_v4", "idefics", "inkling2", "inkling2_text", "inkling_mm_model", "inkling_text", "kosmos-2", "llama4",
    "llama4_text", "mamba", "mamba2", "megatron-bert", "minimax_m3_vl", "minimax_m3_vl_text", "mistral_large4", "mllama", "mpt", "mvp",
    "openai-gpt", "pix2struct", "pp_chart2table", "pp_formulanet", "prophetnet", "qwen4_exp", "qwen4_exp_text", "reformer", "rembert",
    "roformer", "rwkv", "step3p7", "t5gemma2", "trocr", "udop", "unlimited_ocr", "xglm", "xlm", "xlnet", "xlstm",
})  # fmt: skip
"""Families that refuse `attn_implementation="flash_attention_2"`."""
