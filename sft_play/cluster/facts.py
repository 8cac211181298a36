"""What is known of the machines of a cluster before a run is started on them, and what does not allow it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, fields
from threading import Event, Thread
from typing import Any

from sft_play.cluster.agent import ask
from sft_play.cluster.ssh import is_here
from sft_play.config.cluster import Host, Inventory
from sft_play.config.names import mask
from sft_play.errors import HardwareError, UserError, raise_all
from sft_play.runs.folder import cache_folder, runs_folder
from sft_play.runs.origin import OPTIONAL, PACKAGES

SECONDS = 30.0
"""How long a machine may take to answer."""
OVER_SECONDS = 0.2
"""How often it is looked whether the answers are still wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """One machine, as its own Python sees it. Paths are absolute, and that machine's."""

    host: str
    """Its own host name."""
    home: str
    folder: str | None
    """The project; `None` where it is not there."""
    runs: str
    cache: str
    hub: str
    """Where huggingface_hub keeps models."""
    python: str
    versions: Mapping[str, str]
    code: bool
    """Whether the project can be imported there."""
    gpus: int
    rsync: bool
    shares_runs: bool
    """Its folder of runs is this machine's: a network disk."""
    shares_cache: bool
    linux: bool
    run_there: str | None = None
    """Its folder of a run of the name that was asked for, where one was begun there."""
    interfaces: Sequence[str] = field(default=(), compare=False)
    """Its network interfaces by name, without `lo`; empty where it was not asked."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Facts:
        """Returns a machine's answer."""
        return cls(**{item.name: answer[item.name] for item in fields(cls)})


@contextlib.contextmanager
def _mark() -> Iterator[str]:
    """Leaves a file in the folders of runs and cache, by which another machine can tell that it sees the same ones."""
    name = f".seen-{secrets.token_hex(8)}"
    made = []
    try:
        for folder in (runs_folder(), cache_folder()):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
            made.append(folder / name)
        yield name
    except OSError as error:
        raise HardwareError(f"cannot be written: {error.strerror}", place=str(error.filename)) from error
    finally:
        for path in made:
            path.unlink(missing_ok=True)


def facts_of(host: Host, inventory: Inventory, timeout: float, **more: Any) -> Facts:
    """Asks one host; `mark` names a file to look for in its folders, `.` for none. Raises `HardwareError` where it cannot be asked."""
    return Facts.of(ask(host, inventory, "facts", timeout=timeout, packages=PACKAGES, **more))


def gather(
    inventory: Inventory, hosts: Sequence[Host], variables: Mapping[str, str], run: str | None = None, *, over: Event | None = None
) -> dict[str, Facts | UserError]:  # fmt: skip
    """Asks all hosts at once, also for what they have of a run called `run`; returns host name -> its facts, or why it cannot be asked.

    Once `over` is set, those that have not answered are waited for no longer, and are not among what is returned.
    """
    with _mark() as mark:
        asked = {host.name: _asked(host, inventory, mark, variables, run) for host in hosts}
        while wait(asked.values(), timeout=OVER_SECONDS).not_done and not (over is not None and over.is_set()):
            pass
        return {name: answer.result() for name, answer in asked.items() if answer.done()}


def _asked(
    host: Host, inventory: Inventory, mark: str, variables: Mapping[str, str], run: str | None
) -> Future[Facts | UserError]:
    """Asks a host in a thread that nothing waits for: a pool's would hold the command's end until the last SSH has given up."""
    answer: Future[Facts | UserError] = Future()

    def work() -> None:
        mine = {} if is_here(host) else dict(variables)
        try:
            answer.set_result(facts_of(host, inventory, SECONDS, mark=mark, variables=mine, run=run))
        except UserError as error:
            answer.set_result(error)
        except BaseException as error:  # noqa: BLE001 - raised where the answer is read
            answer.set_exception(error)

    Thread(target=work, name=f"facts-{host.name}", daemon=True).start()
    return answer


def shared_variables(shared: bool) -> dict[str, str]:
    """Returns where all machines keep runs and cache when these are on a disk that all of them see."""
    if not shared:
        return {}
    return {"RUNS_DIR": str(runs_folder().absolute()), "SFT_PLAY_CACHE": str(cache_folder().absolute())}


def check(inventory: Inventory, found: Mapping[str, Facts], *, shared: bool) -> None:
    """Raises every reason why no run can be started on these machines, each with its remedy.

    Only those that are `found` are judged, and without the master none is compared with it.
    """
    problems: list[UserError] = []
    own = found.get(inventory.master.name)
    if own and not own.rsync and any(name != inventory.master.name for name in found):
        text = "this machine has no `rsync`, by which code and data go to the others"
        problems.append(HardwareError(text, place=inventory.master.place or None, hint="sudo apt install rsync"))
    for host in inventory.hosts:
        facts = found.get(host.name)
        if own and facts is not None and not is_here(host):
            problems += _problems(host, facts, own, inventory, shared)
    for host in inventory.hosts:
        if host.name in found:
            problems += _unlike_stated(host, found[host.name])
    raise_all(problems)


def _unlike_stated(host: Host, facts: Facts) -> Iterator[UserError]:
    """Yields what the inventory states of a machine and is not there."""
    if host.gpus is not None and host.gpus > facts.gpus:
        text = f"host `{host.name}` has {_count(facts.gpus, 'GPU')}, and the inventory states {host.gpus}"
        hint = "`nvidia-smi` there shows what its driver sees; correct `gpus` in the inventory (0 trains on its CPU)"
        yield HardwareError(text, place=host.place or None, hint=hint)
    if host.interface is not None and facts.interfaces and host.interface not in (*facts.interfaces, "lo"):
        text = (
            f"host `{host.name}` has no interface `{host.interface}`; it has {', '.join(f'`{one}`' for one in facts.interfaces)}"
        )
        hint = "correct `interface` in the inventory, or leave it away: that of the route to the master is taken"
        yield HardwareError(text, place=host.place or None, hint=hint)


