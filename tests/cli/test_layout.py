"""`fourfold layout show`: the grid, the groups, the refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.cli.layout import app
from fourfold.cli.layout_drawn import FIRST, LAST, group_table, picture, who_with_whom
from fourfold.cli.main import main
from fourfold.spec.errors import SpecError
from fourfold.spec.grid import GROUPS, Grid


def show(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """stdout of `fourfold layout show LINE`."""
    assert app(["show", *line.split()], result_action="return_value") == 0
    return capsys.readouterr().out


def show_json(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(show(capsys, f"{line} --json"))
    assert document["schema"] == "fourfold.layout/1"
    return document


def test_eight_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    out = show(capsys, "--world 8 --set layout.pp=2 --set layout.tp=2")
    assert out.startswith(
        """\
8 ranks = pp 2 × dp_replicate 2 × dp_shard 1 × cp 1 × tp 2

pp  dp_replicate : tp  0  1
 0             0 :     0  1
 0             1 :     2  3
 1             0 :     4  5
 1             1 :     6  7

who talks to whom: the same letter, the same group
rank           0  1  2  3  4  5  6  7
pp             a  b  c  d  a  b  c  d
dp_replicate   a  b  a  b  c  d  c  d
tp             a  a  b  b  c  c  d  d
dp             a  b  a  b  c  d  c  d

axis         ranks groups  nodes     groups of ranks
pp               2      4  inside    0 4 | 1 5 | 2 6 | 3 7
dp_replicate     2      4  inside    0 2 | 1 3 | 4 6 | 5 7
dp_shard         1      8  -         each rank alone
cp               1      8  -         each rank alone
tp               2      4  inside    0 1 | 2 3 | 4 5 | 6 7
"""
    )
    assert "\nall of them inside a node of 8 devices\n" in out


def test_two_by_eight_ranks_with_experts(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--world 16 --set layout.pp=2 --set layout.tp=4 --set layout.dp_shard=2 --set layout.zero=2"
    out = show(capsys, f"{line} --set layout.ep=4")
    assert out.startswith(
        """\
16 ranks = pp 2 × dp_replicate 1 × dp_shard 2 × cp 1 × tp 4; ep 4; 2 nodes of 8

pp  dp_shard : tp  0  1  2  3
node 0 ----------------------
 0         0 :     0  1  2  3
 0         1 :     4  5  6  7
node 1 ----------------------
 1         0 :     8  9 10 11
 1         1 :    12 13 14 15

