"""Mutations of configuration files and command lines, each made again by its number. `tests.fuzzing` judges what comes of them."""
# ruff: noqa: E501 - tables of traps are wide

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sft_play.config.keys import REFUSED, extra_keys, schema_keys, sections, variables
from sft_play.config.names import ALIASES

ROOT = Path(__file__).resolve().parent.parent
SEED = 20261121
MAIN = "main.yaml"
LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""PyYAML's reader of plain text, in C where it is there: no code of ours."""

VALUES = (
    "null", "~", "", "true", "True", "yes", "no", "on", "off", "y", "0", "-0", "-1", "1", "7", "+5", "5.", ".5", "0.0", "1.0", "1e-5", "1E5",
    "1e400", "-1e400", "1e308", "1e-400", ".nan", ".inf", "-.inf", "NaN", "nan", "inf", "Infinity", "1_000", "0x10", "-0x10", "0o17", "017",
    "09", "0b11", "1:30", "12:30:45", "2026-01-01", "2026-01-01T00:00:00Z", "9" * 20, "9" * 309, "9" * 5_000, "0x" + "f" * 300, "0x" + "f" * 5_000, "-0x" + "f" * 5_000,
    "[{path: x, rows: -0x" + "f" * 5_000 + "}]", "[evaluate:~nosuchuser9/x:y]", "[evaluate:" + "x" * 5_000 + ":y]", "~nosuchuser9/x", "[" * 900 + "]" * 900, "0." + "1" * 400, str(2**31 - 1), str(2**31),
    str(2**32), str(2**63), str(-(2**63)), "1e", "e5", "--1", "1 000", "1,5", "50%", "auto", "Auto", "'auto'", '"5"', "'5'", '" 5"', "none", "None",
    "[]", "{}", "[1, 2]", "[null]", "[[[]]]", "[a, a]", "['']", "{a: b}", "{path: x}", "[{path: x}]", "[{path: x, weight: -1}]", "[{path: ''}]",
    "[{path: x, rows: 0}]", "[{path: x, filter: 'a =='}]", "[{path: x, weight: .nan}]", "[{path: x, columns: {a: 1}}]", "[{pfad: x}]",
    "[{path: x}, {path: y, weight: 1}]", "[{path: x, name: a}, {path: y, name: a}]", "{a: .inf}", "{a: 1e400}", "{1: 2}", "{a: {b: [c]}}",
    "${model.name}", "'${model.name}'", "${train.nothing}", "${train.seed}", "${oc.env:HOME}", "${oc.env:NOT_SET_ANYWHERE}", "${oc.env:X,5}",
    "${", "${}", "${${}}", "$${a}", "\\${a}", "'\\${a}'", "${a", "a}", "${oc.decode:'[1'}", "${oc.create:[1]}", "${oc.nope:1}", "${.}", "${..}",
    "${...a}", "${a.b.c.d}", "${data.sources}", "${train}", "${model}", "???", "'???'", "${" * 60, "${a}" * 60, "${oc.env:${oc.env:${oc.env:A}}}",
    "!!python/object/apply:os.system ['touch x']", "!!python/name:os.system", "!include other.yaml", '!!int "5"', "!!str 5", "!!null x",
    "!!float abc", "!!bool 5", "!!binary aGk=", "!!set {a, b}", "!!timestamp 2026-01-01", "!!omap [a: 1]", "!!map []", "!x y", "! 5", "!<> x",
    "!%ff x", "&a [*a]", "&a {b: *a}", "*nothing", "&a x", "|\n      text\n      more", ">-\n      folded", "|+\n\n", '"\\0"', '"a\\0b"', '"\\x1b[2J"',
    '"\\ud800"', '"\\udc00x"', '"\\UFFFFFFFF"', '"\\U00110000"', '"\\q"', '"\\x"', "é", "ｆｕｌｌ", "５", "²", "عربي\u202eabc", "\u200b", "\ufeff",
    "\u2028", "\x85", "\U0001f680", "e\u0301", "x" * 300, "x" * 50_000, "a/" * 3_000, "../../etc/passwd", "/etc/shadow", "/dev/zero", "/", ".", "..",
    "~nobody_at_all/x", "~", "file:///etc/passwd", "C:\\x", "$(touch x)", "`touch x`", "; rm x", "a b", "a\tb", "a: b", "a # b", "#", "%", "@x", "`",
    "a**b", "**", "*/**/*.x", "[a", "- a", "? a", "'", '"', "[", "{", "]", "}", ",", "*", "&", "!", "|", ">", "'it''s'", '"line\\nbreak"', "=", "<<", "nf4", "full", "lora", "steps",
    "epoch", "adamw_torch", "cosine", "eval_loss", "eval_rougeL", "rogueL", "[rogueL]", "builtin:docstrings", "train.jsonl", "1.5.2", "- - - a",
)  # fmt: skip
"""As written in a file or typed: every wrong type, spelling and trap of YAML."""
GOOD = (
    "1",
    "5",
    "0.5",
    "2e-5",
    "100",
    "true",
    "false",
    "auto",
    "null",
    "x",
    "full",
    "[a, b]",
    "[{path: x}]",
    "steps",
    "0.05",
    "off",
    "bleu",
)
KEYS = (
    *schema_keys(), *extra_keys(), *(f"train.{name}" for name in REFUSED), *(name for name in sections() if name), "extends", "train.extra",
    "train.extra.seed", "version", "includes", "<<", "? a", "[a]", "{a: b}", "''", '""', "null", "~", "5", "true", "train.", ".seed", "train..seed",
    "model.name.x", "тест", "\u202eeman", '"a\\0b"', '"\\x1b[2J"', "x" * 3_000, "!!python/name:os.system x", "&k name", "*k", "__class__", "train.__dict__",
)  # fmt: skip
OPTIONS = ("NUM_GPUS", "RUN", "JSON", "RUN_NAME", "HARDWARE", "CONFIG", "PROMPT", "SOURCE", "PYTHON", "VENV", "MODEL", "DATA")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One wrong (or now and then right) configuration."""

    number: int
    files: Mapping[str, bytes]
    words: Sequence[str] = ()
    """What is typed behind `CONFIG=`."""

    def write(self, folder: Path) -> Path:
        """Writes the files and returns the one to be loaded."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return folder / MAIN

    def show(self) -> str:
        """Returns the case so that it can be read in a log, long parts cut."""
        lines = [f"case {self.number} (seed {SEED}): python -m tests.fuzzing {self.number}"]
        lines += [f"--- {name}\n{cut(repr(content))}" for name, content in self.files.items()]
        return "\n".join([*lines, "--- words", *(cut(repr(word)) for word in self.words)])


