from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fourfold.verify.ledger import (
    NOT_DELIVERED,
    RankLedger,
    audit,
    coinciding_share,
    global_batches,
    never_delivered,
)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_a_clean_epoch():
    found = audit([ids(0, 3, 1), ids(2, 5, 4)], 6, 6)
    assert found.clean
    assert (found.delivered, found.distinct) == (6, 6)


def test_every_way_of_going_wrong_has_its_number():
    found = audit([ids(0, 1, 1, 7), ids(0, 2)], 6, 6)
    assert (found.delivered, found.distinct) == (6, 3)
    assert found.duplicates == 2  # 1 again on one rank, 0 on both
    assert found.shared == 1
    assert found.missing == 3
    assert found.strangers == 1  # 7 is no sample of six
    assert not found.clean


def test_a_dropped_tail_is_not_missing():
    found = audit([ids(5, 3), ids(1, 0)], 6, 4)
    assert found.missing == 0
    assert never_delivered([ids(5, 3), ids(1, 0)], 6).tolist() == [2, 4]


def test_nothing_delivered():
    found = audit([ids(), ids()], 4, 4)
    assert (found.missing, found.duplicates, found.delivered) == (4, 0, 0)


@given(st.permutations(range(12)), st.integers(1, 4), st.data())
def test_duplicates_and_missing_add_up(order, ranks, data):
    given_ids = data.draw(st.lists(st.sampled_from(order), min_size=12, max_size=12))
    parts = np.array_split(np.array(given_ids, dtype=np.int64), ranks)
    found = audit(parts, 12, 12)
    assert found.delivered == found.distinct + found.duplicates
    assert found.missing == 12 - len(set(given_ids))
    assert audit(np.array_split(np.array(order, dtype=np.int64), ranks), 12, 12).clean


def test_global_batches_are_put_together_by_row():
    first = RankLedger(0, np.array([[10, 11], [14, -1]]), np.array([[0, 1], [0, 1]]))
    second = RankLedger(1, np.array([[12, 13]]), np.array([[3, 2]]))
    assert global_batches([first, second], 5).tolist() == [[10, 11, 13, 12, NOT_DELIVERED]]
    assert global_batches([], 5).shape == (0, 5)


def test_between_leaves_filler_out():
    ledger = RankLedger(0, np.array([[1, 2], [3, -1], [5, 6]]), np.zeros((3, 2), dtype=np.int64))
    assert ledger.between(1, 3).tolist() == [3, 5, 6]
    assert ledger.steps == 3


def test_orders_are_compared_place_by_place():
    assert coinciding_share(ids(1, 2, 3), ids(1, 2, 3)) == 1.0
    assert coinciding_share(ids(1, 2, 3, 4), ids(1, 3, 2, 4)) == 0.5
    assert coinciding_share(ids(1, 2, 3), ids(1)) == 1.0  # as far as both go
    assert coinciding_share(ids(), ids(1)) == 0.0
