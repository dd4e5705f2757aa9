from __future__ import annotations

from fourfold.collectives.standing import Standing, verdict
from fourfold.record.calls import Call


def stands(rank, entered=1, done=1, *, group="0", ranks=(0, 1, 2), op="all_reduce", waiting_s=0.0, **more):
    calls = tuple(
        Call(
            count=n,
            group=group,
            number=n,
            op=op if n == entered else "all_reduce",
            shape="[3]",
            dtype="float",
            site="",
        )
        for n in range(1, entered + 1)
    )
    return Standing(
        rank=rank, mark="", step=3, phase="forward", line=f"model:{rank} in f", waiting_s=waiting_s,
        entered={group: entered}, done={group: done}, groups={group: ranks}, noted=(), recorded=calls, **more,
    )  # fmt: skip


def judged(*standings, world=3):
    return verdict({one.rank: one for one in standings}, world)


def test_ranks_that_all_compute_are_not_judged():
    assert judged(stands(0), stands(1), stands(2)) is None
    assert judged(stands(0)) is None and judged() is None


def test_a_collective_that_all_have_entered_is_under_way():
    assert judged(*(stands(rank, 2, 1, waiting_s=50.0) for rank in range(3))) is None


def test_who_has_not_come_is_late_and_its_line_is_told():
    found = judged(stands(0, 2, 1, waiting_s=9.0), stands(1), stands(2, 2, 1, waiting_s=7.0))
    assert found is not None
    assert (found.final, found.late, found.waiting) == (False, (1,), (0, 2))
    assert "rank 1 stands at step 3 (forward) in model:1 in f" in found.problem.found
    assert "rank 0, 2 for rank 1" in found.problem.found


def test_who_says_nothing_is_late_too():
    found = judged(stands(0, 2, 1, waiting_s=9.0), stands(2, 2, 1))
    assert found is not None and (found.final, found.late) == (False, (1,))
    assert "rank 1 is at work elsewhere, or says nothing at all" in found.problem.found


def test_another_operation_is_final():
    found = judged(stands(0, 2, 1), stands(1, 2, 1, op="barrier"), stands(2, 2, 1))
    assert found is not None and found.final and found.late == (1,)
    assert "rank 1 called barrier" in found.problem.found and "model:1 in f" in found.problem.found


def test_a_circle_of_groups_is_final():
    groups = {"a": (0, 1), "b": (0, 1)}

    def in_group(rank, name, other):
        return stands(rank).model_copy(
            update={
                "groups": groups,
                "calls": (),
                "entered": {name: 1, other: 0},
                "done": {name: 0, other: 0},
            }
        )

    found = judged(in_group(0, "a", "b"), in_group(1, "b", "a"), world=2)
    assert found is not None and found.final and found.waiting == (0, 1)
    assert "and waits for rank 1; rank 1 stands" in found.problem.found


def test_messages_wait_for_their_other_end_only_while_it_is_not_there():
    both = judged(stands(0, receives=(1,)), stands(1, receives=(0,)), world=2)
    assert both is not None and both.final
    assert (
        judged(stands(0, receives=(1,)), stands(1, sends=(0,)), world=2) is None
    )  # a long message on its way
    late = judged(stands(0, sends=(1,)), stands(1), world=2)
    assert late is not None and (late.final, late.late, late.waiting) == (False, (1,), (0,))


def test_it_goes_through_json():
    one = stands(0, 2, 1, receives=(1,))
    assert Standing.model_validate_json(one.model_dump_json()) == one


def test_where_python_called_it_its_line_is_told():
    def noted(rank, op, site):
        one = Call(count=1, group="0", number=1, op=op, shape="[3]", dtype="float32", site=site)
        return stands(rank).model_copy(update={"noted": (one,)})

    found = judged(noted(0, "all_reduce", "a:1 in f"), noted(1, "all_gather", "b:2 in g"), world=2)
    assert found is not None and found.final and found.late == (1,)
    assert "rank 1 called all_gather of [3] float32 at b:2 in g" in found.problem.found
