"""`fake_gpus(cards)`: inside it `torch.cuda` shows these cards, and every new tensor is a fake one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as torch shows it."""

    name: str
    uuid: str
    memory_bytes: int
    capability: tuple[int, int]


def visible(machine: Mapping[str, Any], environment: Mapping[str, str]) -> list[Card]:
    """Return what CUDA shows of a described machine (`tests.nvml_double.Machine`) under `CUDA_VISIBLE_DEVICES`.

    It has numbers or prefixes of UUIDs, up to the first unknown one; of a split card CUDA shows only slices.
    """
    whole, slices = [], []
    for card in machine["cards"]:
        capability = tuple(card["capability"])
        slices_of_cards = [
            Card(device_card["name"], device_card["uuid"], int(device_card["gib"] * 2**30), capability)
            for device_card in (card, *(card["slices"] or ()))
        ]
        whole.append(slices_of_cards[0] if card["slices"] is None else slices_of_cards[1])
        slices += slices_of_cards[1:] if card["permitted"] else []
    shown: list[Card] = []
    for part in environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(whole))))).split(","):
        cards = [card for index, card in enumerate(whole) if part == str(index)]
        cards += [card for card in (*whole, *slices) if part and card.uuid.startswith(part)]
        if not cards:
            break
        shown.append(cards[0])
    return shown


class Event:
    """A `torch.cuda.Event` that has happened."""

    def __init__(self, **_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Event) -> float:
        return 1.0


def _driver(cards: Sequence[Card], asked: list[int]) -> dict[str, Any]:
    """Return replacements of the names in `torch.cuda` that ask the driver; `asked` gets the card of each call that
    creates a context.
    """
    current = [0]

    def card(device: Any = None) -> Card:
        return cards[current[0] if device is None or torch.device(device).index is None else torch.device(device).index]

    def set_device(device: Any) -> None:
        current[0] = device if isinstance(device, int) else torch.device(device).index or 0

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        asked.append(cards.index(card(device)))
        return card(device).memory_bytes, card(device).memory_bytes

    def properties(device: Any = None) -> Any:
        properties_of_card = card(device)
        return SimpleNamespace(
            name=properties_of_card.name,
            major=properties_of_card.capability[0],
            minor=properties_of_card.capability[1],
            total_memory=properties_of_card.memory_bytes,
            uuid=properties_of_card.uuid,
            multi_processor_count=100,
            gcnArchName="",
            warp_size=32,
            max_threads_per_multi_processor=2048,
            is_integrated=0,
            L2_cache_size=2**25,
        )

    state = torch.zeros(16, dtype=torch.uint8)
    nothing = dict.fromkeys(
        ("memory_reserved", "memory_allocated", "max_memory_allocated", "max_memory_reserved"), lambda *_: 0
    ) | dict.fromkeys(
        (
            "reset_peak_memory_stats",
            "empty_cache",
            "synchronize",
            "_lazy_init",
            "init",
            "set_rng_state",
            "manual_seed",
            "manual_seed_all",
        ),
        lambda *_: None,
    )
    return nothing | {
        "is_available": lambda: bool(cards),
        "device_count": lambda: len(cards),
        "is_initialized": lambda: True,
        "current_device": lambda: current[0],
        "set_device": set_device,
        "mem_get_info": mem_get_info,
        "get_device_properties": properties,
        "get_device_name": lambda device=None: card(device).name,
        "get_device_capability": lambda device=None: card(device).capability,
        "is_bf16_supported": lambda *_, **__: card().capability >= (8, 0),
        "get_arch_list": lambda: ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90"],
        "get_rng_state": lambda *_: state,
        "random.get_rng_state": lambda *_: state,
        "current_stream": lambda *_: SimpleNamespace(cuda_stream=0),
        "Event": Event,
        "is_current_stream_capturing": lambda: False,
        "utilization": lambda *_: 50,
        "amp.common.amp_definitely_not_available": lambda: False,
    }


def _apply(self: Any, function: Any, recurse: bool = True) -> Any:
    """Replace `Module._apply` by one that sets new parameters: the data of fake ones cannot be swapped."""
    for child in self.children() if recurse else ():
        child._apply(function)
    for name, old in self._parameters.items():
        if old is not None:
            with torch.no_grad():
                new = function(old)
            if new is not old and (new.device != old.device or new.dtype != old.dtype):
                self._parameters[name] = torch.nn.Parameter(new, requires_grad=old.requires_grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = function(buffer)
    return self


def _numpy(self: torch.Tensor, **_: Any) -> Any:
    """Return the zeros of a fake tensor, for `Tensor.numpy`, which only works on the CPU."""
    if self.device.type != "cpu":
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")
    return np.zeros(tuple(self.shape), dtype=str(self.dtype).removeprefix("torch."))


@contextmanager
def fake_gpus(cards: Sequence[Card]) -> Iterator[list[int]]:
    """Show `cards` to everything inside; yield the list of those with a context, in order."""
    asked: list[int] = []
    replaced = {f"torch.cuda.{name}": value for name, value in _driver(cards, asked).items()} | {
        "torch.version.cuda": "13.0",
        "torch._C._cuda_getDevice": lambda: torch.cuda.current_device(),
        "torch.nn.Module._apply": _apply,
        "transformers.utils.import_utils.is_fake_tensor": lambda _: False,  # it would take another way, that of tracing
        "torch.Tensor.pin_memory": lambda self, *_, **__: self,
        "torch.Tensor.numpy": _numpy,
        "torch.random.set_rng_state": lambda _: None,  # a fake tensor holds no state
        "torch.Tensor.new_tensor": lambda self, data, dtype=None, device=None, **_: torch.tensor(
            data, dtype=dtype or self.dtype, device=device or self.device
        ),
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value, create=True))
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield asked