def cut(text: str) -> str:
    return text if len(text) <= 3_000 else f"{text[:1_500]} ... {len(text)} characters ... {text[-500:]}"


# ---- Making cases


def bases() -> list[str]:
    """Returns the text of every shipped configuration."""
    files = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "examples").rglob("*.yaml")])
    assert len(files) >= 12, "the presets have moved"
    return [file.read_text(encoding="utf-8") for file in files]


def make_case(number: int, texts: Sequence[str]) -> Case:
    """Returns the case of that number: always the same one."""
    chance = random.Random(f"{SEED}-{number}")
    if chance.random() < 0.08:
        files: dict[str, bytes] = chance.choice(SPECIALS)(chance)
    else:
        text = chance.choice(texts)
        for _ in range(chance.choice((0, 1, 1, 1, 1, 2, 3))):
            text = chance.choice(OF_LINES)(chance, text)
        content = text.encode("utf-8", "surrogatepass")
        if chance.random() < 0.15:
            content = chance.choice(OF_BYTES)(chance, content)
        files = {MAIN: content}
    words = [_word(chance) for _ in range(chance.choice((0, 0, 0, 0, 1, 1, 2, 4)))]
    if words and chance.random() < 0.1:
        words.append(chance.choice(words))
    return Case(number=number, files=files, words=[word for word in words if "\0" not in word])  # no system passes a null on


def _lines_with_values(lines: Sequence[str]) -> list[int]:
    return [i for i, line in enumerate(lines) if re.match(r"\s*[\w.]+:", line)] or [0]


def _value(chance: random.Random) -> str:
    return chance.choice(GOOD if chance.random() < 0.4 else VALUES)


def _another_value(chance: random.Random, text: str) -> str:
    lines = text.split("\n")
    at = chance.choice(_lines_with_values(lines))
    lines[at] = f"{lines[at].partition(':')[0]}: {_value(chance)}"
    return "\n".join(lines)


