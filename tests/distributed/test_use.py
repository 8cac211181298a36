"""`infer` and `merge` as a user calls them, on a run that `train` has made."""

from __future__ import annotations

import csv
import io
import json
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from sft_play.files import file_sha256
from tests.places import Place
from tests.tiny_models import build_tiny_llama

QUESTIONS = [
    "What is a list?",
    "What is a tuple?",
    "What is a much longer question about dictionaries and sets good for?",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("use"))
    model = build_tiny_llama(place.folder / "model")
    rows = [{"prompt": f"What is {i}?", "completion": f"{i} is a number."} for i in range(24)]
    data = place.folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    place.config.write_text(
        f"model: {{name: {model}, max_seq_len: 128}}\ntuning: {{mode: lora}}\ndata: {{train_path: {data}}}\n"
        "train: {max_steps: 4, global_batch_size: 8, learning_rate: 0.02, generation_max_new_tokens: 12}\n"
    )
    place.train("demo")
    return place


@pytest.fixture(scope="module")
def why(place: Place) -> str:
    """Return the output of `PROMPT=Why?`."""
    done = place.run("infer", "RUN=demo", "PROMPT=Why?")
    assert done.returncode == 0 and "loading model of the run demo" in done.stderr, done.stderr
    return done.stdout


def test_a_file_of_prompts_becomes_a_file_of_answers(place: Place, tmp_path: Path, why: str) -> None:
    questions, output = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    conversation = [
        {"role": "user", "content": QUESTIONS[0]},
        {"role": "assistant", "content": "A row."},
        {"role": "user", "content": "Why?"},
    ]
    rows = [{"prompt": QUESTIONS[0]}, {"messages": conversation}, {"prompt": "Why?"}, {"prompt": QUESTIONS[2]}]
    questions.write_text("\n".join(map(json.dumps, rows)))
    output.write_text("older answers")
    words = ("infer", "RUN=demo", "CHECKPOINT=last", f"OUTPUT={output}")
    assert place.call(*words, f"INPUT={questions}", "JSON=1", "EVAL_BATCH_SIZE=3").json["rows"] == 4
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["prompt"] for row in answers] == [QUESTIONS[0], "Why?", "Why?", QUESTIONS[2]]
    assert answers[1]["messages"] == conversation
    assert answers[2]["answer"] + "\n" == why, "the same prompt has the same answer in any company"
    questions = tmp_path / "asked.csv"
    questions.write_text('prompt;completion\nWhy?;"a, b"\n;\n"two\nlines";\n')
    assert f"3 answers in {output}, 1 of them to empty lines" in place.call(*words, f"INPUT={questions}").err
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["prompt"], row.get("reference")) for row in answers] == [
        ("Why?", "a, b"),
        ("", None),
        ("two\nlines", None),
    ]
    assert answers[1] == {"prompt": "", "answer": ""} and answers[0]["answer"] + "\n" == why


def test_answers_carry_the_other_columns_into_the_file_that_is_named(place: Place, tmp_path: Path, why: str) -> None:
    questions, output = tmp_path / "asked.csv", tmp_path / "answers.csv"
    with questions.open("w", newline="", encoding="utf-8-sig") as stream:
        csv.writer(stream, delimiter=";").writerows(
            [["id", "prompt", "answer", "note"], ["7", "Why?", "old", 'a, "b"\nc'], ["8", "", "x", ""]]
        )
    done = place.call("infer", "RUN=demo", "CHECKPOINT=last", f"INPUT={questions}", f"OUTPUT={output}")
    assert done.code == 0, done.err
    assert output.read_bytes().startswith(b"\xef\xbb\xbfid;"), "the separator and the mark of the questions"
    with output.open(newline="", encoding="utf-8-sig") as stream:
        written = list(csv.DictReader(stream, delimiter=";"))
    assert written == [
        {"id": "7", "input.answer": "old", "note": 'a, "b"\nc', "prompt": "Why?", "answer": why.removesuffix("\n")},
        {"id": "8", "input.answer": "x", "note": "", "prompt": "", "answer": ""},
    ]
    rows = tmp_path / "rows.jsonl"
    turns = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "A."},
        {"role": "user", "content": "Why?"},
    ]
    rows.write_text(json.dumps({"messages": turns, "id": [1], "score": float("nan")}))
    for ending, read in (
        ("json", json.loads),
        ("tsv", lambda text: list(csv.DictReader(io.StringIO(text), delimiter="\t"))),
    ):
        done = place.call("infer", "RUN=demo", f"INPUT={rows}", f"OUTPUT={tmp_path / f'x.{ending}'}")
        assert done.code == 0, done.err
        [row] = read((tmp_path / f"x.{ending}").read_text())
        assert row["id"] == ([1] if ending == "json" else "[1]") and row["prompt"] == "Why?"
        assert (row["messages"] if ending == "json" else json.loads(row["messages"])) == turns


