"""A classic mistake in the product's own ranks: what `verify equal` says to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.record.finding import Finding, fact
from fourfold.verify.deviation import Deviation


def said(
    mistake: str, told: Mapping[str, Any], spec: str, settings: Sequence[str], what: str, command: str
) -> tuple[str, Finding]:
    """`told`, its document on 2 ranks, in words and as a finding.

    spec, settings: what was judged; what: the part of the product that the mistake is made in.
    """
    first = told["first_deviation"]
    where = str(Deviation(**first)) if first else "no deviation"
    asked = "".join(f" --set {setting}" for setting in settings if "layout" in setting)
    words = f"`verify equal {spec} --world 2{asked}` with this mistake in its ranks: verdict {told['verdict']}; {where}"
    finding = fact(
        f"{mistake}: verify equal catches it in the product's own {what}, and says where",
        'verdict "fail", and the first deviation',
        f"verdict {told['verdict']!r}; {where}",
        told["verdict"] == "fail" and first is not None,
        command=command,
    )
    return words, finding