def _another_key(chance: random.Random, text: str) -> str:
    lines = text.split("\n")
    at = chance.choice(_lines_with_values(lines))
    indent, key, rest = re.match(r"(\s*)([^:]*)(.*)", lines[at], re.DOTALL).groups()  # type: ignore[union-attr]
    lines[at] = f"{indent}{_misspelt(chance, key)}{rest}"
    return "\n".join(lines)


def _misspelt(chance: random.Random, word: str) -> str:
    at = chance.randrange(len(word) + 1)
    letter = chance.choice("abcxyz_-. 5é")
    forms = (
        word[:at] + letter + word[at:], word[:at] + word[at + 1 :], word[:at] + letter + word[at + 1 :], word.upper(), word.title(),
        word.replace("_", "-"), word + "s", word[::-1], f'"{word}"', f"{word} ", chance.choice(list(ALIASES)), chance.choice(KEYS),
        word[:at] + word[at : at + 2][::-1] + word[at + 2 :],
    )  # fmt: skip
    return chance.choice(forms)


def _new_line(chance: random.Random, text: str) -> str:
    lines = text.split("\n")
    key, value = chance.choice(KEYS), _value(chance)
    section, _, leaf = key.rpartition(".")
    headers = [i for i, line in enumerate(lines) if line.startswith(f"{section}:")] if section else []
    if headers and chance.random() < 0.8:
        lines.insert(headers[0] + 1, f"  {leaf}: {value}")
    else:
        lines.insert(chance.randrange(len(lines) + 1), f"{key}: {value}")
    return "\n".join(lines)


def _new_section(chance: random.Random, text: str) -> str:
    """Adds a right key with a value that may be right: most cases should get past the first check."""
    key = chance.choice([*schema_keys(), *extra_keys()])
    *path, leaf = key.split(".")
    head = "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(path))
    return f"{text}\n{head}{'  ' * len(path)}{leaf}: {_value(chance)}\n"


def _moved(chance: random.Random, text: str) -> str:
    lines = text.split("\n")
    line = lines.pop(chance.randrange(len(lines)))
    times = chance.choice((0, 1, 1, 2))
    for _ in range(times):
        lines.insert(chance.randrange(len(lines) + 1), line)
    return "\n".join(lines)


def _indented(chance: random.Random, text: str) -> str:
    lines = text.split("\n")
    at = chance.randrange(len(lines))
    lines[at] = chance.choice((" ", "  ", "\t", "- ", "? ", "    ")) + lines[at] if chance.random() < 0.6 else lines[at].lstrip()
    return "\n".join(lines)


def _marked(chance: random.Random, text: str) -> str:
    head = chance.choice(("---\n", "%YAML 1.1\n---\n", "%YAML 3.0\n---\n", "%TAG ! tag:x,2000:\n---\n", "%FOO\n---\n", "\n\n", "# a\n", "...\n", "&root\n",
                          "!!map\n", "!!python/dict\n", "", "--- |\n"))  # fmt: skip
    tail = chance.choice(
        ("", "\n---\nmodel: {name: x}\n", "\n...\n", "\n...\nx", "\n---\n", "\n--- 5", "\n\t", "\n\0", "\n}", "\n<<: *x\n")
    )
    return head + text + tail


def _letters(chance: random.Random, text: str) -> str:
    at = chance.randrange(len(text) + 1)
    letter = chance.choice(
        "\0\x01\x07\x08\x1b\x7f\x80\t\r\n :#&*!|>'\"%@`[]{},?-=~$\\\u200b\u202e\u2028\ufeff\ud800\U0001f680é"
    ) * chance.choice((1, 1, 3))
    return text[:at] + letter + text[at + chance.choice((0, 1, 5)) :]


def _flow(_: random.Random, text: str) -> str:
    with contextlib.suppress(yaml.YAMLError, ValueError, OverflowError, RecursionError):
        return json.dumps(yaml.load(text, LOADER))
    return text


OF_LINES: Sequence[Callable[[random.Random, str], str]] = (
    _another_value, _another_value, _another_value, _another_key, _another_key, _new_line, _new_line, _new_section, _new_section, _moved,
    _indented, _marked, _letters, _flow,
)  # fmt: skip


