"""A run in which one rank is late, or calls its collectives otherwise: that rank and its line are named, in time."""

from __future__ import annotations

import pytest

from fourfold.record.run_dir import RunDir
from tests.cli.test_train import finish, unfolded
from tests.train.test_resume import go

pytestmark = pytest.mark.timeout(300)


def told(run, fault, *sets):
    transform = f'data.transforms=[{{kind="import", target="tests.train.order_faults:{fault}"}}]'
    process = go(run, sets=("run.timeout_s=10", "run.check_every=4", transform, *sets))
    _, error = finish(process)
    return process.returncode, unfolded(error)


def test_a_late_rank_is_named_with_its_line_before_the_timeout(tmp_path):
    code, said = told(tmp_path / "run", "sleeps")
    assert code == 137
    assert "rank 1 hung at step 5 (data)" in said and "order_faults:" in said and "in sleeps" in said
    assert "rank 0 for rank 1" in said and "fourfold.train.step:" in said
    assert "waiting for" in said  # told while there is still time
    assert "in sleeps" in RunDir(tmp_path / "run").failures_md.read_text()


@pytest.mark.parametrize("fault", ["one_more", "another_kind"])
def test_a_collective_of_its_own_is_named_with_both_lines(tmp_path, fault):
    code, said = told(tmp_path / "run", fault)
    assert code != 0
    assert "one collective on every rank of group 0" in said, said
    assert f"in {fault}" in said and "fourfold.train.step:" in said


def test_a_swap_of_one_shape_is_found_at_the_next_look(tmp_path):
    code, said = told(tmp_path / "run", "in_another_order")
    assert code == 3
    assert "since the last look before step 8 ended" in said
    assert "rank 1 called all_reduce of [2] float32 at tests.train.order_faults" in said
