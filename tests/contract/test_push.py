"""`make card` and `make push`: the hub's model card of a run, and the real hub client against a hub on this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft_play.runs.folder import RunFolder
from tests.conftest import Done, call_program, environment, run_program
from tests.hub import TOKEN, Repository, serve_repository
from tests.trained_runs import make_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run = make_run(folder / "tuned", tiny)
    sources = [{"name": name, "rows": 20, "tokens": 200, "label_tokens": 40} for name in ("a/b/faq.csv", "chat.jsonl")]
    counts = {"rows": 40, "dropped": 0, "tokens": 400, "label_tokens": 80, "longest": 12, "median": 10}
    prepared = json.loads(run.prepared.read_text())
    held_out = {"path": "unused", "fingerprint": "f" * 64, "sources": sources, **counts}
    run.prepared.write_text(json.dumps({**prepared, "validation": held_out}))
    run.training_metrics.write_text(json.dumps({"steps": 5, "training_seconds": 90, "tokens_per_second": 1234.5}))
    for step, mean in ((0, 0.1), (5, 0.4)):
        run.evaluation(step).mkdir(parents=True)
        scores = {"loss": 3.0 - step / 5, "rougeL": {"mean": mean, "low": mean - 0.05, "high": mean + 0.05, "n": 40}}
        (run.evaluation(step) / "scores.json").write_text(json.dumps(scores))
    stamp = json.loads((run.model / "stamp.json").read_text())
    (run.model / "stamp.json").write_text(json.dumps({**stamp, "step": 5}))
    return folder


def typed(runs: Path, *words: str, hub: Repository | None = None, token: str = TOKEN) -> Done:
    where = hub.url if hub else "http://127.0.0.1:9"
    online = {"HF_ENDPOINT": where, "HF_HUB_OFFLINE": "0", "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    done = run_program(list(words), environment(runs / "cache", runs, online), timeout=240)
    assert "Traceback" not in done.err, done.err
    return done


def test_the_card_describes_the_training(runs: Path, tmp_path: Path) -> None:
    done = typed(runs, "card", "RUN=tuned", f"OUT={tmp_path / 'card.md'}")
    assert done.code == 0, done.err
    text = (tmp_path / "card.md").read_text()
    header = yaml.safe_load(text.split("---\n")[1])
    assert (header["library_name"], header["pipeline_tag"]) == ("peft", "text-generation")
    assert "| ROUGE-L | 0.1000 [0.0500, 0.1500] | 0.4000 [0.3500, 0.4500] |" in text and "over 40 answers" in text
    assert "AutoPeftModelForCausalLM" in text and "| time | 90 s |" in text
    assert str(runs) not in text and "/tmp/" not in text, "no path of this machine"


def test_scores_on_other_rows_are_named_by_their_file_in_the_card(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "tuned", tmp_path / "tuned")
    scores = tmp_path / "tuned" / "eval" / "step-000005"
    other = scores.rename(scores.with_name("step-000005-other-0123abcd")) / "scores.json"
    write(other, json.loads(other.read_text()) | {"settings": {"data": "/home/me/other.jsonl", "rows_trained": 1}})
    done = typed(runs, "card", f"RUN={tmp_path / 'tuned'}", f"OUT={tmp_path / 'card.md'}")
    assert done.code == 0, done.err
    card = (tmp_path / "card.md").read_text()
    assert "was not scored on the rows that its run held out" in card
    assert "On `other.jsonl`, with" in card and "/home" not in card and "**1 of these rows was trained" in card


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def test_the_card_says_what_scores_are_worth(runs: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "tuned")
    shutil.copytree(runs / "tuned", run.path)
    scores = json.loads((run.evaluation(5) / "scores.json").read_text())
    write(run.evaluation(5) / "scores.json", scores | {"settings": {"rows_trained": 8}})
    words = ("card", f"RUN={run.path}", f"OUT={tmp_path / 'card.md'}")
    assert typed(runs, *words).code == 0
    assert "8 of these rows were trained: such scores show memory" in (tmp_path / "card.md").read_text()
    shutil.rmtree(run.path / "eval")
    rows = [{"kind": "eval", "step": step, "eval_loss": loss} for step, loss in ((0, 2.5), (5, 0.5766), (9, 0.1))]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = json.loads(run.config.read_text())
    config["config"]["tuning"]["task"] = "cpt"
    write(run.config, config)
    assert typed(runs, *words).code == 0
    text = (tmp_path / "card.md").read_text()
    assert "measured while training: 0.5766 at step 5, 2.5000 before training" in text
    assert 'tokenizer("The beginning of a text"' in text and "messages" not in text, "documents have no turns"


def test_the_card_has_the_data_of_all_runs_that_made_the_weights(runs: Path, tiny: Path, tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "second")
    for run, source, weight in ((first, "books.txt", None), (second, "chat.jsonl", 0.25)):
        shutil.copytree(runs / "tuned", run.path)
        prepared = json.loads(run.prepared.read_text())
        counts = {"rows": 20, "tokens": 200, "label_tokens": 40}
        train = {**prepared["validation"], "sources": [{"name": source, "weight": weight, **counts}]}
        write(run.prepared, {**prepared, "train": train})
    adapter = {"name": "first", "path": str(first.model), "fingerprint": "0"}
    write(second.prepared, json.loads(second.prepared.read_text()) | {"adapter": adapter})
    for run in (second, first):  # and if a run names itself, once
        assert typed(runs, "card", f"RUN={second.path}", f"OUT={tmp_path / 'card.md'}").code == 0
        text = (tmp_path / "card.md").read_text()
        assert "trained from `tiny` by these runs, one on the other: `first` (5 steps), `second` (5 steps)" in text
        assert "| first | training | books.txt | 20 | 200 | 40 | – |" in text
        assert "| second | training | chat.jsonl | 20 | 200 | 40 | 0.25 |" in text
        assert str(tmp_path) not in text
        write(run.prepared, json.loads(run.prepared.read_text()) | {"adapter": adapter})
    first.prepared.write_text("{")
    assert typed(runs, "card", f"RUN={second.path}", f"OUT={tmp_path / 'card.md'}").code == 0, "as far as they are here"


def test_the_card_names_the_copy_that_was_trained(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "tuned", tmp_path / "tuned")
    path = tmp_path / "tuned" / "prepared.json"
    prepared = json.loads(path.read_text())
    path.write_text(json.dumps(prepared | {"model": prepared["model"] | {"source": "embedded"}}))
    assert typed(runs, "card", f"RUN={tmp_path / 'tuned'}", f"OUT={tmp_path / 'card.md'}").code == 0
    card = (tmp_path / "card.md").read_text()
    assert "quantised to 4 bits (Q4_1), not on the hub's; any scores are of that copy too" in card


def test_a_card_does_not_contain_markup_of_a_runs_files(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    shutil.copytree(runs / "tuned", folder)
    path, evil = folder / "model" / "stamp.json", "<script>alert(1)</script> [x](javascript:alert(1)) `"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "base_model": evil, "strategy": evil, "versions": {evil: evil}})
    )
    done = typed(runs, "card", f"RUN={folder}", f"OUT={tmp_path / 'card.md'}")
    assert done.code == 0, done.err
    text = (tmp_path / "card.md").read_text()
    assert "<" not in text.split("---\n")[2] and "](" not in text and "script" in text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peft_type": "IA3"}, "`peft_type` is `IA3`"),
        ({"layer_replication": [[0, 100_000]]}, "`layer_replication`"),
        ({"r": "x"}, "`r` is `x`"),
        ([], "`peft_type` is `None`"),
    ],
)
def test_an_unsupported_adapter_is_refused_in_a_sentence(
    changed: Any, message: str, runs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tuned"
    shutil.copytree(runs / "tuned", folder)
    path = folder / "model" / "adapter_config.json"
    path.write_text(json.dumps(changed if isinstance(changed, list) else json.loads(path.read_text()) | changed))
    for words in (("infer", f"RUN={folder}", "PROMPT=a"), ("merge", f"RUN={folder}", f"OUT={tmp_path / 'out'}")):
        call_program(list(words), environment(runs / "cache", runs)).refused(5, message)


@pytest.mark.broad
def test_all_weights_go_to_the_hub_where_the_base_is_a_folder(runs: Path, tiny: Path) -> None:
    words = ("push", "RUN=tuned", "REPO=me/whole", "MERGED=1", "YES=1")
    typed(runs, *words).refused(5, "there are no merged weights", "make merge RUN=tuned")
    assert "make merge RUN=tuned && make push RUN=tuned" in typed(runs, *words[:3]).out
    merged = typed(runs, "merge", "RUN=tuned")
    assert merged.code == 0 and "make push RUN=tuned REPO=owner/name MERGED=1" in merged.err, merged.err
    config = runs / "tuned" / "merged" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"_name_or_path": str(tiny)}))
    with serve_repository() as hub:
        done = typed(runs, *words, hub=hub)
        assert done.code == 0 and "nobody else" not in done.out, done.err
        assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(hub.files)
        assert not any(str(path).encode() in text for text in hub.files.values() for path in (tiny, runs))
        assert b"AutoModelForCausalLM" in hub.files["README.md"]
    stamp = runs / "tuned" / "merged" / "stamp.json"
    made_of = json.loads(stamp.read_text())
    stamp.write_text(json.dumps(made_of | {"merged_from": {"sha256": {"adapter_model.safetensors": "0"}}}))
    typed(runs, *words).refused(5, "merged from other weights")


def test_nothing_is_uploaded_without_yes(runs: Path) -> None:
    with serve_repository() as hub:
        done = typed(runs, "push", "RUN=tuned", "REPO=me/tuned", hub=hub)
        assert done.code == 0, done.err
        assert (
            "a new private repository" in done.out and "adapter_model.safetensors" in done.out and "YES=1" in done.out
        )
        assert not hub.name and not hub.files

        for name in (
            "notes.txt",
            "passwords.json",
            "evil.md",
            "old.safetensors",
        ):  # other files next to the weights stay here
            (runs / "tuned" / "model" / name).write_text("mine alone")
        done = typed(runs, "push", "RUN=tuned", "REPO=me/tuned", "YES=1", hub=hub)
        assert done.code == 0, done.err
        assert not any(
            b"mine alone" in content or str(runs.parent).encode() in content for content in hub.files.values()
        )
        assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == "tiny"
        assert "nobody else can load these adapters: their base, `tiny`, is a folder" in done.out
        assert "make push RUN=tuned REPO=owner/name MERGED=1" in done.out
        assert b"is not published here" in hub.files["README.md"]
        assert hub.name == "me/tuned" and hub.private is True
        assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"} <= set(hub.files)
        assert not {"stamp.json", "optimizer-rank0.safetensors"} & set(hub.files)
        assert (
            hub.files["adapter_model.safetensors"]
            == (runs / "tuned" / "model" / "adapter_model.safetensors").read_bytes()
        )


def test_refusals_of_the_hub_are_reported(runs: Path) -> None:
    with serve_repository() as hub:
        for token, code, words in (("hf_reads_only", 4, "may not write to `me/tuned`"), ("", 3, "no token")):
            typed(runs, "push", "RUN=tuned", "REPO=me/tuned", "YES=1", hub=hub, token=token).refused(code, words)
    for repository in ("tuned", "a/b/c"):
        assert typed(runs, "push", "RUN=tuned", f"REPO={repository}").code == 2
    for address in (
        "https://huggingface.co/me/one",
        "hf.co/me/one",
        "https://huggingface.co/me/one/tree/main",
        "me/one/",
    ):
        typed(runs, "push", "RUN=tuned", f"REPO={address}").refused(2, "expected `owner/name`\n\nhint: REPO=me/one\n")
    typed(runs, "push", "RUN=tuned", "REPO=me/tuned", "YES=1").refused(3, "cannot be reached")


def test_an_upload_is_listed_without_a_hub(runs: Path) -> None:
    done = typed(runs, "push", "RUN=tuned", "REPO=me/tuned", token="")
    assert done.code == 0, done.err
    size = (runs / "tuned" / "model" / "adapter_model.safetensors").stat().st_size
    assert f"{size:,}  adapter_model.safetensors" in done.out and "not compared with the hub" in done.out
    assert "| ROUGE-L | 0.1000 [0.0500, 0.1500]" in done.out, "the card"
    assert done.out.endswith("nothing was uploaded; YES=1 does it\n")
    answer = typed(runs, "push", "RUN=tuned", "REPO=me/tuned", "JSON=1", token="").json
    assert answer["uploaded"] is None and answer["card"].startswith("---")
