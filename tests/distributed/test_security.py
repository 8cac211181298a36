"""Real runs with planted tokens, planted pickles and strangers at the server's door; and a run repeated from another's
folder.
"""

from __future__ import annotations

import shlex
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.conftest import Done, metrics, run_program
from tests.places import Place, question_rows
from tests.tiny_models import build_tiny_llama

SECRETS = {
    "HF_TOKEN": "hf_PlantedHubPlantedHubPlantedHub1",
    "HUGGING_FACE_HUB_TOKEN": "hf_PlantedOldPlantedOldPlantedOld2",
    "WANDB_API_KEY": "planted-wandb-0123456789abcdef",
    "AWS_SECRET_ACCESS_KEY": "planted/aws/0123456789",
    "HF_SECRET_THING": "planted-thing-4711",
    "COMET_API_KEY": "planted-comet-0815",
    "SFT_PLAY_SERVE_TOKEN": "planted-serve-0123456789",
    "MASTER_KEY": "planted-master-0123456789",
    "NCCL_PASSWORD": "planted-nccl-99",
}


@contextmanager
def arguments_watched() -> Iterator[None]:
    """Watch the arguments of every process, and fail if they contain a planted token."""
    seen, over = Counter[str](), threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    words = file.read_bytes().decode(errors="replace")
                    seen.update(["looked", *(name for name, value in SECRETS.items() if value in words)])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join(10)
    assert seen.pop("looked") > 100 and not seen, seen


def planted_in(folder: Path) -> list[str]:
    """Return the files below `folder` that hold one of the tokens."""
    secrets = [value.encode() for value in SECRETS.values()]
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files
    return [str(path) for path in files if any(value in path.read_bytes() for value in secrets)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, str]:
    """Train with tokens in the environment while all arguments are watched; return the run and its output."""
    place = Place(tmp_path_factory.mktemp("security"))
    model = build_tiny_llama(place.folder / "model")
    (place.folder / "data.jsonl").write_text(question_rows(0, 24, longest=6))
    (place.folder / "held.jsonl").write_text(question_rows(50, 4, longest=3))
    place.config.write_text(
        f"model: {{name: {model}, max_seq_len: 64}}\ntuning: {{mode: lora}}\n"
        f"data: {{train_path: {place.folder}/data.jsonl, val_path: {place.folder}/held.jsonl}}\n"
        "train: {max_steps: 4, save_steps: 2, logging_steps: 1, global_batch_size: 8, generation_max_new_tokens: 4}\n"
    )
    with arguments_watched():
        done = run(place, "train", f"CONFIG={place.config}", "RUN_NAME=demo")
    assert done.code == 0, done.err
    return place, done.out + done.err


def run(place: Place, *words: str) -> Done:
    return run_program(list(words), place.environment | SECRETS, timeout=400, stdin="")


def test_a_training_writes_and_shows_no_token(trained: tuple[Place, str]) -> None:
    place, printed = trained
    log = (place.folder / "runs" / "demo" / "logs" / "launcher.log").read_text(encoding="utf-8")
    assert "HF_TOKEN=(" in log, "that it is set is worth knowing"
    assert [value for value in SECRETS.values() if value in printed] == []
    assert planted_in(place.folder) == []


def test_a_run_is_repeated_bit_for_bit_from_its_folder(trained: tuple[Place, str]) -> None:
    place, _ = trained
    stamp = place.call("stamp", "RUN=demo", "JSON=1").json
    assert stamp["again"].startswith("make train CONFIG=") and "RUN_NAME=demo-again" in stamp["again"]
    place.config.rename(place.config.with_suffix(".moved"))  # nothing but the run's folder is left of its configuration
    done = place.run(*shlex.split(stamp["again"])[1:], timeout=400)
    assert done.returncode == 0, done.stderr
    runs = place.folder / "runs"

    def curve(name: str) -> list[tuple[float, ...]]:
        return [
            tuple(row[key] for key in ("step", "loss", "grad_norm", "learning_rate")) for row in metrics(runs / name)
        ]

    assert len(curve("demo")) == 4
    assert curve("demo-again") == curve("demo")
    weights = [(runs / name / "model" / "adapter_model.safetensors").read_bytes() for name in ("demo", "demo-again")]
    assert weights[0] == weights[1]
    differing = place.call("stamp", "A=demo", "B=demo-again", "JSON=1").json["differences"]
    assert {row["field"] for row in differing} <= {"git", "code"}, "the checkout is edited while tests run"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_other_command_writes_or_shows_a_token(trained: tuple[Place, str]) -> None:
    place, _ = trained
    shown = ""
    with arguments_watched():
        for words in (
            ["resume", "RUN=demo", "TRAIN_MAX_STEPS=6"],
            ["eval", "RUN=demo", "JSON=1"],
            ["infer", "RUN=demo", "PROMPT=What?", "JSON=1"],
            ["merge", "RUN=demo", f"OUT={place.folder}/merged"],
            ["stamp", "RUN=demo", "JSON=1"],
            ["doctor", "JSON=1"],
            ["config", "RUN=demo", "JSON=1"],
        ):
            done = run(place, *words)
            assert done.code == 0 or words[0] == "doctor", f"{words}: {done.err}"
            shown += done.out + done.err
    assert [value for value in SECRETS.values() if value in shown] == []
    assert planted_in(place.folder) == []
