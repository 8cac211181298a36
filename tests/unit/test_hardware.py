"""Hardware that a user describes, and what of this machine's is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.errors import HardwareError
from sft_play.plan.detect import detect
from sft_play.plan.hardware import CATALOGUE, GIB, find_card, parse_hardware
from tests.conftest import on_machine
from tests.nvml_double import RTX3090, Machine


def test_cards_are_parsed_from_the_names_of_the_catalogue() -> None:
    card = parse_hardware("H200").devices[0]
    assert card.peak_flops == 989e12 and card.bf16 and card.fp8
    for text, names in {
        "4090": ["RTX4090"],
        "2x4090+3090": ["RTX4090", "RTX4090", "RTX3090"],
        "2 x A100 80GB": ["A100"] * 2,
        "A100x2": ["A100"] * 2,
        "2xA100-80G": ["A100"] * 2,
        "24 GB": ["24 GB GPU"],
        "A6000": ["RTXA6000"],
        "3080 12GB": ["RTX3080 12GB"],
        "12GB+8GB": ["12 GB GPU", "8 GB GPU"],
        "2x8xH100": ["H100"] * 8,
        "A100 SXM4 40GB": ["A100-40GB"],
    }.items():
        assert [device.name for device in parse_hardware(text).devices] == names
    assert 11.5 * GIB < parse_hardware("3080 12GB").devices[0].memory_bytes < 12 * GIB


def test_a_machines_memory_is_described_beside_its_cards() -> None:
    two = parse_hardware("2x4090+64 GB RAM@1Gbit")
    assert (len(two.devices), two.ram_bytes, two.ram_known, two.listed) == (2, 64 * GIB, True, 1)
    assert not parse_hardware("2x4090").ram_known
    assert parse_hardware("2x4090@1Gbit+64GB-RAM") == parse_hardware("2x4090+64GB-RAM@1Gbit")


def test_a_size_beside_a_named_card_says_whether_it_is_memory_or_a_gpu() -> None:
    with pytest.raises(HardwareError) as error:
        parse_hardware("RTX4090+64GB")
    assert "64GB-RAM" in (error.value.hint or "") and "1x64GB" in (error.value.hint or "")
    assert len(parse_hardware("RTX4090+1x64GB").devices) == 2


def test_a_speed_as_others_write_it_is_answered_with_ours() -> None:
    for text, hint in {
        "1Gbps": "write `1Gbit`",
        "10 GbE": "write `10Gbit`",
        "100Mb/s": "write `100Mbit`",
        "1GB/s": None,
    }.items():
        with pytest.raises(HardwareError) as error:
            parse_hardware(f"2x24GB@{text}")
        assert error.value.hint == hint
    assert parse_hardware("H100 96GiB").devices == parse_hardware("H100 96GB").devices


def test_every_row_of_the_catalogue_is_found_by_its_own_name() -> None:
    for name, card in CATALOGUE.items():
        assert parse_hardware(name).devices[0].name == name
        # A desktop card's name is not enough for a laptop.
        assert ("Laptop" in name) == (find_card(f"NVIDIA {name} Laptop GPU") == card)


@pytest.mark.parametrize(
    "text",
    ["0x24GB", "banana", "2x0GB", "2x24GB@fast", "2x24GB@0Gbit", "+", "64GB-RAM", "4090+8GB-RAM+9GB-RAM"],
)
def test_unknown_hardware_is_refused_with_the_known_names(text: str) -> None:
    with pytest.raises(HardwareError) as error:
        parse_hardware(text)
    assert error.value.exit_code == 3
    assert error.value.place == f"HARDWARE={text}"
    assert "1Gbit" in error.value.message or "RTX4090" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA RTX A6000", "RTXA6000"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX4090Laptop"),
        ("NVIDIA GeForce RTX 3090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX4070TiSuper"),
    ],
)
def test_cards_are_known_by_the_names_of_drivers(driver: str, expected: str | None) -> None:
    card = find_card(driver)
    assert (card.name if card else None) == expected


@pytest.mark.parametrize(
    ("variable", "shown"),
    [
        ("", []),
        ("GPU-22,0", [2, 0]),
        ("0,-1,2", [0]),
    ],
)
def test_cuda_visible_devices_selects_the_detected_cards(tmp_path: Path, variable: str, shown: list[int]) -> None:
    with on_machine(Machine(cards=(RTX3090,) * 3).environment(tmp_path) | {"CUDA_VISIBLE_DEVICES": variable}):
        hardware = detect()
    assert [device.number for device in hardware.devices] == (shown or [None])
    assert (hardware.driver_cuda, hardware.kind) == (("13.0", "cuda") if shown else (None, "cpu"))