def test_bad_input_is_reported_by_line_and_nothing_is_lost(place: Place, tmp_path: Path) -> None:
    bad, output = tmp_path / "bad.jsonl", tmp_path / "answers.jsonl"
    bad.write_text('{"prompt": "fine"}\n{"prompt": 3}\nnot json\n')
    output.write_text("older answers")
    done = place.call("infer", "RUN=demo", f"INPUT={bad}", f"OUTPUT={output}")
    assert done.code == 4 and f"{bad}:2:" in done.err and f"{bad}:3:" in done.err and f"{bad}:1:" not in done.err
    assert output.read_text() == "older answers"


@pytest.mark.parametrize(("command", "folder"), [("infer", "checkpoints/last"), ("merge", "model")])
def test_damaged_weights_are_reported_by_name(place: Place, command: str, folder: str, tmp_path: Path) -> None:
    run = Path(shutil.copytree(place.folder / "runs" / "demo", tmp_path / "damaged", symlinks=True))
    (run / folder / "adapter_model.safetensors").write_bytes(b"")
    words = ["PROMPT=Why?", "CHECKPOINT=last"] if command == "infer" else []
    place.call(command, f"RUN={run}", *words).refused(5, "adapter_model.safetensors")
    assert not (run / "merged").exists()


def test_a_conversation_over_a_pipe_keeps_its_history(place: Place, why: str) -> None:
    lines = f"{QUESTIONS[0]}\nWhy?\n/reset\nWhy?\n/what\n/quit\nnever asked\n"
    done = place.run("infer", "RUN=demo", "JSON=1", stdin=lines)
    assert done.returncode == 0, done.stderr
    turns = [json.loads(line) for line in done.stdout.splitlines()]
    assert [turn["prompt"] for turn in turns] == [QUESTIONS[0], "Why?", "Why?"]
    assert "the conversation is cleared" in done.stderr and "unknown command" in done.stderr
    assert turns[2]["answer"] + "\n" == why, "after /reset nothing of the history is left"
    streamed = place.run("infer", "RUN=demo", stdin=f"{QUESTIONS[0]}\n")
    assert streamed.returncode == 0 and streamed.stdout.strip() == turns[0]["answer"]


