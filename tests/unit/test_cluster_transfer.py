"""What comes to machines of a cluster, and what must never be lost there. rsync is the real one; ssh is a program that runs the command here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sft_play.cluster import remote, sync
from sft_play.cluster.children import ended_with_us
from sft_play.cluster.facts import Facts, check, facts_of, forwarded, only_optional_apart, versions_apart
from sft_play.cluster.install import install, judged, not_installed
from sft_play.cluster.transfer import Listing, deliver, digests, keep_list, last_line, look
from sft_play.cluster.transfer import remote as remote_path
from sft_play.config.cluster import Host, Inventory
from sft_play.errors import DataError, HardwareError, UserError
from sft_play.launch.agreement import versions_here
from sft_play.runs.folder import RunFolder
from sft_play.runs.origin import PACKAGES
from tests.conftest import ROOT
from tests.programs import need

SSH = """#!/bin/sh
while :; do case "$1" in -T|-tt) shift;; -F|-o|-p|-l) shift 2;; --) shift; break;; *) break;; esac; done
shift; cd "$THERE" && HOME="$THERE" exec sh -c "$*"
"""
HOST = Host(name="old", address="192.0.2.1", folder="~/sft-play", place="home.yaml:4")
LIST = Listing("~/sft-play/.cache/sft-play-sent", "another `folder`")
OWN = Facts(
    host="a", home="/home/a", folder="/srv/sft", runs="/srv/sft/runs", cache="/cache", hub="/hub", python="3.11.2",
    versions={"torch": "2.9.0", "peft": "0.18.0"}, code=True, gpus=1, rsync=True, shares_runs=False, shares_cache=False,
    linux=True, run_there=None,
)  # fmt: skip


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's folder of another machine; beside it, in `here`, this machine's."""
    need("rsync")
    programs, home = tmp_path / "bin", tmp_path / "home"
    for folder in (programs, home / "sft-play", tmp_path / "here"):
        folder.mkdir(parents=True)
    (programs / "ssh").write_text(SSH)
    (programs / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("THERE", str(home))
    return home / "sft-play"


def bring(there: Path, names: Sequence[str], listing: Listing | None = LIST, **options: Sequence[str]) -> None:
    inventory = Inventory(hosts=(HOST,), network=None, ssh_config=None, path=Path("home.yaml"))
    with ended_with_us():  # as in the product: without it, a command that was stopped before stays so
        deliver(HOST, inventory, there.parent.parent / "here", HOST.folder, names, listing, **options)


def test_a_persons_file_is_never_replaced(there: Path) -> None:
    here = there.parent.parent / "here"
    (here / "a.py").write_text("ours")
    (here / "b.py").write_text("same")
    (here / "new.py").write_text("new")
    (there / "a.py").write_text("hours of work")
    (there / "b.py").write_text("same")
    os.utime(there / "b.py", (1e9, 1e9))
    names = ["a.py", "b.py", "new.py"]
    with pytest.raises(
        UserError, match=r"host `old`: in `~/sft-play` a file is another one .* not brought by this command: `a.py`"
    ) as error:
        bring(there, names)
    assert error.value.hint == "another `folder`" and error.value.place == "home.yaml:4"
    assert (there / "a.py").read_text() == "hours of work" and not (there / "new.py").exists(), "nothing is sent"
    (there / "a.py").unlink()
    bring(there, names)
    assert [(there / name).read_text() for name in names] == ["ours", "same", "new"]
    (here / "a.py").write_text("ours, longer")
    (here / "b.py").write_text("same no more")
    bring(there, names)
    assert (there / "a.py").read_text() == "ours, longer" and (there / "b.py").read_text() == "same no more", (
        "brought, or seen, by us"
    )
    (there / "a.py").write_text("edited on the host")
    with pytest.raises(UserError, match=r"`a\.py`"):
        bring(there, names)
    assert (there / "a.py").read_text() == "edited on the host"


def test_only_what_is_on_the_list_is_ours(there: Path) -> None:
    here = there.parent.parent / "here"
    (here / "a.py").write_text("one")
    bring(there, ["a.py"])
    (here / "a.py").write_text("two, never sent")
    inventory = Inventory(hosts=(HOST,), network=None, ssh_config=None, path=Path("home.yaml"))
    now = look(HOST, inventory, HOST.folder, LIST.path, ["a.py", "absent"])
    assert {("a.py", digest) for digest, _ in now.brought} == set(now.found.items()), "absent files have no digest"
    keep_list(HOST, inventory, LIST.path, [])
    with pytest.raises(UserError, match=r"`a\.py`"):
        bring(there, ["a.py"])


def test_names_that_are_not_utf_8_and_odd_ones(there: Path) -> None:
    names = [os.fsdecode(b"caf\xe9.py"), "two words.py", "-e sh", "#\\#012.py", "it's $HOME"]
    for name in names:
        (there.parent.parent / "here" / name).write_text("x")
    bring(there, names)
    assert sorted(path.name for path in there.iterdir() if path.is_file()) == sorted(names)
    for name in names:
        (there / name).write_text("theirs")
        with pytest.raises(UserError, match="a file is another one"):
            bring(there, [name])


def test_no_list_replaces_and_spared_files_stay(there: Path) -> None:
    here = there.parent.parent / "here"
    (here / "refs").mkdir()
    (there / "refs").mkdir()
    (here / "refs" / "main").write_text("commit of ours")
    (there / "refs" / "main").write_text("of theirs")
    (here / "w").write_text("weights")
    bring(there, ["refs/main", "w"], spared=["refs/"])
    assert (there / "w").read_text() == "weights" and (there / "refs" / "main").read_text() == "of theirs"
    bring(there, ["refs/main"], None)
    assert (there / "refs" / "main").read_text() == "commit of ours"


def test_want_of_room_is_told_before_anything_is_sent(there: Path) -> None:
    with (there.parent.parent / "here" / "huge").open("wb") as stream:
        stream.truncate(2**43)
    with pytest.raises(
        HardwareError, match=r"host `old`: 8192.00 GiB are to be brought to `~/sft-play`, and its disk has \d+\.\d+ GiB free"
    ):
        bring(there, ["huge"])
    assert not list(there.iterdir())


def test_a_full_disk_is_named_before_what_followed() -> None:
    said = (
        'rsync: [receiver] write failed on "/x/m": No space left on device (28)\nrsync error: error in file IO (code 11)\n'
        "rsync: connection unexpectedly closed\nrsync error: error in rsync protocol data stream (code 12)\n"
    )
    assert last_line(said) == 'rsync: [receiver] write failed on "/x/m": No space left on device (28)'
    assert last_line("rsync: a\nrsync: b\nrsync error: c\n") == "rsync: b" and last_line("") == ""


@pytest.mark.parametrize(
    ("path", "plain"),
    [("~/x/", "h:x/"), ("~//x/../y/", "h:y/"), ("~//", "h:./"), ("/a//b/./c", "h:/a/b/c"), ("//a/", "h:/a/"), ("rel", "h:rel")],
)
def test_paths_of_rsync(path: str, plain: str) -> None:
    assert remote_path(Host(name="a", address="h"), path) == plain


def test_code_is_what_git_tracks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["kept.py", "gone.py", ".env", "conf/.env.local", ".env.example", "runs/old/config.json"]
    for name in [*names, "configs/new.yaml", "configs/clusters/mine.yaml", "sft_play/new.py", "notes.txt", "ignored.log"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    odd = os.fsdecode(b"caf\xe9.py")
    (tmp_path / odd).write_text("x")
    (tmp_path / ".gitignore").write_text("*.log\n")
    for words in (["init", "-q"], ["add", "-f", *names, odd]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, timeout=30)
    (tmp_path / "gone.py").unlink()
    (tmp_path / "kept.py").write_text("modified")
    monkeypatch.setattr(sync, "project", lambda: tmp_path)
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    said: list[str] = []
    assert sync.code_files(said.append) == sorted([".env.example", "kept.py", odd])
    assert said == ["note: 2 files that git does not track yet (`configs/new.yaml`) stay here; git add sends them"]
    for name in ("configs/new.yaml", "sft_play/new.py"):
        (tmp_path / name).unlink()
    assert sync.code_files(said.append)
    assert len(said) == 1, "an inventory of one's own is read on the master only"


def test_a_project_of_which_git_tracks_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty list would send nothing, and compare nothing without a word."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=30)
    (tmp_path / "new.py").write_text("x")
    monkeypatch.setattr(sync, "project", lambda: tmp_path)
    with pytest.raises(UserError, match="git tracks no file of") as found:
        sync.code_files()
    assert found.value.hint == "git add, git commit there"


def test_files_that_left_the_project_leave_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("kept.py", "gone.py", "edited.py", "own.py"):
        Path(name).write_text(name)
    own = digests(tmp_path, ["kept.py", "gone.py", "edited.py"])
    request = {"listing": sync.SENT, "mark": ".cache/seen-1"}
    Path(sync.SENT).parent.mkdir()
    Path(sync.SENT).write_text("".join(f"{digest}  {name}\0" for name, digest in [*own.items(), ("../kept.py", own["kept.py"])]))
    assert remote.tidy_code({**request, "files": own}) == 0
    Path("edited.py").write_text("since")
    kept = {"kept.py": own["kept.py"], "../kept.py": own["kept.py"], os.fsdecode(b"caf\xe9"): own["kept.py"]}
    Path(".cache/seen-1").touch()
    assert remote.tidy_code({**request, "files": kept}) == 0
    assert Path("gone.py").exists(), "it is the folder of the machine that asks"
    Path(".cache/seen-1").unlink()
    assert remote.tidy_code({**request, "files": kept}) == 0
    assert remote.tidy_code({**request, "files": {"kept.py": own["kept.py"]}}) == 0
    assert sorted(path.name for path in tmp_path.glob("*.py")) == ["edited.py", "kept.py", "own.py"]
    assert Path(sync.SENT).read_bytes() == f"{own['kept.py']}  kept.py\0".encode()


def test_settings_that_reach_every_machine() -> None:
    passed = {
        "HF_ENDPOINT": "https://hub.lan", "AIM_REPO": "aim://10.0.0.1:53800", "HF_HUB_ETAG_TIMEOUT": "9", "NCCL_DEBUG": "INFO",
        "SFT_TRAIN_SEED": "3",
    }  # fmt: skip
    own = {
        "HF_HOME": "/x", "HF_HUB_CACHE": "/x", "HF_DATASETS_CACHE": "/x", "HF_TOKEN_PATH": "/x", "HF_TOKEN": "hf_abc", "SFT_PLAY_CACHE": "/x",
        "NCCL_SOCKET_IFNAME": "eth0", "HOME": "/x",
    }  # fmt: skip
    secret = {"HF_ENDPOINT": "https://me:word@hub.lan"}
    assert forwarded({**own, **passed}) == passed and forwarded(secret) == {}


def test_a_machine_is_ready_only_with_the_same_versions() -> None:
    assert judged(HOST, OWN, OWN).detail == "Python 3.11.2, torch 2.9.0"
    assert judged(HOST, OWN, replace(OWN, python="3.11.9")).ok
    other = judged(HOST, OWN, replace(OWN, python="3.12.1"))
    assert (
        not other.ok
        and other.detail == "its environment has Python 3.12.1, and this machine 3.11.2"
        and "python3.11-venv" in (other.hint or "")
    )
    assert "no torch" in judged(HOST, OWN, replace(OWN, versions={"peft": "0.18.0"})).detail
    assert not judged(HOST, OWN, replace(OWN, versions={})).ok and not judged(HOST, OWN, replace(OWN, code=False)).ok
    assert "peft 0.17.0 (here 0.18.0)" in judged(HOST, OWN, replace(OWN, versions={"torch": "2.9.0", "peft": "0.17.0"})).detail


def test_a_machine_without_this_ones_python(there: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is installed that could not be used; the hint names the address, and the packages that bring that Python."""
    host = replace(HOST, user="anna", port=2222)
    inventory = Inventory(hosts=(host,), network=None, ssh_config=None, path=Path("home.yaml"))
    own = replace(OWN, python="3.99.1")
    hint = (
        "all machines need this one's Python 3.99: ssh -p 2222 anna@192.0.2.1, sudo apt install python3.99 python3.99-venv; "
        "then type the same command again"
    )
    with ended_with_us():
        found = install(host, inventory, ["scripts/install.sh"], own)
    assert not found.ok
    assert found.detail.startswith("there is no Python 3.99, which the first host has; python3 is Python 3.")
    assert found.hint == hint
    assert not (there / ".venv").exists()
    python = there.parent.parent / "bin" / "python3.99"
    python.write_text('#!/bin/sh\nif [ "$1" = -c ]; then echo 3.99; else echo "ensurepip is not available"; exit 1; fi\n')
    python.chmod(0o755)
    with ended_with_us():
        found = install(host, inventory, ["scripts/install.sh"], own)
    assert found.detail == "scripts/install.sh ended with code 3: `python3.99 -m venv` failed"
    assert found.hint == hint
    other = not_installed(host, own, "no room", 1)
    assert other.hint == "to see more: ssh -p 2222 anna@192.0.2.1, cd ~/sft-play, make install"
    assert "ensurepip is not available" in capfd.readouterr().err


def test_packages_that_one_machine_alone_has() -> None:
    """flash-attn, which a plan made here would take everywhere: named for both directions, with the command that brings it."""
    with_it = replace(OWN, versions={**OWN.versions, "flash-attn": "2.8.1"})
    assert versions_apart(with_it, OWN) == ["flash-attn is missing (here 2.8.1)"]
    assert versions_apart(OWN, with_it) == ["flash-attn 2.8.1 (missing here)"]
    assert only_optional_apart(with_it, OWN) and not only_optional_apart(OWN, OWN)
    assert not only_optional_apart(with_it, replace(OWN, versions={"torch": "2.9.0"}))
    python = "on `old`, in `~/sft-play`: .venv/bin/python -m pip"
    found = judged(HOST, with_it, OWN)
    assert not found.ok
    assert found.hint == f"{python} install flash-attn==2.8.1, or uninstall it here; then type the same command again"
    inventory = Inventory(
        hosts=(Host(name="a", address="127.0.0.1"), HOST), network=None, ssh_config=None, path=Path("home.yaml")
    )
    with pytest.raises(HardwareError, match=r"host `old` has other versions: flash-attn 2\.8\.1 \(missing here\)") as error:
        check(inventory, {"a": OWN, "old": with_it}, shared=False)
    assert error.value.hint == f"{python} uninstall flash-attn, or install it here"


def test_a_run_is_refused_where_this_machine_has_no_rsync() -> None:
    inventory = Inventory(
        hosts=(Host(name="a", address="127.0.0.1"), HOST), network=None, ssh_config=None, path=Path("home.yaml")
    )
    with pytest.raises(HardwareError, match="this machine has no `rsync`") as error:
        check(inventory, {"a": replace(OWN, rsync=False), "old": OWN}, shared=False)
    assert error.value.hint == "sudo apt install rsync"
    check(inventory, {"a": replace(OWN, rsync=False)}, shared=False)
    check(inventory, {"a": OWN, "old": OWN}, shared=False)


def test_machines_and_launchers_compare_the_same_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine tells of itself over SSH is what `runs/origin.py` lists, and what the launchers compare when they meet."""
    for name in PACKAGES:
        metadata = tmp_path / f"{name.replace('-', '_')}-1.2.3.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    inventory = Inventory(hosts=(HOST,), network=None, ssh_config=None, path=Path("home.yaml"))
    told = facts_of(Host(name="a", address="127.0.0.1"), inventory, 60, mark=".").versions
    assert told == dict.fromkeys(PACKAGES, "1.2.3") and {"flash-attn", "unsloth"} < set(told)
    assert set(PACKAGES) < set(versions_here("cpu"))


def test_an_environment_with_other_versions_is_not_up_to_date(there: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As new as the pins, but without packages: it is installed anew, which fails here for want of pip; with them it is ready."""
    inventory = Inventory(hosts=(HOST,), network=None, ssh_config=None, path=Path("home.yaml"))
    here = Host(name="a", address="127.0.0.1")
    own = facts_of(here, inventory, 60, mark=".")
    files = [name for name in sync.code_files() if name.startswith(("sft_play/", "scripts/")) or "/" not in name]
    python = there / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    for options, last in (("-S", "scripts/install.sh ended with code 1: "), ("", f"Python {own.python}, torch ")):
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {options} "$@"\n')
        python.chmod(0o755)
        (there / ".venv" / ".runtime").touch()
        os.utime(there / ".venv" / ".runtime", (4e9, 4e9))
        with ended_with_us():
            found = install(HOST, inventory, files, own)
        said = capfd.readouterr().err
        assert found.detail.startswith(last) and found.ok == (not options), (found, said)
        assert "the environment in .venv is up to date" in said
        assert ("its versions are others: " in said) == bool(options), said
    listed = (there / sync.SENT).read_bytes().count(b"\0")
    assert listed == len(files)


def test_links_of_the_hubs_cache_stay_links(there: Path) -> None:
    here = there.parent.parent / "here"
    for folder in (here, there):
        (folder / "blobs").mkdir()
        (folder / "snapshots").mkdir()
    (here / "blobs" / "1").write_text("weights")
    (here / "snapshots" / "a -> b").symlink_to("../blobs/1")
    names = ["blobs/1", "snapshots/a -> b"]
    bring(there, names)
    assert (there / "snapshots" / "a -> b").is_symlink() and (there / "snapshots" / "a -> b").read_text() == "weights"
    bring(there, names)
    (there / "mine").write_text("another model")
    (there / "snapshots" / "a -> b").unlink()
    (there / "snapshots" / "a -> b").symlink_to("../mine")
    with pytest.raises(UserError, match="`snapshots/a -> b`"):
        bring(there, names)
    assert (there / "snapshots" / "a -> b").read_text() == "another model"


def listed(there: Path) -> set[tuple[bytes, str]]:
    """The list's marks and names."""
    entries = (there / sync.SENT).read_bytes().split(b"\0")
    return {(entry[64:66], os.fsdecode(entry[66:])) for entry in entries if entry}


def tidy(there: Path, monkeypatch: pytest.MonkeyPatch, files: Mapping[str, str]) -> None:
    with monkeypatch.context() as patched:
        patched.chdir(there)
        assert remote.tidy_code({"listing": sync.SENT, "mark": ".cache/seen-1", "files": dict(files)}) == 0


def test_a_file_that_is_edited_here_meanwhile_is_still_known_there(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the transfer and the end of an installation, which tidies, lie minutes."""
    here = there.parent.parent / "here"
    for name in ("a.py", "b.py"):
        (here / name).write_text("sent")
    bring(there, ["a.py", "b.py"])
    (here / "a.py").write_text("edited while pip installs")
    tidy(there, monkeypatch, digests(here, ["a.py", "b.py"]))
    bring(there, ["a.py", "b.py"])
    assert (there / "a.py").read_text() == "edited while pip installs"
    tidy(there, monkeypatch, {"b.py": ""})
    assert not (there / "a.py").exists() and (there / "b.py").exists() and listed(there) == {(b"  ", "b.py")}


def test_what_stood_there_already_may_be_replaced_and_is_never_removed(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkout on the host, say: the same content, with another time (`old.py`) or this one's (`same.py`)."""
    here = there.parent.parent / "here"
    names = ["old.py", "same.py", "new.py", "moved.py"]
    for name in names:
        (here / name).write_text(name)
        os.utime(here / name, (1e9, 1e9))
        if name != "new.py":
            (there / name).write_text(name)
            os.utime(there / name, (1e9 if name == "same.py" else 1.1e9,) * 2)
    bring(there, names)
    assert listed(there) == {(b" *", "old.py"), (b" *", "moved.py"), (b"  ", "new.py")}
    tidy(there, monkeypatch, digests(here, names))
    assert listed(there) == {(b" *", "old.py"), (b" *", "moved.py"), (b"  ", "new.py"), (b" *", "same.py")}
    for name in ("old.py", "same.py"):
        (here / name).write_text("longer, and ours")
    bring(there, names)
    assert {(there / name).read_text() for name in ("old.py", "same.py")} == {"longer, and ours"}
    tidy(there, monkeypatch, {"same.py": "", "old.py": ""})
    assert (there / "moved.py").read_text() == "moved.py", "never sent, so not ours to remove"
    assert not (there / "new.py").exists()
    tidy(there, monkeypatch, {"old.py": ""})
    assert not (there / "same.py").exists() and (there / "old.py").exists(), "sent since"


@pytest.mark.parametrize("listing", [LIST, None])
def test_what_is_the_same_there_takes_no_room_and_no_second_look(there: Path, listing: Listing | None, tmp_path: Path) -> None:
    """rsync tells a file of another time as one to be sent whole; a disk that has room for one copy has none for two."""
    here = there.parent.parent / "here"
    for folder, time in ((here, 1.5e9), (there, 1.2e9)):
        (folder / "weights of it's model").write_text("w" * 100_000)
        os.utime(folder / "weights of it's model", (time, time))
    (here / "small").write_text("s")
    (tmp_path / "bin" / "df").write_text("#!/bin/sh\necho Filesystem; echo /dev/sda 9 9 50 99% /srv\n")  # 50 KiB are free
    (tmp_path / "bin" / "df").chmod(0o755)
    before = (there / "weights of it's model").stat().st_ino
    bring(there, ["weights of it's model", "small"], listing)
    assert (there / "small").read_text() == "s"
    now = (there / "weights of it's model").stat()
    assert (now.st_ino, now.st_mtime) == (before, 1.5e9), "not written again; its time is this one's, so that rsync asks no more"
    (here / "weights of it's model").write_text("v" * 100_000)
    os.utime(here / "weights of it's model", (1.6e9, 1.6e9))
    with pytest.raises(HardwareError, match=r"0\.00 GiB are to be brought"):
        bring(there, ["weights of it's model", "small"], listing)
    assert (there / "weights of it's model").read_text() == "w" * 100_000


def test_a_model_of_links_that_was_brought_may_change(there: Path) -> None:
    """`-L` sends what a link leads to: the file there is ours, and a later one replaces it."""
    here = there.parent.parent / "here"
    (here / "store").write_text("first")
    (here / "model.safetensors").symlink_to("store")
    bring(there, ["model.safetensors"], options=["-L"])
    assert listed(there) == {(b"  ", "model.safetensors")} and not (there / "model.safetensors").is_symlink()
    (here / "store").write_text("second, longer")
    bring(there, ["model.safetensors"], options=["-L"])
    assert (there / "model.safetensors").read_text() == "second, longer"
    (there / "model.safetensors").write_text("theirs")
    with pytest.raises(UserError, match=r"`model\.safetensors`"):
        bring(there, ["model.safetensors"], options=["-L"])


def test_files_of_an_earlier_version_are_told_from_a_persons(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier version left no list with digests: whose the files are is not known, and the hint names both cases."""
    here = there.parent.parent / "here"
    (here / "setup.py").write_text("of today")
    (there / "setup.py").write_text("of yesterday")
    inventory = Inventory(hosts=(HOST,), network=None, ssh_config=None, path=Path("home.yaml"))
    monkeypatch.setattr(sync, "project", lambda: here)
    with pytest.raises(UserError, match=r"`setup\.py`") as error, ended_with_us():
        sync.send_code(HOST, inventory, ["setup.py"])
    assert "an earlier version of this command" in (error.value.hint or "")
    assert "mv ~/sft-play ~/sft-play.old, and here make cluster-install CLUSTER=home.yaml" in (error.value.hint or "")
    with ended_with_us():
        keep_list(HOST, inventory, LIST.path, [("0" * 64, "other.py")])
    with pytest.raises(UserError, match=r"`setup\.py`") as error, ended_with_us():
        sync.send_code(HOST, inventory, ["setup.py"])
    assert "earlier version" not in (error.value.hint or ""), "there is a list"
    assert (there / "setup.py").read_text() == "of yesterday"


def test_links_out_of_a_model_are_not_followed_and_its_secrets_stay(there: Path) -> None:
    here = there.parent.parent / "here"
    (here / "config.json").write_text("{}")
    (here / ".env").write_text("PASSWORD=x")
    (there.parent.parent / "id_ed25519").write_text("a key")
    inventory = Inventory(hosts=(HOST,), network=None, ssh_config=None, path=Path("home.yaml"))
    with ended_with_us():
        sync._send_model(HOST, inventory, OWN, here, "~/sft-play/model", Path("/hub"))
        assert [path.name for path in (there / "model").iterdir()] == ["config.json"]
        (here / "LICENSE.txt").symlink_to(there.parent.parent / "id_ed25519")
        with pytest.raises(DataError, match="outside of the folder"):
            sync._send_model(HOST, inventory, OWN, here, "~/sft-play/model", Path("/hub"))
    assert [path.name for path in (there / "model").iterdir()] == ["config.json"]


def test_links_and_pipes_do_not_come_from_a_machine(there: Path) -> None:
    run = RunFolder(there.parent.parent / "here" / "demo")
    (run.checkpoints / "step-000001").mkdir(parents=True)
    theirs = there.parent / "runs" / "demo" / "random" / "step-000001"
    theirs.mkdir(parents=True)
    (theirs / "rank1.safetensors").write_text("states")
    (theirs / "rank2.safetensors").symlink_to("/etc/hostname")
    os.mkfifo(theirs / "rank3.safetensors")
    inventory = Inventory(hosts=(HOST,), network=None, ssh_config=None, path=Path("home.yaml"))
    with ended_with_us():
        sync.fetch_random_states(
            HOST, inventory, replace(OWN, runs=str(there.parent / "runs")), run, run.checkpoints / "step-000001"
        )
    assert [path.name for path in run.random_states(1).iterdir()] == ["rank1.safetensors"]
