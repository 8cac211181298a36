"""Hardware that a user describes, and what of this machine's is counted."""

from __future__ import annotations

import pytest

from sft_play.errors import HardwareError
from sft_play.plan.detect import cpu_only, detect, visible
from sft_play.plan.hardware import CATALOGUE, GIB, find_card, parse_hardware


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("2x24GB", [24, 24]), ("12GB+8GB+8GB", [12, 8, 8]), ("1x80gb", [80]), ("24 GB", [24]), ("2 x 40GiB", [40, 40]), ("2*16G", [16, 16]),
        ("2x7.5GB", [7.5, 7.5]),
    ],
)  # fmt: skip
def test_memory_sizes(text: str, sizes: list[float]) -> None:
    hardware = parse_hardware(text)
    assert hardware.kind == "cuda" and hardware.described
    assert [round(d.memory_bytes / GIB / 0.98, 1) for d in hardware.devices] == sizes
    assert all(d.peak_flops is None for d in hardware.devices)


def test_names_from_the_catalogue() -> None:
    four = parse_hardware("4xH200")
    assert [d.name for d in four.devices] == ["H200"] * 4
    assert four.devices[0].peak_flops == 989e12 and four.devices[0].bf16 and four.devices[0].fp8
    pair = parse_hardware("2x RTX 4090")
    assert pair.devices[0].name == "RTX4090" and pair.devices[0].compute_capability == (8, 9)
    mixed = parse_hardware("RTX5070TiLaptop+8GB")
    assert [d.name for d in mixed.devices] == ["RTX5070TiLaptop", "8 GB GPU"]
    assert not parse_hardware("T4").devices[0].bf16


def test_every_row_of_the_catalogue_is_found_by_its_own_name_and_names_a_source() -> None:
    for name, card in CATALOGUE.items():
        assert parse_hardware(name).devices[0].name == name
        assert card.source


def test_networks() -> None:
    lan = parse_hardware("12GB+8GB+8GB@1Gbit")
    assert lan.network_bytes_per_second == pytest.approx(117.5e6)
    assert parse_hardware("2x24GB@100Mbit/s").network_bytes_per_second == pytest.approx(11.75e6)
    assert parse_hardware("2x24GB").network_bytes_per_second is None


def test_cpu_is_this_machine_without_gpus() -> None:
    hardware = parse_hardware("cpu")
    assert hardware.kind == "cpu" and len(hardware.devices) == 1
    assert hardware == cpu_only() or hardware.ram_bytes == cpu_only().ram_bytes  # free memory may move between two looks


@pytest.mark.parametrize(
    "text", ["0x24GB", "banana", "2x", "x24GB", "-1xH100", "2x0GB", "24TB", "H100+", "99999xH100", "2x24GB@fast", "2x24GB@0Gbit", "+", "1e9GB"],
)  # fmt: skip
def test_nonsense_is_refused_with_what_is_known(text: str) -> None:
    with pytest.raises(HardwareError) as error:
        parse_hardware(text)
    assert error.value.exit_code == 3
    assert error.value.place == f"HARDWARE={text}"
    assert "1Gbit" in error.value.message or "RTX4090" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX4090"), ("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100"), ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"), ("NVIDIA A100-PCIE-40GB", "A100-40GB"), ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA L40S", "L40S"), ("NVIDIA L4", "L4"), ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "RTX4070Laptop"), ("NVIDIA GeForce RTX 3070 Ti", "RTX3070Ti"), ("NVIDIA RTX A6000", "RTXA6000"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA L40", "L40"), ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX4070TiSuper"), ("NVIDIA GeForce RTX 4060 Ti", "RTX4060Ti"), ("NVIDIA A40", "A40"),
        ("NVIDIA RTX A4000", None), ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"), ("Tesla V100-SXM2-16GB", "V100"), ("NVIDIA A10", "A10"),
        ("NVIDIA H100 NVL", "H100NVL"), ("NVIDIA GH200 480GB", "GH200"), ("NVIDIA H20", "H20"),
        ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", "RTX5070TiLaptop"),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX5070Ti"), ("NVIDIA GeForce RTX 3080 Laptop GPU", None), ("NVIDIA RTX 6000", None),
    ],
)  # fmt: skip
def test_names_that_drivers_give(driver: str, expected: str | None) -> None:
    found = find_card(driver)
    assert (found[0] if found else None) == expected


UUIDS = ["GPU-aa11", "GPU-bb22", "GPU-cc33"]


@pytest.mark.parametrize(
    ("variable", "shown"),
    [
        (None, [0, 1, 2]), ("", []), ("1", [1]), ("2,0", [2, 0]), ("0,7,1", [0]), ("-1", []), ("GPU-bb", [1]), ("GPU-cc33,0", [2, 0]),
        ("1,1", [1]), (" 0 , 2 ", [0, 2]), ("none", []),
    ],
)  # fmt: skip
def test_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch, variable: str | None, shown: list[int]) -> None:
    if variable is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible(range(3), UUIDS) == shown


def test_this_machine_has_memory_and_threads() -> None:
    hardware = detect()
    assert hardware.cpu_threads >= 1 and hardware.ram_bytes >= GIB
    assert all(0 <= device.free_bytes <= device.memory_bytes for device in hardware.devices)
    assert hardware.kind == ("cuda" if hardware.devices[0].compute_capability else "cpu")
