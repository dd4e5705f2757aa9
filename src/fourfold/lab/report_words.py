"""Values as people read them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def shown(key: str, value: Any) -> str:
    """A value as people read it; the key's words (bytes, _s) say its unit."""
    if value is None or value == "n/a":
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return " · ".join(f"{name} {shown(f'{name}_{key}', item)}" for name, item in value.items()) or "none"
    if isinstance(value, (int, float)):
        if "bytes" in key.split("_"):
            return _bytes(value)
        if key.endswith("_s"):
            return _seconds(value)
        return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def _bytes(value: float) -> str:
    """Powers of 1024, as the names say."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(max(abs(value), 1))) // 10, len(units) - 1)
    return f"{value / 1024**power:,.{0 if power == 0 else 2}f} {units[power]}"


def _seconds(value: float) -> str:
    if value < 60:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def count(number: int | str, noun: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
