from __future__ import annotations

import pytest

from fourfold.collectives.agree import agree, disagreements
from fourfold.spec.errors import CheckFailed, RankFailed
from tests.collectives import rank_jobs


def test_equal_values_raise_nothing():
    assert disagreements([{"a": "1"}, {"a": "1"}, {"a": "1"}]) == []
    agree({"a": "1"})  # a world of one, no process group


def test_the_odd_rank_is_named():
    (problem,) = disagreements([{"a": "1"}, {"a": "1"}, {"a": "2"}])
    assert "rank 2 has 2" in problem.found
    assert "the others have 1" in problem.found
    assert "rank 2" in problem.instead


def test_a_missing_name_differs_and_all_problems_come_at_once():
    problems = disagreements([{"a": "1", "b": "1"}, {"a": "2"}])
    assert [problem.asked for problem in problems] == ["the same a on every rank", "the same b on every rank"]
    assert "(missing)" in problems[1].found


def test_real_ranks_agree_and_every_rank_is_told(ranks):
    assert ranks(2).run(rank_jobs.agree_on, "same") == [None, None]
    assert all("rank 1 has 1" in told for told in ranks(2).run(rank_jobs.disagree))


def test_a_disagreement_ends_the_job_with_exit_code_3(ranks):
    with pytest.raises(RankFailed, match="initial parameters") as caught:
        ranks(2).run(rank_jobs.disagree_loudly)
    assert caught.value.exit_code == CheckFailed.exit_code
