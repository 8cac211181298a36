"""FSDP2 as the plan counts it, where accelerate's own way differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch


def reduce_in_fp32(plugin: Any) -> None:
    """Changes the mixed-precision policy of accelerate's FSDP plugin; none, where all is fp32, stays as it is."""
    if plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)
