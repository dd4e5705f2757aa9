"""Bytes that a rank sends in a collective, and a plan that was rehearsed."""

from __future__ import annotations

import json

import pytest

from fourfold.plan.rehearsal import Rehearsal, Traffic, sent_bytes
from fourfold.plan.run_plan import RunPlan, make_run_plan, with_rehearsal, without_step
from fourfold.plan.state_bytes import CATEGORIES, INSTANTS
from fourfold.spec.load import load_spec


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all-reduce", 1500),
        ("all-gather", 750),
        ("reduce-scatter", 750),
        ("all-to-all", 750),
        ("broadcast", 1000),
        ("send", 1000),
        ("receive", 0),
        ("barrier", 0),
    ],
)
def test_four_ranks_and_a_thousand_bytes(kind, sent):
    assert sent_bytes(kind, 1000, 4) == sent
    assert sent_bytes(kind, 0, 4) == 0


def test_alone_nothing_is_sent_and_parts_are_rounded_up():
    assert sent_bytes("all-reduce", 1000, 1) == 0
    assert sent_bytes("all-gather", 10, 3) == 7


def test_a_model_that_was_built_is_known_and_what_only_a_check_shows_is_told():
    own = ['model={kind="import", target="a:b"}', "layout.tp=2"]
    plan = make_run_plan(load_spec("tiny", own), 2, ("test",))
    assert any("known once it is built" in note for note in plan.notes)
    held = dict.fromkeys(CATEGORIES, 0) | {"parameters": 308}
    known = without_step(plan, 77, held, "not rehearsed")
    assert (known.parameters, known.rank_bytes) == (77, {"after init": held})
    assert not any("known once it is built" in note for note in known.notes)
    assert any("only fourfold verify equal shows" in note for note in known.notes)
    assert known.notes[-1] == "not rehearsed"
    assert "308 B after init" in str(known)


def test_a_rehearsed_plan_tells_what_was_seen():
    held = dict.fromkeys(CATEGORIES, 0) | {"parameters": 3 << 20}
    seen = Rehearsal(
        rank=0,
        parameters=77,
        state=dict.fromkeys(INSTANTS, held),
        activations_bytes=1 << 20,
        peak_bytes=5 << 20,
        peak_phase="backward",
        peak_state=held,
        peak_beside_bytes=2 << 20,
        traffic=(Traffic(kind="all-reduce", over="dp_replicate", ranks=2, count=3, bytes=6, sent_bytes=6),),
    )
    plan = with_rehearsal(make_run_plan(load_spec("tiny"), 2, ("test",)), seen)
    assert (plan.parameters, plan.rank_bytes, plan.rehearsal) == (77, seen.state, seen)
    assert not any("activations" in missing for missing in plan.not_predicted)
    text = " ".join(str(plan).split())
    assert "at most 5.00 MiB, in backward: parameters 3.00 MiB, beside them 2.00 MiB" in text
    assert "6 B sent in 3 all-reduces over dp_replicate, 2 ranks" in text
    assert RunPlan.model_validate_json(json.dumps(plan.model_dump(mode="json"))) == plan
