"""What is copied to machines of a cluster, and what must never be lost there. rsync is the real one; ssh is a program
that runs the command here.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sft_play.cluster import bring
from sft_play.cluster.bring import SET_ASIDE, install, send_code, send_model
from sft_play.cluster.inventory import Host
from sft_play.cluster.ssh import last_word, settings_to_forward
from sft_play.errors import DataError, HardwareError, UserError
from tests.cluster_facts import OWN
from tests.programs import need

SSH = """#!/bin/sh
while :; do case "$1" in -T|-tt) shift;; -F|-o|-p|-l) shift 2;; --) shift; break;; *) break;; esac; done
shift; cd "$THERE" && HOME="$THERE" exec sh -c "$*"
"""
HOST = Host(name="old", address="192.0.2.1", folder="~/sft-play", place="home.yaml:4")


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return another machine's project folder; this machine's is next to it, in `here`."""
    need("rsync")
    programs, home = tmp_path / "bin", tmp_path / "home"
    for folder in (programs, home / "sft-play", tmp_path / "here"):
        folder.mkdir(parents=True)
    (programs / "ssh").write_text(SSH)
    (programs / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("THERE", str(home))
    return home / "sft-play"


@pytest.fixture
def here(there: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the project folder of this machine."""
    folder = there.parent.parent / "here"
    (folder / "sft_play").mkdir()
    monkeypatch.setattr(bring, "project", lambda: folder)
    return folder


def write(folder: Path, **texts: str) -> list[str]:
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    return [f"{name}.py" for name in texts]


def send(names: Sequence[str]) -> None:
    send_code(HOST, names)


def send_model_there(there: Path, folder: Path, place: str) -> None:
    send_model(HOST, replace(OWN, cache=str(there / "cache")), folder, place)


def test_a_users_file_is_never_replaced(there: Path, here: Path) -> None:
    names = write(here, a="ours", b="same", new="new")
    write(there, a="hours of work", b="same")
    os.utime(there / "b.py", (1e9, 1e9))
    with pytest.raises(
        UserError,
        match=r"host `old`: `~/sft-play` has 1 file that this command did not bring, and others than here: `a.py`",
    ) as error:
        send(names)
    assert "another `folder`" in (error.value.hint or "") and error.value.place == "home.yaml:4"
    assert (there / "a.py").read_text() == "hours of work" and not (there / "new.py").exists(), "nothing is sent"
    (there / "a.py").unlink()
    send(names)
    assert [(there / name).read_text() for name in names] == ["ours", "same", "new"]


def test_replaced_and_removed_files_are_backed_up(there: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder that we filled, an edit there is kept and reported, and other files stay; of the package, what is
    gone here goes there too.
    """
    odd = [os.fsdecode(b"caf\xe9.py"), "-e sh", "it's $HOME", "#x.py", "sft_play/x.py", "sft_play/data/gone.py"]
    (here / "sft_play" / "data").mkdir(parents=True)
    for name in odd:
        (here / name).write_text("x")
    names = [*write(here, a="first"), *odd]
    send(names)
    assert all((there / name).read_text() == "x" for name in odd) and "replaced" not in capsys.readouterr().err
    (there / "a.py").write_text("edited on the host")
    (there / "own.py").write_text("a person's")
    cached = there / "sft_play" / "__pycache__" / "x.pyc"
    cached.parent.mkdir()
    cached.touch()
    write(here, a="second, longer")
    (here / odd[-1]).unlink()
    send(["a.py", *odd[:-1]])
    assert (there / "a.py").read_text() == "second, longer" and (there / "own.py").exists() and cached.exists()
    (aside,) = (there / SET_ASIDE).iterdir()
    assert (aside / "a.py").read_text() == "edited on the host"
    notes = capsys.readouterr().err
    assert f"host `old`: `a.py` replaced; the old files are in `~/sft-play/{SET_ASIDE}/{aside.name}`" in notes
    assert f"host `old`: `{odd[-1]}` not here; moved to `~/sft-play/{SET_ASIDE}/{aside.name}`" in notes
    moved = {str(path.relative_to(aside)) for path in aside.rglob("*") if path.is_file()}
    assert moved == {"a.py", odd[-1]} and not (there / odd[-1]).exists() and (there / "sft_play" / "x.py").exists()


def test_a_folder_that_is_this_project_is_unchanged(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that all machines see."""
    (there / "sft_play").mkdir()
    write(there, a="edited just now")
    monkeypatch.setattr(bring, "project", lambda: there)
    send(["a.py"])
    assert (there / "a.py").read_text() == "edited just now" and not (there / SET_ASIDE).exists()


def test_an_existing_model_is_not_written_again(there: Path, here: Path) -> None:
    """Of another time, as one that was downloaded there. A different one is refused."""
    model = there / "model"
    for folder, time in ((here, 1.5e9), (model, 1.2e9)):
        folder.mkdir(exist_ok=True)
        (folder / "weights of it's model").write_text("w" * 100_000)
        os.utime(folder / "weights of it's model", (time, time))
    (here / "small").write_text("s")
    before = (model / "weights of it's model").stat().st_ino
    send_model_there(there, here, str(model))
    assert (model / "small").read_text() == "s"
    now = (model / "weights of it's model").stat()
    assert (now.st_ino, now.st_mtime) == (
        before,
        1.5e9,
    ), "not written again; its time is this one's, so that it is not read again"
    (here / "weights of it's model").write_text("v" * 100_000)
    send_model_there(there, here, str(model))
    assert (model / "weights of it's model").read_text() == "v" * 100_000, "a later version of one's own"
    (there / "other").mkdir()
    (there / "other" / "small").write_text("theirs")
    with pytest.raises(UserError, match="`small`") as error:
        send_model_there(there, here, str(there / "other"))
    assert "it is another model" in (error.value.hint or "") and (there / "other" / "small").read_text() == "theirs"


def test_a_model_of_the_hubs_cache_is_copied_with_its_links(
    there: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links stay links, and the commit of a branch on the machine is unchanged."""
    repository = here / "models--a--b"
    for part in ("blobs", "snapshots/c", "refs"):
        (repository / part).mkdir(parents=True)
    (repository / "blobs" / "1").write_text("weights")
    (repository / "snapshots" / "c" / "a -> b").symlink_to("../../blobs/1")
    (repository / "refs" / "main").write_text("commit of ours")
    (there / "models--a--b" / "refs").mkdir(parents=True)
    (there / "models--a--b" / "refs" / "main").write_text("of theirs")
    monkeypatch.setenv("HF_HUB_CACHE", str(here))
    for _ in range(2):
        send_model_there(there, repository / "snapshots" / "c", "~/sft-play/models--a--b/snapshots/c")
        link = there / "models--a--b" / "snapshots" / "c" / "a -> b"
        assert link.is_symlink() and link.read_text() == "weights"
        assert (there / "models--a--b" / "refs" / "main").read_text() == "of theirs"


def test_links_out_of_a_model_are_not_followed_and_its_secrets_are_not_uploaded(there: Path, here: Path) -> None:
    (here / "config.json").write_text("{}")
    (here / ".env").write_text("PASSWORD=x")
    (here / "store").write_text("weights")
    (here / "model.safetensors").symlink_to("store")
    (there.parent.parent / "id_ed25519").write_text("a key")
    send_model_there(there, here, "~/sft-play/model")
    sent = ["config.json", "model.safetensors", "store"]
    assert sorted(path.name for path in (there / "model").iterdir()) == sent
    assert not (there / "model" / "model.safetensors").is_symlink()
    (here / "LICENSE.txt").symlink_to(there.parent.parent / "id_ed25519")
    with pytest.raises(DataError, match="outside of the folder"):
        send_model_there(there, here, "~/sft-play/model")
    assert sorted(path.name for path in (there / "model").iterdir()) == sent


def test_only_tracked_files_are_copied_as_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["kept.py", "gone.py", ".env", "conf/.env.local", ".env.example"]
    for name in [*names, "configs/new.yaml", "sft_play/new.py", "notes.txt", "ignored.log"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    odd = os.fsdecode(b"caf\xe9.py")
    (tmp_path / odd).write_text("x")
    (tmp_path / ".gitignore").write_text("*.log\n")
    for words in (["init", "-q"], ["add", "-f", *names, odd]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, timeout=240)
    (tmp_path / "gone.py").unlink()
    (tmp_path / "kept.py").write_text("modified")
    monkeypatch.setattr(bring, "project", lambda: tmp_path)
    assert bring.code_files() == sorted([".env.example", "kept.py", odd])
    error = capsys.readouterr().err
    assert error == "note: not sent, because git does not track it: `sft_play/new.py`; `git add` sends them\n"


def test_a_project_of_which_git_tracks_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty list would send nothing, and compare nothing without a word; an installed package is in no checkout."""
    subprocess.run(["git", "init", "-q", str(tmp_path / "empty")], check=True, timeout=240)
    (tmp_path / "empty" / "new.py").write_text("x")
    for place, why in ((tmp_path / "empty", "nothing was added"), (tmp_path, "not a git repository")):
        monkeypatch.setattr(bring, "project", lambda place=place: place)
        with pytest.raises(UserError, match="it tracks none") as caught:
            bring.code_files()
        assert why in caught.value.message
        assert "git clone the project, `make install` in the clone" in (caught.value.hint or "")


def test_the_relevant_line_of_rsync_is_reported() -> None:
    full, follows = "rsync: write failed on `/x`: No space left on device (28)", "rsync: connection unexpectedly closed"
    summary = "rsync error: error in file IO (code 11) at receiver.c(380)"
    assert last_word(f"{full}\n{follows}\n{summary}\n") == full
    assert last_word(f"{follows}\n{summary}\n") == follows and last_word(summary) == summary


def test_settings_but_no_secrets_are_passed_to_every_machine() -> None:
    passed = {
        "HF_ENDPOINT": "https://hub.lan",
        "AIM_REPO": "aim://10.0.0.1:53800",
        "HF_HUB_ETAG_TIMEOUT": "9",
        "NCCL_DEBUG": "INFO",
        "SFT_TRAIN_SEED": "3",
    }
    own = {
        "HF_HOME": "/x",
        "HF_HUB_CACHE": "/x",
        "HF_DATASETS_CACHE": "/x",
        "HF_TOKEN_PATH": "/x",
        "HF_TOKEN": "hf_abc",
        "SFT_PLAY_CACHE": "/x",
        "NCCL_SOCKET_IFNAME": "eth0",
        "HOME": "/x",
    }
    secret = {"HF_ENDPOINT": "https://me:word@hub.lan"}
    assert settings_to_forward({**own, **passed}) == passed and settings_to_forward(secret) == {}


def test_a_machine_without_the_same_python_is_refused(there: Path) -> None:
    """Nothing is installed that could not be used; the hint names the address, and the packages that bring that
    Python.
    """
    host = replace(HOST, user="anna", port=2222)
    own = replace(OWN, versions={"python": "3.99.1"})
    with pytest.raises(HardwareError) as error:
        install(host, ["scripts/install.sh"], own)
    assert "there is no Python 3.99, which the first host has; python3 is Python 3." in error.value.message
    assert "ssh -p 2222 anna@192.0.2.1, sudo apt install make python3.99 python3.99-venv" in (error.value.hint or "")
    assert not (there / ".venv").exists()


def test_links_and_pipes_are_not_copied_from_a_machine(there: Path, tmp_path: Path) -> None:
    theirs = there.parent / "runs" / "demo" / "logs"
    theirs.mkdir(parents=True)
    (theirs / "rank1.log").write_text("words")
    (theirs / "rank2.log").symlink_to("/etc/hostname")
    os.mkfifo(theirs / "rank3.log")
    bring.fetch(HOST, f"{theirs}/", tmp_path / "logs", 20)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["rank1.log"]