def _flipped(chance: random.Random, content: bytes) -> bytes:
    found = bytearray(content or b" ")
    for _ in range(chance.choice((1, 1, 4, 40))):
        found[chance.randrange(len(found))] = chance.randrange(256)
    return bytes(found)


OF_BYTES: Sequence[Callable[[random.Random, bytes], bytes]] = (
    _flipped,
    lambda chance, content: content[: chance.randrange(len(content) + 1)],
    lambda _, content: b"\xef\xbb\xbf" + content,
    lambda _, content: content.decode("utf-8", "replace").encode("utf-16"),
    lambda _, content: content.decode("utf-8", "replace").encode("utf-16-le"),
    lambda _, content: content.decode("utf-8", "replace").encode("utf-32"),
    lambda _, content: content.decode("utf-8", "replace").encode("latin-1", "replace") + b"\nname: \xe9\xff\n",
    lambda _, content: content.replace(b"\n", b"\r\n"),
    lambda _, content: content.replace(b"\n", b"\r"),
    lambda _, content: content.replace(b"  ", b"\t"),
    lambda _, content: content + b"\0" * 100,
    lambda chance, _: chance.randbytes(chance.choice((1, 10, 1000))),
    lambda _, content: b"\x1f\x8b\x08\0" + content,
)  # fmt: skip


def _laughs(chance: random.Random) -> dict[str, bytes]:
    wide, deep = chance.choice(((9, 9), (2, 40), (100, 4)))
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * wide)}]" for i in range(1, deep)]
    inside = f"model: {{name: x}}\ndata: {{train_path: x}}\neval:\n  metrics: *a{deep - 1}\n"
    return {MAIN: ("\n".join(lines) + "\n" + inside).encode()}


def _deep(chance: random.Random) -> dict[str, bytes]:
    depth = chance.choice((30, 60, 200, 1_000, 20_000))
    forms = (
        "[" * depth + "]" * depth,
        "{a: " * depth + "}" * depth,
        "- " * depth + "a",
        "[" * depth,
        "\n".join(" " * i + "a:" for i in range(min(depth, 1_000))),
    )
    place = chance.choice(("", "train:\n  lr_scheduler_kwargs: ", "eval: {metrics: "))
    return {MAIN: (place + chance.choice(forms)).encode()}


def _extends(chance: random.Random) -> dict[str, bytes]:
    good = "model: {name: x}\ndata: {train_path: x}\n"
    names = (
        "main.yaml", "other.yaml", "missing.yaml", "smoke", "h100_pair", "nosuch", ".", "..", "/", "/dev/null", "/dev/zero", "/etc/passwd", "../main.yaml",
        "../../../../etc/hostname", "[other.yaml, smoke]", "[other.yaml, other.yaml]", "[main.yaml]", "{a: b}", "[[smoke]]", "5", "true", "null", "''", "x" * 300,
        "a/" * 3_000, '"\\0"', '"\\ud800"', '"\\x1b[2J"', "~", "~nobody/x", "$HOME/x", "${model.name}", "https://example.org/x.yaml", "[]", "[null]",
    )  # fmt: skip
    files = {MAIN: f"extends: {chance.choice(names)}\n{good}".encode()}
    files["other.yaml"] = (
        f"extends: {chance.choice(names)}\n{good}".encode()
        if chance.random() < 0.6
        else chance.choice((b"", b"\xff", good.encode()))
    )
    return files


def _tower(chance: random.Random) -> dict[str, bytes]:
    """Files that extend one another twice: as many reads as 2 to the height, if nobody counts."""
    height = chance.choice((3, 40, 400))
    twice = chance.random() < 0.5
    files = {f"f{i}.yaml": f"extends: [f{i + 1}.yaml{f', f{i + 1}.yaml' if twice else ''}]\n".encode() for i in range(height)}
    return files | {f"f{height}.yaml": b"model: {name: x}\ndata: {train_path: x}\n", MAIN: b"extends: f0.yaml\n"}


def _merges(chance: random.Random) -> dict[str, bytes]:
    text = (
        "base: &base {seed: 5}\ntrain:\n  <<: *base\n"
        if chance.random() < 0.5
        else "train: &t {seed: 5}\neval:\n  <<: [*t, *t]\n"
    )
    return {MAIN: ("model: {name: x}\ndata: {train_path: x}\n" + text).encode()}