def _problems(host: Host, facts: Facts, own: Facts, inventory: Inventory, shared: bool) -> Iterator[UserError]:
    place = host.place or None
    install = f"make cluster-install CLUSTER={inventory.path}"
    if not facts.code or "torch" not in facts.versions:
        what = "the project cannot be imported" if not facts.code else "it has no torch"
        yield HardwareError(f"host `{host.name}` has no environment: {what}", place=place, hint=f"make it: {install}")
        return
    if not facts.linux:
        yield HardwareError(f"host `{host.name}` does not run Linux", place=place)
    apart = versions_apart(own, facts)
    if apart:
        yield HardwareError(
            f"host `{host.name}` has other versions: {', '.join(apart)}",
            place=place,
            hint=versions_hint(own, facts, host, f"make them alike: {install}"),
        )
    if shared and not (facts.shares_runs and facts.shares_cache):
        folders = [
            str(f.absolute())
            for f, sees in ((runs_folder(), facts.shares_runs), (cache_folder(), facts.shares_cache))
            if not sees
        ]
        text = f"`data.sync` is `shared`, but host `{host.name}` does not see this machine's {' nor its '.join(f'`{f}`' for f in folders)}"
        hint = "mount them there at the same place (RUNS_DIR and SFT_PLAY_CACHE say where they are), or take `data.sync: rsync`"
        yield HardwareError(text, place=place, hint=hint)
    if not facts.rsync:
        yield HardwareError(f"host `{host.name}` has no `rsync`", place=place, hint="on it: sudo apt install rsync")


def versions_apart(own: Facts, other: Facts) -> list[str]:
    """Returns in which versions another machine is not as this one, each with both: Python to its minor number, packages exactly."""
    apart = [_apart(name, other.versions.get(name), own.versions.get(name)) for name in _names_apart(own, other)]
    if _minor(other.python) != _minor(own.python):
        apart.insert(0, f"Python {other.python} (here {own.python})")
    return apart


def only_optional_apart(own: Facts, other: Facts) -> bool:
    """Whether all that differs are packages that no installation of ours brings: to install the pinned ones again changes nothing."""
    names = _names_apart(own, other)
    return bool(names) and set(names) <= set(OPTIONAL) and _minor(own.python) == _minor(other.python)


def versions_hint(own: Facts, other: Facts, host: Host, install: str) -> str:
    """Returns how a host gets this machine's versions; `install` says what brings the pinned ones."""
    hints = [] if only_optional_apart(own, other) else [install]
    return "; ".join([*hints, *optional_hints(host, other.versions, own.versions, "here")])


def optional_hints(host: Host, theirs: Mapping[str, str], own: Mapping[str, str], where: str) -> list[str]:
    """Returns how a host gets the same packages as `where` has (`own`), of those that no installation of ours brings."""
    hints = []
    for name in OPTIONAL:
        version, other = own.get(name), theirs.get(name)
        if version != other:
            words = f"install {name}=={version}, or uninstall" if version else f"uninstall {name}, or install"
            hints.append(f"on `{host.name}`, in `{host.folder}`: {host.python} -m pip {words} it {where}")
    return hints


def _names_apart(own: Facts, other: Facts) -> list[str]:
    """Returns the packages of which the two have other versions, those of one side only, too."""
    return [name for name in {**own.versions, **other.versions} if own.versions.get(name) != other.versions.get(name)]


def _apart(name: str, theirs: str | None, version: str | None) -> str:
    return f"{name} {theirs or 'is missing'} ({f'here {version}' if version else 'missing here'})"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _count(number: int, what: str) -> str:
    return f"no {what}" if not number else f"{number} {what}" if number == 1 else f"{number} {what}s"


def require_master_here(inventory: Inventory) -> None:
    """Raises `UserError` where the first host is another machine: its launcher, logs and checkpoints are this command's own."""
    if sys.platform != "linux":
        raise HardwareError("cluster runs need Linux on every machine, this one too")
    if not is_here(inventory.master):
        raise UserError(
            f"the first host, `{inventory.master.name}` ({inventory.master.address}), is the master, and this machine has not that address",
            place=inventory.master.place or None,
            hint='type the command on the first host, or put this machine first in the inventory (`CLUSTER_HOSTS="name name"` orders them)',
        )


COMMON = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_FR_", "SFT_")
"""Beginnings of such settings; `SFT_SECTION_KEY` is a key of the configuration."""
OF_THE_HUB = re.compile(r"HF_(?!HOME$)\w+(?<!_CACHE)(?<!_PATH)(?<!_DIR)|AIM_REPO")
"""Settings of the hub's libraries that are no folder, and where tracked runs are kept; of these what looks like a secret stays here."""


def forwarded(ambient: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the user's own settings that reach every machine; those that name devices or a cache's folder are each machine's."""
    ambient = os.environ if ambient is None else ambient
    own = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")
    return {
        k: v
        for k, v in ambient.items()
        if (k.startswith(COMMON) and k not in own and not k.startswith("SFT_PLAY_"))
        or k == "OMP_NUM_THREADS"
        or (OF_THE_HUB.fullmatch(k) and mask(k, v) == v)
    }
