"""What model families can do: keep rows apart without a mask, flattened or padded on the right, and which attention kernels they have.

Facts of the pinned transformers, so that the plan knows them without importing it; `tests/numerics/test_layouts.py` compares them
with what a tiny model of every family computes, both ways: a wrong name fails, and so does a missing one.
"""

from __future__ import annotations

UNMASKED_MODEL_TYPES = frozenset({
    "afmoe", "apertus", "arcee", "bamba", "bloom", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1",
    "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "flex_olmo", "gemma", "gemma2", "gemma3",
    "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_bigcode",
    "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "hy_v3", "jais2", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4_text", "mamba", "mamba2",
    "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "ministral", "ministral3", "mistral", "mistral3", "mixtral", "mpt", "nanochat",
    "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "seed_oss", "smollm3", "solar_open",
    "stablelm", "starcoder2",
})  # fmt: skip
"""No token of theirs sees the padding behind its row. Others were not tried."""

FLATTENED_MODEL_TYPES = UNMASKED_MODEL_TYPES - {
    "afmoe", "bamba", "bloom", "deepseek_v4", "falcon", "falcon_h1", "falcon_mamba", "gpt_oss", "granitemoehybrid", "jamba", "kimi_linear",
    "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "mpt", "nemotron_h", "olmo_hybrid", "opt", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
}  # fmt: skip
"""Rows of these in one line need position ids only. Others carry a state from token to token, count positions themselves (bloom, mpt), or
make their masks without position ids (afmoe, gpt_oss, opt)."""

CHUNKED_HEAD_MODEL_TYPES = UNMASKED_MODEL_TYPES
"""Families whose loss in chunks equals the whole one, changes to logits after the head included (Gemma 2 bends them, Granite and
Cohere scale them); `tests/numerics/test_chunked_loss.py` proves each."""

VARLEN = "varlen"
"""Our name for attention over rows of unlike length (`model.varlen`): torch's own flash attention, on a CPU one call per row."""

BY_LENGTHS = frozenset({VARLEN, "flash_attention_2"})
"""Attention that tells the rows of a line apart by their lengths, without a mask."""

VARLEN_MODEL_TYPES = UNMASKED_MODEL_TYPES - {
    "bloom", "deepseek_v32", "deepseek_v4", "falcon", "falcon_mamba", "gemma2", "glm_moe_dsa", "gptj", "jamba", "llama4_text", "mamba",
    "mamba2", "minimax", "mpt", "nemotron", "phimoe", "qwen2_moe", "stablelm",
}  # fmt: skip
"""Families that `varlen` computes. Others bend their scores (gemma2), add a mask of their own (bloom, mpt, llama4_text, the sparse
attention of deepseek_v32), do not pass the lengths on (nemotron, stablelm, jamba, mamba), or not their window (qwen2_moe, phimoe)."""

SINK_MODEL_TYPES = frozenset({"gpt_oss", "mimo_v2_flash"})
"""Families of `VARLEN_MODEL_TYPES` whose heads have sinks: one call per row on GPUs too, of any type."""

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
    "deepseek_v4", "doge", "dots3_note", "dots3_note_text", "evolla", "falcon_mamba", "flint", "git", "glm5_next", "glm_moe_dsa",
    "got_ocr2", "gpt_neox_japanese", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "idefics", "inkling2", "inkling2_text",
    "inkling_mm_model", "inkling_text", "kosmos-2", "llama4", "llama4_text", "mamba", "mamba2", "megatron-bert", "mimo_v2_flash",
    "minimax_m3_vl", "minimax_m3_vl_text", "mistral_large4", "mllama", "mpt", "mvp", "openai-gpt", "pix2struct", "pp_chart2table",
    "pp_formulanet", "prophetnet", "qwen4_exp", "qwen4_exp_text", "reformer", "rembert", "roformer", "rwkv", "step3p7", "t5gemma2", "trocr",
    "udop", "unlimited_ocr", "xglm", "xlm", "xlnet", "xlstm",
})  # fmt: skip
"""Families that refuse `attn_implementation="flash_attention_2"`, or would fetch another kernel in its place."""
