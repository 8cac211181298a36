"""Loads a tokenizer from a folder, and mends what training and generation need: a padding token, a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sft_play.data.templates import adds_bos, fitted, quoted, styled
from sft_play.errors import DataError, first_line
from sft_play.model.folder import code_not_trusted, is_about_trust, runs_code
from sft_play.model.rendering import write_chat
from sft_play.runs.prepared import ChatFormat

MARKER = "\u2402answer\u2403"
"""Stands for an answer when a template is rendered to see where it stands and what follows it."""


def load_tokenizer(folder: Path | str, chat: ChatFormat | None = None, *, trust: bool = False) -> Any:
    """Returns the fast tokenizer of `folder` with a padding token and a chat template. No network. Raises `DataError`.

    `chat` is what the configuration says about writing conversations (`ResolvedModel.chat`), `None` for a folder that a run
    published: its template holds that already. `trust` is `model.trust_remote_code`.
    """
    from transformers import AutoTokenizer

    trust = trust and runs_code(Path(folder))
    try:
        # Without a word about trust transformers would ask at the terminal whether to run the code that a folder holds.
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust)
    except Exception as error:  # of a damaged or hostile file the libraries raise anything, tokenizers a bare `Exception`
        if not trust and is_about_trust(error):
            raise code_not_trusted("tokenizer", str(folder)) from error
        first = first_line(error)
        raise DataError(f"no tokenizer can be loaded: {first}", place=str(folder)) from error
    if not tokenizer.is_fast:
        raise DataError(
            "the tokenizer has no fast version, and the exact label mask needs its character offsets",
            place=str(folder),
            hint="use a model folder with a `tokenizer.json`",
        )
    if tokenizer.pad_token_id is None:
        # Labels are masked by length and never by the padding token, so eos can stand in without being unlearnt.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if chat is not None and chat.template is not None:
        tokenizer.chat_template = fitted(chat.template, chat.name, tokenizer) if chat.name else chat.template
    if tokenizer.chat_template is None:
        tokenizer.chat_template = default_template(tokenizer)
    if chat is not None:
        own = tokenizer.chat_template
        tokenizer.chat_template = {n: styled(t, chat) for n, t in own.items()} if isinstance(own, dict) else styled(own, chat)
    return tokenizer


def default_template(tokenizer: Any) -> str:
    """Returns ChatML for a tokenizer that has no template; its end mark is a token that the vocabulary has.

    Raises `DataError` when there is neither `<|im_end|>` nor an end-of-sequence token.
    """
    vocabulary = tokenizer.get_vocab()
    end = "<|im_end|>" if "<|im_end|>" in vocabulary else tokenizer.eos_token
    if end is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token, so no answer could end", hint="set `eos_token` in its config"
        )
    return (
        (f"{{{{ {quoted(tokenizer.bos_token)} }}}}" if adds_bos(tokenizer) else "")
        + "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
        + quoted(end)
        + " + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


def end_of_turn_ids(tokenizer: Any) -> list[int]:
    """Returns the tokens that end an assistant's turn: the one that the template writes, then eos; never empty.

    Raises `DataError` when there is none.
    """
    import jinja2

    found: list[int] = []
    try:
        text = write_chat(tokenizer, [{"role": "user", "content": "question"}, {"role": "assistant", "content": MARKER}])
    except (jinja2.TemplateError, TypeError, KeyError, ValueError):
        text = ""
    after = text.rsplit(MARKER, 1)[1] if MARKER in text else ""
    special = set(tokenizer.all_special_ids) | {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    after_ids = tokenizer(after, add_special_tokens=False)["input_ids"] if after.strip() else []
    for known in (special, set(tokenizer.added_tokens_decoder)):  # some folders forget to call the end of a turn special
        found += [index for index in after_ids if index in known][: 0 if found else 1]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in found:
        found.append(tokenizer.eos_token_id)
    if not found:
        raise DataError("the tokenizer has no token that ends a turn", hint="set `eos_token` in its config")
    return found
