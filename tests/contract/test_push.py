"""`make card` and `make push`: the hub's model card of a run, and the real hub client against a hub on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.conftest import Done, environment, run_program
from tests.hub import TOKEN, Repository, serve_repository
from tests.trained_runs import make_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run = make_run(folder / "tuned", tiny)
    run.training_metrics.write_text(json.dumps({"steps": 5, "training_seconds": 90, "tokens_per_second": 1234.5}))
    for step, mean in ((0, 0.1), (5, 0.4)):
        run.evaluation(step).mkdir(parents=True)
        found = {"loss": 3.0 - step / 5, "rougeL": {"mean": mean, "low": mean - 0.05, "high": mean + 0.05, "n": 40}}
        (run.evaluation(step) / "scores.json").write_text(json.dumps(found))
    stamp = json.loads((run.model / "stamp.json").read_text())
    (run.model / "stamp.json").write_text(json.dumps({**stamp, "step": 5}))
    return folder


def typed(runs: Path, *words: str, hub: Repository | None = None, token: str = TOKEN) -> Done:
    where = hub.url if hub else "http://127.0.0.1:9"
    online = {"HF_ENDPOINT": where, "HF_HUB_OFFLINE": "0", "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    done = run_program(list(words), environment(runs / "cache", runs, online), timeout=120)
    assert "Traceback" not in done.err, done.err
    return done


def test_the_card_says_what_made_the_model(runs: Path, tmp_path: Path) -> None:
    done = typed(runs, "card", "RUN=tuned", f"OUT={tmp_path / 'card.md'}")
    assert done.code == 0, done.err
    text = (tmp_path / "card.md").read_text()
    header = yaml.safe_load(text.split("---\n")[1])
    assert (header["library_name"], header["pipeline_tag"]) == ("peft", "text-generation")
    assert header["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.4
    assert "| ROUGE-L | 0.1000 [0.0500, 0.1500] | 0.4000 [0.3500, 0.4500] |" in text
    assert "AutoPeftModelForCausalLM" in text and "1.5 min" in text
    assert str(runs) not in text and "/tmp/" not in text, "no path of this machine"


def test_nothing_is_uploaded_without_yes(runs: Path) -> None:
    with serve_repository() as hub:
        done = typed(runs, "push", "RUN=tuned", "REPO=me/tuned", hub=hub)
        assert done.code == 0, done.err
        assert "a new private repository" in done.out and "adapter_model.safetensors" in done.out and "YES=1" in done.out
        assert not hub.name and not hub.files

        done = typed(runs, "push", "RUN=tuned", "REPO=me/tuned", "YES=1", hub=hub)
        assert done.code == 0, done.err
        assert hub.name == "me/tuned" and hub.private is True
        assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"} <= set(hub.files)
        assert not {"stamp.json", "optimizer-rank0.safetensors"} & set(hub.files)
        assert hub.files["adapter_model.safetensors"] == (runs / "tuned" / "model" / "adapter_model.safetensors").read_bytes()
        assert b"model-index" in hub.files["README.md"]

        again = typed(runs, "push", "RUN=tuned", "REPO=me/tuned", "JSON=1", hub=hub)
        assert again.json["exists"] and "adapter_model.safetensors" in again.json["replaced"]


def test_what_the_hub_refuses_is_said(runs: Path) -> None:
    with serve_repository(readers={"hf_reads_only"}) as hub:
        for token, code, words in (
            ("hf_reads_only", 4, "may not write to `me/tuned`"),
            ("hf_unknown", 4, "may not write"),
            ("", 3, "no token"),
        ):
            typed(runs, "push", "RUN=tuned", "REPO=me/tuned", "YES=1", hub=hub, token=token).refused(code, words)
    for repository in ("tuned", "a/b/c"):
        assert typed(runs, "push", "RUN=tuned", f"REPO={repository}").code == 2
    typed(runs, "push", "RUN=tuned", "REPO=me/tuned", "YES=1").refused(3, "cannot be reached")


@pytest.mark.parametrize(("token", "why"), [(TOKEN, "the hub cannot be reached"), ("", "no token for the hub is set")])
def test_what_would_go_is_shown_without_a_hub(runs: Path, token: str, why: str) -> None:
    done = typed(runs, "push", "RUN=tuned", "REPO=me/tuned", token=token)
    assert done.code == 0, done.err
    size = (runs / "tuned" / "model" / "adapter_model.safetensors").stat().st_size
    assert f"{size:,}  adapter_model.safetensors" in done.out and f"not compared with the hub: {why}" in done.out
    assert "| ROUGE-L | 0.1000 [0.0500, 0.1500]" in done.out, "the card"
    assert done.out.endswith("nothing was uploaded; YES=1 does it\n")
    found = typed(runs, "push", "RUN=tuned", "REPO=me/tuned", "JSON=1", token=token).json
    assert (found["exists"], found["replaced"], found["uploaded"]) == (None, None, None) and found["card"].startswith("---")