def test_a_question_without_the_system_turn_of_all_training_rows_is_noted(place: Place, tmp_path: Path) -> None:
    system, data = "You are a shop's clerk.", tmp_path / "rows.jsonl"
    rows = [{"system": system, "body": f"What is {i}?", "completion": f"{i} is a number."} for i in range(9)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = f"DATA_SOURCES=[{{path: {data}, columns: {{prompt: body}}}}]"
    words = (f"CONFIG={place.config}", "DATA_TRAIN_PATH=null", sources, "RUN_NAME=clerk", "TRAIN_MAX_STEPS=2")
    assert place.run("train", *words).returncode == 0
    note = f'every training row began with the system turn "{system}"'
    bare = place.call("infer", "RUN=clerk", "PROMPT=Why?")
    assert f"{note}, which is missing here; SYSTEM=trained adds it" in bare.err, bare.err
    asked, output = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    asked.write_text(json.dumps({"system": system, "body": "Why?"}) + '\n{"body": "Why?"}\n')
    done = place.call("infer", "RUN=clerk", f"INPUT={asked}", f"OUTPUT={output}")
    assert f"{note}, which 1 of 2 prompts lack" in done.err
    answers = [json.loads(line)["answer"] + "\n" for line in output.read_text().splitlines()]
    assert answers[1] == bare.out
    for word in ("SYSTEM=trained", f"SYSTEM={system}"):
        done = place.call("infer", "RUN=clerk", "PROMPT=Why?", word)
        assert done.out == answers[0] and note not in done.err
    chat = place.run("infer", "RUN=clerk", "SYSTEM=trained", stdin="Why?\n")
    assert chat.stdout == answers[0], chat.stderr
    assert place.call("card", "RUN=clerk", f"OUT={tmp_path}/card.md").code == 0
    assert '[{"role": "system", "content": "..."}, {"role"' in (tmp_path / "card.md").read_text()
    merged = place.call("merge", "RUN=clerk")
    assert note in merged.err and "clerk/merged: step 2 of the run, " in merged.out
    model = f"MODEL={place.folder}/runs/clerk/merged"
    done = place.call("infer", model, f"INPUT={asked}", f"OUTPUT={output}")
    assert f"{note}, which 1 of 2 prompts lack" in done.err, "the run around a model says how its rows are read"
    assert place.call("eval", model, f"DATA={data}").code == 0
    place.call("infer", "RUN=demo", "PROMPT=Why?", "SYSTEM=trained").refused(2, "all began with one system turn")


def test_the_published_model_has_a_card_without_a_path_of_the_machine(place: Place) -> None:
    run = place.folder / "runs" / "demo"
    assert not list(run.rglob("README.md")), "PEFT's form names paths of this machine"
    assert place.run("card", "RUN=demo").returncode == 0
    card = (run / "model" / "README.md").read_text()
    assert "rank 16, alpha 32" in card and "LoRA adapters for `model`" in card and str(place.folder) not in card


@pytest.fixture(scope="module")
def merged(place: Place) -> Path:
    out = place.folder / "runs" / "demo" / "merged"
    done = place.run("merge", "RUN=demo")
    assert done.returncode == 0, done.stderr
    assert (
        f"make serve MODEL={out}" in done.stderr
        and f"vllm serve {out}" in done.stderr
        and "transformers" in done.stderr
    )
    return out


def test_merge_publishes_a_plain_model_once(place: Place, merged: Path) -> None:
    from transformers import AutoModelForCausalLM

    facts = place.call("merge", "RUN=demo", "JSON=1", f"OUT={place.folder}/another").json
    assert facts["folder"] == f"{place.folder}/another" and facts["difference"] <= 1e-4 * facts["largest_logit"]
    assert type(AutoModelForCausalLM.from_pretrained(merged)).__name__ == "LlamaForCausalLM"
    stamp = json.loads((merged / "stamp.json").read_text())
    assert stamp["merged_from"]["run"] == "demo" and len(stamp) > 1, "the run's stamp is kept"
    assert len({stat.S_IMODE(path.stat().st_mode) for path in merged.iterdir()}) == 1, (
        "all files can be read by the same people"
    )
    place.call("merge", "RUN=demo").refused(2, "overwrites nothing")


def test_any_folder_with_a_model_can_be_tried(place: Place, merged: Path, why: str, tmp_path: Path) -> None:
    for words in ((f"MODEL={merged}",), (f"RUN={merged}",)):
        done = place.call("infer", *words, "PROMPT=Why?", "TRAIN_GENERATION_MAX_NEW_TOKENS=12")
        assert (done.code, done.out) == (0, why), done.err
    done = place.call("infer", f"MODEL={merged}", "PROMPT=Why?", "TRAIN_GENERATION_MAX_NEW_TOKENS=1")
    assert "the answer was cut at 1 tokens; TRAIN_GENERATION_MAX_NEW_TOKENS=2 allows more" in done.err
    place.call("infer", f"MODEL={merged}", "PROMPT=" + "Why? " * 600).refused(4, "`PROMPT`: the prompt has")
    questions, output = tmp_path / "questions.txt", tmp_path / "answers.jsonl"
    questions.write_text("Why?\n\nWhy?\n")
    done = place.call(
        "infer", f"MODEL={place.folder / 'model'}", f"INPUT={questions}", f"OUTPUT={output}", "EVAL_BATCH_SIZE=2"
    )
    assert done.code == 0, done.err
    assert [json.loads(line)["prompt"] for line in output.read_text().splitlines()] == ["Why?", "", "Why?"]


@pytest.mark.parametrize(
    ("command", "words", "code", "message"),
    [
        ("infer", "RUN=demo INPUT=x.txt", 2, "`INPUT` needs `OUTPUT`"),
        ("infer", "RUN=demo PROMPT=", 2, "`PROMPT` is empty"),
        ("infer", "RUN=demo PROMPT=\udcff", 2, "`PROMPT` is not UTF-8 text"),
        ("infer", "RUN=demo PROMPT=a INPUT=x.txt OUTPUT=y", 2, "one or the other"),
        ("infer", "RUN=demo INPUT={0}/data.jsonl OUTPUT={0}/data.jsonl", 2, "is the same file as `INPUT`"),
        ("infer", "RUN=demo INPUT={0}/data.jsonl OUTPUT={0}/none/a.jsonl", 2, "cannot be written"),
        ("infer", "RUN=demo INPUT={0}/data.jsonl OUTPUT={0}/a.xlsx", 2, "hint: OUTPUT={0}/a.jsonl"),
        ("infer", "RUN=demo PROMPT=a TRAIN_LEARNING_RATE=1", 2, "cannot change `train.learning_rate`"),
        ("infer", "MODEL={0}/runs/demo/merged RUN=demo", 2, "`RUN` and `MODEL` are both given"),
        ("infer", "MODEL={0}/runs/demo/merged CHECKPOINT=last", 2, "`CHECKPOINT` is one of a run"),
        ("infer", "MODEL={0}/nowhere PROMPT=Why?", 4, "there is no such model folder"),
        ("serve", "MODEL={0}/runs/demo/model", 2, "hint: make serve RUN={0}/runs/demo"),
        ("serve", "RUN=demo PORT=70000", 2, "1 to 65535"),
        ("serve", "RUN=demo PORT=0", 2, "`PORT` is `0`"),
    ],
)
def test_invalid_calls_of_infer_and_merge_are_refused(
    place: Place, merged: Path, command: str, words: str, code: int, message: str
) -> None:
    place.call(command, *words.format(place.folder).split()).refused(code, message.format(place.folder))


def test_a_piped_question_that_is_not_utf_8_is_refused(place: Place) -> None:
    command = place.command("infer", "RUN=demo")
    done = subprocess.run(command, input=b"caf\xe9\n", env=place.environment, capture_output=True, check=False)
    assert done.returncode == 2 and b"is not UTF-8 text" in done.stderr and b"Traceback" not in done.stderr


def as_in_the_hubs_cache(folder: Path, cache: Path) -> Path:
    """Copy a model into the layout of the hub's cache, whose snapshots consist of links; return the snapshot."""
    blobs, snapshot = cache / "models--a--b" / "blobs", cache / "models--a--b" / "snapshots" / ("a" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        blob = blobs / file_sha256(path)
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.broad_but("full")
def test_a_base_of_links_is_published_like_a_folder_of_files(place: Place, tmp_path: Path, mode: str) -> None:
    base = Path(shutil.copytree(place.folder / "model", tmp_path / "base"))
    settings = {"eos_token_id": [2, 5, 7], "temperature": 0.7, "do_sample": True}
    (base / "generation_config.json").write_text(json.dumps(settings))
    (base / "preprocessor_config.json").write_text("{}")
    (base / "LICENSE").write_text("mine")
    published = []
    for name, model in ((f"files-{mode}", base), (f"links-{mode}", as_in_the_hubs_cache(base, tmp_path / "hub"))):
        words = (f"CONFIG={place.config}", f"RUN_NAME={name}", f"MODEL_NAME={model}", f"TUNING_MODE={mode}")
        done = place.run("train", *words)
        assert done.returncode == 0, done.stderr
        run = place.folder / "runs" / name
        if mode == "lora":
            assert place.run("merge", f"RUN={name}").returncode == 0
        folder = run / ("merged" if mode == "lora" else "model")
        assert not any(path.is_symlink() for path in folder.iterdir())
        files = [path for path in folder.iterdir() if path.name not in ("stamp.json", "README.md")]
        published.append({path.name: path.read_bytes().replace(str(model).encode(), b"base") for path in files})
    assert published[0] == published[1]
    generation = json.loads(published[1]["generation_config.json"])
    assert set(settings["eos_token_id"]) <= set(generation["eos_token_id"]) and generation["temperature"] == 0.7
