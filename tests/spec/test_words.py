from __future__ import annotations

import pytest

from fourfold.spec.words import counted


@pytest.mark.parametrize(
    ("count", "form", "told"),
    [(0, "", "0 ranks"), (1, "", "1 rank"), (2, "", "2 ranks"), (1000, ",", "1,000 ranks")],
)
def test_a_noun_goes_with_its_number(count: int, form: str, told: str) -> None:
    assert counted(count, "rank", form) == told