who talks to whom: the same letter, the same group
rank        0   1   2   3   4   5   6   7|  8   9  10  11  12  13  14  15
pp          a   b   c   d   e   f   g   h|  a   b   c   d   e   f   g   h
"""
    )
    assert "\nep          a   a   a   a   b   b   b   b|  c   c   c   c   d   d   d   d\n" in out
    assert "\nedp         a   b   c   d   a   b   c   d|  e   f   g   h   e   f   g   h\n" in out
    assert re.search(r"^tp +4 +4 +inside +0-3 \| 4-7 \| 8-11 \| 12-15$", out, re.MULTILINE)
    assert "\ninside a node of 8 devices: dp_shard, tp, dp, fsdp, ep, edp\nbetween nodes: pp\n" in out


def test_an_axis_as_long_as_both_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    out = show(capsys, "--world 16 --set layout.tp=16")
    assert "\nnodes 0 to 1 ---" in out
    assert "   0   1   2   3   4   5   6   7|  8   9  10" in out
    assert re.search(r"^tp +16 +1 +cross +0-15$", out, re.MULTILINE)
    assert "\ninside a node of 8 devices: no axis\nbetween nodes: tp\n" in out


def test_a_node_that_ends_inside_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--world 12 --set layout.tp=4 --set hardware.devices_per_node=6"
    out = show(capsys, line)
    assert "           1 :     4  5| 6  7\n" in out
    assert re.search(r"^tp +4 +3 +1 cross +0-3 \| 4-7 \| 8-11$", out, re.MULTILINE)
    document = show_json(capsys, line)
    assert (document["devices_per_node"], document["nodes"]) == (6, 2)
    assert document["crossing"]["tp"] == 1 and document["crossing"]["dp_replicate"] == 4


def test_nodes_of_a_spec(capsys: pytest.CaptureFixture[str]) -> None:
    out = show(capsys, "tiny --world 4 --set layout.tp=2 --set hardware.devices_per_node=2")
    assert (
        "2 nodes of 2" in out and "inside a node of 2 devices: tp\nbetween nodes: dp_replicate, dp\n" in out
    )


def test_large_worlds_stay_readable(capsys: pytest.CaptureFixture[str]) -> None:
    for line, more in (("--world 64 --set layout.tp=2", 20), ("--world 512 --set layout.tp=8", 52)):
        out = show(capsys, line).splitlines()
        assert len(out) < 60 and max(map(len, out)) <= 80
        assert any(text.startswith(f"... {more} rows more: ranks ") for text in out)
        assert any(text.endswith("groups more") for text in out)
        assert not any(text.startswith("who talks") for text in out)


def test_colour_only_on_a_terminal_and_never_with_no_color(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1m" in show(capsys, "--world 2")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in show(capsys, "--world 2")


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, count in (("", 3), ("show ", 3), ("list ", 3)):
        assert main(["layout", *verb.split(), "--help"]) == 0
        assert capsys.readouterr().out.count(f"    fourfold layout {verb}") == count


def test_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(capsys, "--world 1").startswith("1 rank = pp 1 ×")


def test_json_has_every_group_and_coordinate(capsys: pytest.CaptureFixture[str]) -> None:
    document = show_json(capsys, "--world 8 --set layout.pp=2 --set layout.tp=2 --set layout.ep=2")
    grid = Grid(pp=2, dp_replicate=2, tp=2, ep=2)
    assert document["world"] == 8
    assert document["layout"]["dp_replicate"] == 2
    assert document["coordinates"] == [grid.coordinate(rank) for rank in range(8)]
    assert list(document["groups"]) == list(GROUPS)
    for axis in GROUPS:
        assert document["groups"][axis] == [list(group) for group in grid.groups(axis)]


def test_a_spec_brings_its_layout(capsys: pytest.CaptureFixture[str]) -> None:
    document = show_json(capsys, "deepseek-v3 --world 2048")
    assert (document["layout"]["pp"], document["layout"]["dp_shard"], document["layout"]["ep"]) == (
        16,
        128,
        64,
    )


def test_a_spec_file_brings_its_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[model]\nkind = "mlp"\n[data]\nkind = "synthetic"\n[layout]\ntp = 2\n')
    assert show_json(capsys, f"{path} --world 6")["layout"]["dp_replicate"] == 3


def test_a_spec_without_a_batch_is_told_what_fits(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[model]\nkind = "mlp"\n[data]\nkind = "synthetic"\n')
    assert "--set layout.tp=4  (dp_replicate becomes 2)" in refusal(f"{path} --world 8 --set layout.tp=16")


def refusal(line: str) -> str:
    with pytest.raises(SpecError) as error:
        app(["show", *line.split()], result_action="return_value")
    assert error.value.exit_code == 2
    return str(error.value)


def test_a_wrong_product_names_the_nearest() -> None:
    said = refusal("--world 8 --set layout.pp=3")
    assert "pp 3 × dp_shard 1 × cp 1 × tp 1 = 3" in said
    assert "--set layout.pp=4  (dp_replicate becomes 2)" in said
    assert "--set layout.dp_replicate=4" in refusal("--world 4 --set layout.dp_replicate=3")
    assert "--set layout.tp=2" in refusal("tiny --world 4 --set layout.tp=3 --set layout.dp_replicate=2")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--world 0", "at least one rank"),
        ("--world 4 --set layout.ep=3", "--set layout.ep=1"),
        ("--world 4 --set layout.dp_shard=2", "--set layout.zero=1"),
        ("--world 4 --set layout.sp=true", "--set layout.tp=2"),
        ("--world 4 --set tp=2", "--set layout.tp=2"),
        ("--world 4 --set run.steps=2", "name a SPEC first"),
        ("--world 4 --set layout.tpp=2", "layout.tp=2"),
        ("--world 4 --set layout.tp=two", "layout.tp"),
        ("--world 4 --set layout.tp", "no ="),
        ("tinny --world 4", "tiny"),
        ("tiny --world 8 --set layout.ep=2", "a model without experts"),
        ("tiny --world 4 --set layout.dp_replicate=1 --set layout.dp_shard='auto'", "--set layout.zero=1\n"),
    ],
)
def test_refusals(line: str, says: str) -> None:
    assert says in refusal(line)


def test_all_refusals_at_once() -> None:
    said = refusal("--world 4 --set layout.tp=0 --set run.steps=2 --set layout.pq=1 --set x")
    for part in ("layout.tp = 0", "run.steps=2", "layout.pq", "--set x"):
        assert part in said


@settings(deadline=None, max_examples=60)
@given(
    st.builds(
        Grid,
        pp=st.sampled_from([1, 2]),
        dp_replicate=st.sampled_from([1, 3, 64]),
        dp_shard=st.sampled_from([1, 2, 9]),
        cp=st.sampled_from([1, 2]),
        tp=st.sampled_from([1, 2, 8]),
    ),
    st.sampled_from([1, 4, 6, 8]),
)
def test_it_fits_80_columns_and_shows_every_rank_once_or_counts_it(grid: Grid, per_node: int) -> None:
    lines = picture(grid, per_node)
    everything = [*lines, *who_with_whom(grid, per_node), *group_table(grid, per_node)]
    assert max(map(len, everything)) <= 80
    shown: list[int] = []
    rows = 0
    for line in lines[lines.index("") + 2 : -1]:
        if left := re.fullmatch(r"\.\.\. \d+ rows more: ranks (\d+) to (\d+)", line):
            shown += range(int(left[1]), int(left[2]) + 1)
        elif not line.startswith("node"):
            shown += [int(rank) for rank in line.rpartition(":")[2].replace("|", " ").split()]
            rows += 1
    assert shown == list(range(grid.world)) and rows <= FIRST + LAST + 2


@given(
    st.builds(Grid, pp=st.sampled_from([1, 2]), cp=st.sampled_from([1, 2]), tp=st.sampled_from([1, 2, 4])),
    st.integers(1, 9),
)
def test_letters_are_groups(grid: Grid, per_node: int) -> None:
    for line in who_with_whom(grid, per_node)[2:-1]:
        axis, *letters = line.replace("|", " ").split()
        for rank, letter in enumerate(letters):
            same = tuple(other for other, its in enumerate(letters) if its == letter)
            assert same == grid.group_of(rank, axis)
