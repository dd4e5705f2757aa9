"""`fourfold layout list`: the table, the document, the command that comes next."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.cli.layout_list import legal_lines, refused_lines
from fourfold.cli.main import main
from fourfold.spec.layouts import Layouts, layouts
from fourfold.spec.load import load_spec
from fourfold.spec.ready import ready_names
from fourfold.spec.training import LayoutSpec


def run(capsys: pytest.CaptureFixture[str], line: str, code: int = 0) -> tuple[str, str]:
    assert main(["layout", "list", *line.split()]) == code
    return capsys.readouterr()


def test_four_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "tiny --world 4")
    assert out.startswith(
        """\
tiny on 4 ranks: 47 layouts

pp  dp_replicate  dp_shard  cp  tp  zero     sp      layouts
1   4             1         1   1   0        no      1
1   2             2         1   1   1 2 3    no      3
1   1             4         1   1   1 2 3    no      3
1   2             1         1   2   0        no yes  2
1   1             2         1   2   1 2 3    no yes  6
1   1             1         1   4   0        no yes  2
1   2             1         2   1   0 1 2 3  no      4
1   1             2         2   1   1 2 3    no      3
1   1             1         2   2   0 1 2 3  no yes  8
1   1             1         4   1   0 1 2 3  no      4
2   2             1         1   1   0        no      1
2   1             2         1   1   1 2 3    no      3
2   1             1         1   2   0        no yes  2
2   1             1         2   1   0 1 2 3  no      4
4   1             1         1   1   0        no      1

refused               layouts  because
dp_shard > 1, zero 0  16       [mathematics] ranks to shard over, and nothing
"""
    )
    assert err == "next: fourfold verify equal tiny --world 4 --all\n"


@pytest.mark.parametrize(
    ("setting", "count"), [("layout.tp=3", 47), ("layout.wrap=2", 33), ("layout.offload=cpu", 33)]
)
def test_the_specs_own_layout_refuses_nothing(
    capsys: pytest.CaptureFixture[str], setting: str, count: int
) -> None:
    assert run(capsys, f"tiny --world 4 --set {setting}")[0].startswith(f"tiny on 4 ranks: {count} layouts\n")


def test_an_imported_model_has_the_last_word(capsys: pytest.CaptureFixture[str]) -> None:
    own = 'model.kind="import" --set model.target="m:make" --set data.kind="synthetic" --set data.inputs=4'
    _, err = run(capsys, f'tiny --world 2 --set {own} --set data.outputs=1 --set data.task="regression"')
    assert "its sharding() says" in err
    assert "ends(), stream() and part()" in err
    assert "for ep it needs experts" in err


def test_settings_count_and_come_next(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "tiny --world 2 --set model.ffn_width=65 --set layout.zero=3")
    assert out.startswith("tiny on 2 ranks: 9 layouts\n")
    assert "65 hidden features" in out
    assert err.endswith("--world 2 --set model.ffn_width=65 --set layout.zero=3 --all\n")


def test_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "tiny --world 1")
    assert out == (
        "tiny on 1 rank: 1 layout\n\ndp_replicate  dp_shard  tp  zero  sp  layouts\n"
        "1             1         1   0     no  1\n"
    )


def test_none(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "tiny --world 2 --set model.mtp_layers=1")
    assert out.startswith(
        "tiny on 2 ranks: no layouts\n\nrefused           layouts  because\nmodel.mtp_layers  22"
    )
    assert err.startswith("next: fourfold spec show tiny")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(run(capsys, "tiny --world 8 --json")[0])
    assert document["schema"] == "fourfold.layout.list/1"
    assert (document["source"], document["world"], document["count"]) == ("tiny", 8, 129)
    listed = layouts(load_spec("tiny").spec, 8)
    assert [LayoutSpec.model_validate(each) for each in document["layouts"]] == list(listed.legal)
    tp_8 = next(each for each in document["refused"] if each["family"] == "tp 8")
    assert tp_8["rule"] == "tp keeps heads whole"
    assert tp_8["owed"] == "library"
    assert (tp_8["count"], tp_8["found"][:7]) == (8, "4 heads")
    assert "whole heads" in tp_8["why"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("tiny --world 0", "at least one rank"),
        ("tinny --world 2", "tiny"),
        ("tiny --world 2 --set layout.tpp=2", "layout.tp"),
        ("tiny", "world"),
        ("--world 2", "SPEC"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], line: str, says: str) -> None:
    assert says in run(capsys, line, code=2)[1]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(ready_names())), st.sampled_from([1, 2, 6, 8, 64, 90, 512]))
def test_it_fits_80_columns_and_counts_each_once(name: str, world: int) -> None:
    listed = layouts(load_spec(name).spec, world)
    lines = "\n".join([*legal_lines(name, world, listed), *refused_lines(listed.refused)]).splitlines()
    assert max(map(len, lines)) <= 80
    rows = lines[3 : 3 + len(lines)]
    rows = rows[: rows.index("")] if "" in rows else rows
    assert not listed.legal or sum(int(row.split()[-1]) for row in rows) == len(listed.legal)


def test_where_not_every_zero_goes_with_every_sp() -> None:
    legal = (
        LayoutSpec(dp_replicate=1, dp_shard=2, tp=2, zero=1),
        LayoutSpec(dp_replicate=1, dp_shard=2, tp=2, zero=2),
        LayoutSpec(dp_replicate=1, dp_shard=2, tp=2, zero=2, sp=True),
    )
    assert legal_lines("x", 4, Layouts(legal, ()))[2].splitlines()[1:] == [
        "1             2         2   1 2   no   2",
        "1             2         2   2     yes  1",
    ]
