"""Write the figures of `docs/presets.md` and `docs/hardware.md` after a change of presets, formulas or catalogue.

With `--check` it writes nothing, and exits with 1 if a figure is stale. Only the text between `<!-- begin NAME -->` and
`<!-- end -->` is replaced. Figures are computed by formula, so they are the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sft_play.config.layers import Override  # noqa: E402
from sft_play.config.load import load_config  # noqa: E402
from sft_play.plan.architecture import shape_of  # noqa: E402
from sft_play.plan.hardware import (  # noqa: E402
    CATALOGUE,
    GIB,
    parse_hardware,
)
from sft_play.plan.make import make_plan  # noqa: E402
from sft_play.plan.plan import (  # noqa: E402
    LaunchRequest,
    Plan,
)
from sft_play.plan.request import (  # noqa: E402
    DoesNotFitError,
    Request,
)

LAN = "12GB+8GB+8GB@1Gbit"
MADE_FOR = {
    "run_bnb": "24GB", "run_unsloth": "24GB", "rtx4090_sli": "2xRTX4090", "a100_pair": "2xA100", "h100_pair": "2xH100",
    "h200_pair": "2xH200", "h200_quad": "4xH200", "l40s_single": "L40S", "l40s_pair": "2xL40S", "home_lan": LAN,
    "home_lan_13b": LAN, "smoke": "8GB+8GB@1Gbit", "from_scratch": "24GB", "run_bnb_qwen3_5": "16GB",
    "rtx4090_sli_gemma4": "2xRTX4090", "home_lan_smollm3": LAN, "h200_pair_gemma4": "2xH200",
    "h200_single_gpt_oss": "H200",
}  # fmt: skip
"""Preset -> the hardware that it is for, as in docs/presets.md."""

UNCONFIRMED = frozenset(
    {
        "RTX3060",
        "RTX3070",
        "RTX3080",
        "RTX3080Ti",
        "RTX3090Ti",
        "RTX4070Super",
        "RTX4070TiSuper",
        "RTX4080Super",
        "RTX4090Laptop",
        "RTX5070TiLaptop",
        "RTX6000Ada",
        "L40",
        "A10G",
        "GH200",
    }
)
"""Cards whose figures no published page confirms."""

QUOTED = {
    "rtx4090_sli": (6, 4),
    "a100_pair": (8, 4),
    "h100_pair": (8, 4),
    "h200_pair": (4, 4),
    "h200_quad": (16, 2),
    "l40s_single": (8, 1),
    "l40s_pair": (28, 1),
    "home_lan": (1, 8),
    "home_lan_13b": (1, 36),
}
"""Preset -> micro-batch and accumulation that people quote."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A preset on hardware for which it is made."""

    preset: str
    hardware: str
    quoted: tuple[int, int] | None = None


CLAIMS = (
    *(Claim(preset, "16GB") for preset in ("run_bnb", "run_unsloth")),
    *(Claim(preset, hardware, QUOTED.get(preset)) for preset, hardware in MADE_FOR.items()),
)


def plan_of(preset: str, hardware: str, **train: int) -> Plan:
    """Return the plan that `make plan CONFIG=configs/PRESET.yaml HARDWARE=... SOURCE=formula TRAIN_...=` shows."""
    typed = [
        Override(key=f"train.{key}", text=str(value), origin=f"TRAIN_{key.upper()}={value}")
        for key, value in train.items()
    ]
    loaded = load_config(ROOT / "configs" / f"{preset}.yaml", typed, {})
    machine = parse_hardware(hardware)
    request = LaunchRequest(command_strategy="auto" if len(machine.devices) > 1 else "single")
    return make_plan(
        Request(
            config=loaded.config,
            typed=loaded.typed,
            hardware=machine,
            shape=shape_of(loaded.config.model),
            launch=request,
        )
    )


def tightest(plan: Plan) -> tuple[int, int]:
    """Return (peak, room) in bytes of the rank with the least to spare."""
    rank = max(plan.ranks, key=lambda rank: rank.peak_bytes / rank.capacity_bytes)
    return rank.peak_bytes, rank.capacity_bytes


def table() -> str:
    """Return a row for every claim: what the plan chooses, and what people quote."""
    lines = [
        (
            "| preset | `HARDWARE=` | plan: micro-batch x accumulation | recompute | GiB of room, tightest | people"
            " quote | needs GiB |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for claim in CLAIMS:
        plan = plan_of(claim.preset, claim.hardware)
        peak, room = tightest(plan)
        micro, steps = (_each([getattr(rank, name) for rank in plan.ranks]) for name in ("micro_batch", "accumulation"))
        lines.append(
            f"| `{claim.preset}` | `{claim.hardware}` | {plan.strategy}, {micro} x {steps} |"
            f" {'yes' if plan.gradient_checkpointing else 'no'} | {peak / GIB:.1f} of {room / GIB:.1f} |"
            f" {_quoted(claim)} |"
        )
    return "\n".join(lines)


def _each(values: list[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else "(" + ", ".join(map(str, values)) + ")"


def _quoted(claim: Claim) -> str:
    if claim.quoted is None:
        return "| "
    micro, accumulation = claim.quoted
    try:
        peak, room = tightest(plan_of(claim.preset, claim.hardware, batch_size=micro, grad_accum=accumulation))
    except DoesNotFitError as error:
        peak, room = sum(error.parts.values()), error.capacity_bytes
    verdict = "fits" if peak <= room else "does not fit"
    return f"{micro} x {accumulation} | {peak / GIB:.1f} of {room / GIB:.1f}: {verdict}"


def catalogue() -> str:
    """Return a table of the GPU catalogue; `*` marks unconfirmed figures."""
    lines = ["| name | memory | bf16 |", "|---|---|---|"]
    for name, card in CATALOGUE.items():
        mark = "*" if name in UNCONFIRMED else ""
        lines.append(f"| `{name}`{mark} | {card.memory_bytes / GIB:g} | {(card.peak_flops or 0) / 1e12:g} |")
    return "\n".join(lines)


PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "docs/presets.md": {"table": table},
    "docs/hardware.md": {"catalogue": catalogue},
}


def rendered(page: str) -> str:
    """Return a page with every block rendered again."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, block in PAGES[page].items():
        before, begin, rest = text.partition(f"<!-- begin {name} -->\n")
        _, end, after = rest.partition("\n<!-- end -->")
        assert begin and end, f"{page} needs a block `{name}`"
        text = before + begin + block() + end + after
    return text


def main() -> int:
    """Write the pages; with `--check`, return 1 if one is stale."""
    stale = 0
    for page in PAGES:
        before, after = (ROOT / page).read_text(encoding="utf-8"), rendered(page)
        if "--check" not in sys.argv[1:]:
            (ROOT / page).write_text(after, encoding="utf-8")
            print(page)
        elif after != before:
            stale = 1
            old_lines = before.splitlines()
            print(
                "\n".join(
                    [
                        f"{page} is stale: run `python scripts/render_presets.py`",
                        *(x for x in after.splitlines() if x not in old_lines),
                    ]
                )
            )
    return stale


if __name__ == "__main__":
    raise SystemExit(main())
