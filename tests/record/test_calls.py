from __future__ import annotations

import pytest

from fourfold.record.calls import (
    SLOTS,
    Call,
    CallsFile,
    first_difference,
    packed,
    read_calls,
    told_of,
    what_and_where,
)
from fourfold.spec.errors import DataError


def call(number, op="all_reduce", shape="[3]", site="model:1 in f", group="0", **more):
    values = {"count": number, "time": float(number), "dtype": "float32", **more}
    return Call(group=group, number=number, op=op, shape=shape, site=site, **values)


def test_a_file_holds_the_newest_calls_and_can_be_read_while_it_is_written(tmp_path):
    file = CallsFile(tmp_path, 3)
    for count in range(1, SLOTS + 11):
        text = packed("0", "all_reduce", f"[{count}]", "float32", "model:7 in f", "blocks.1")
        file.write(count, count - 1, 5.0, text)
    found = read_calls(tmp_path)[3]
    assert [one.count for one in found] == list(range(11, SLOTS + 11))
    assert found[-1].words == f"all_reduce of [{SLOTS + 10}] float32 (blocks.1) at model:7 in f"
    assert (found[-1].number, found[-1].group, found[-1].time) == (SLOTS + 9, "0", 5.0)
    file.close()
    assert read_calls(tmp_path)[3] == found


def test_files_that_are_none_and_no_folder_are_passed_over(tmp_path):
    (tmp_path / "rank0").write_bytes(b"what")
    (tmp_path / "rankx").write_bytes(b"")
    CallsFile(tmp_path, 1).close()
    assert read_calls(tmp_path) == {1: ()}
    assert read_calls(tmp_path / "none") == {}


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "calls").write_text("a file")
    with pytest.raises(DataError, match="keep a rank's last collectives"):
        CallsFile(tmp_path / "calls", 0)


def test_long_texts_are_cut_and_read_back(tmp_path):
    file = CallsFile(tmp_path, 0)
    file.write(1, 1, 0.0, packed("0", "all_gather", "9" * 500, "float32", "s" * 500, "u" * 500))
    (found,) = read_calls(tmp_path)[0]
    assert (len(found.shape), len(found.unit), found.site[:3]) == (80, 80, "sss")


def test_the_first_difference_is_the_earliest_and_the_fewer_are_odd():
    same = [call(1), call(2)]
    other = [call(1), call(2, op="all_gather"), call(3, shape="[4]")]
    found = first_difference({0: [*same, call(3)], 1: other, 2: [*same, call(3)]})
    assert found is not None and found.odd == (1,)
    problem = found.problem()
    assert problem.asked == "one collective on every rank of group 0, as its call 2"
    assert problem.found.startswith(
        "rank 1 called all_gather of [3] float32 at model:1 in f; rank 0, 2 called all_reduce"
    )
    assert "rank 1" in problem.instead


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_ranks_the_lower_is_taken_for_right(first):
    calls = {0: [call(1)], 1: [call(1, shape="[5]")]}
    found = first_difference({rank: calls[rank] for rank in (first, 1 - first)})
    assert found is not None and found.odd == (1,)


def test_what_may_differ_is_no_difference():
    assert (
        first_difference({0: [call(1, op="all_to_all_single")], 1: [call(1, "all_to_all_single", "[5]")]})
        is None
    )
    assert first_difference({0: [call(1, site="a:1")], 1: [call(1, site="b:2")]}) is None  # shapes alone
    assert first_difference({0: [call(1, group="1")], 1: [call(1, group="2", op="barrier")]}) is None
    messages = {0: [call(0, op="send")], 1: [call(0, op="recv")]}
    assert first_difference(messages) is None and told_of(messages) == ""
    assert first_difference({0: [call(1)]}) is None and first_difference({}) is None


def test_of_one_shape_the_lines_tell_but_not_of_those_with_a_root():
    a, b = call(1, site="a:1"), call(1, site="b:2")
    found = first_difference({0: [a], 1: [b], 2: [a]}, what_and_where)
    assert found is not None and found.odd == (1,)
    rooted = {0: [call(1, op="broadcast", site="a:1")], 1: [call(1, op="broadcast", site="b:2")]}
    assert first_difference(rooted, what_and_where) is None
    units = {0: [call(1, unit="blocks.0")], 1: [call(1, unit="blocks.1")]}
    assert first_difference(units, what_and_where) is not None


def test_who_called_fewer_is_told():
    calls = {0: [call(1), call(2)], 1: [call(1)], 2: [call(1), call(2)]}
    told = told_of(calls)
    assert told.startswith("rank 1 has called 1 collective of group 0, the last all_reduce")
    assert "rank 0, 2 wait in call 2" in told
    assert told_of({0: [call(1)], 1: [call(1)]}) == ""
    assert "as its call 1" in told_of({0: [call(1)], 1: [call(1, op="barrier")]})