def _rings(chance: random.Random) -> dict[str, bytes]:
    """Interpolations that go round, stay open, or lead far."""
    pairs = [("model.name", "${model.revision}"), ("model.revision", "${model.name}"), ("data.train_path", "${data.train_path}"),
             ("train.seed", "${train.save_steps}"), ("train.save_steps", "${train.seed}"), ("data.system", "${data.style}"),
             ("train.lr_scheduler_kwargs", "{a: '${train.lr_scheduler_kwargs}'}"), ("eval.metrics", "['${eval.metrics}']"),
             ("model.revision", "${data.train_path}${data.train_path}"), ("model.tokenizer", "${model.name}/x"), ("model.name", "0012")]  # fmt: skip
    picked = chance.sample(pairs, chance.randint(1, 5))
    return {
        MAIN: ("model: {name: x}\n" * (chance.random() < 0.3) + "".join(f"{key}: {value}\n" for key, value in picked)).encode()
    }


def _many(chance: random.Random) -> dict[str, bytes]:
    count = chance.choice((100, 1_500))
    forms = (
        "".join(f"key{i}: 1\n" for i in range(count)), "train:\n" + "".join(f"  learning_rat{i}: 1\n" for i in range(count)),
        "model: {name: x}\ndata:\n  sources:\n" + "".join(f"  - {{path: x{i}, name: a}}\n" for i in range(count)),
        "eval:\n  metrics: [" + ", ".join(["rogueL"] * count) + "]\n", "data:\n  sources:\n" + "  - {pfad: x}\n" * count,
        "model: {name: x}\ndata: {train_path: " + "x" * count + "}\n", "#" + "x" * count * 100 + "\n",
    )  # fmt: skip
    return {MAIN: chance.choice(forms).encode()}


def _roots(chance: random.Random) -> dict[str, bytes]:
    forms = (b"", b"\n", b"# nothing\n", b"---\n", b"5", b"text", b"[]", b"- a\n- b\n", b"{}", b"null", b"~", b"---\n---\n", b"...\n", b"\xef\xbb\xbf", b"\0",
             b"model", b"model:", b"model: x", b"model: []", b"model: {name: }", b'"": {model: {name: x}}', b"model.name: x\nmodel: {name: y}\n",
             b"model: {name: x}\ntrain: {seed: 5}\ntrain.seed: 6\n", b'model: {name: x}\n"": {train: {seed: 5}}\ntrain: {seed: 6}\n',
             b"model: {name: x}\ndata: {train_path: x, sources: []}\n", b"model: {name: x}\ndata: {val_path: x, train_path: y, validation: []}\n",
             b"<<: {a: b}\n", b"tuning: {lora.r: 5, lora: {r: 6}}\nmodel: {name: x}\n", b"? model\n: {name: x}\n", b"? [a]\n: b\n", b": x\n")  # fmt: skip
    return {MAIN: chance.choice(forms)}


SPECIALS: Sequence[Callable[[random.Random], dict[str, bytes]]] = (
    _laughs,
    _deep,
    _extends,
    _extends,
    _tower,
    _merges,
    _rings,
    _many,
    _roots,
    _roots,
)


def _word(chance: random.Random) -> str:
    """Returns one thing that people type behind the command."""
    name = chance.choice(list(variables()))
    key = variables()[name]
    value = _value(chance)
    good = chance.choice(GOOD)
    forms = (
        f"{name}={good}", f"{name}={good}", f"{name}={value}", f"{name}={value}", f"{name}={value}", f"{_misspelt(chance, name)}={good}",
        f"--{key}={value}", f"{key}={value}", name, f"={value}", f"{name}==5", f"--{name.lower()}={good}", f"--{key.rpartition('.')[2]}", f"-{name}=1",
        f"{chance.choice(OPTIONS)}={value}", f"{chance.choice(list(ALIASES)).upper()}={good}", f"{name.lower()}={good}", f"{name}='{good}'",
        f'{name}="{good}"', "--", "", " ", f"{name}= {good} ", f"{name}=\n{good}", f"{'X' * 3_000}=1", "\udcff=1", f"{name}=\udcff",
    )  # fmt: skip
    return chance.choice(forms)
