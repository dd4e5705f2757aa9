from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.record.finding import Finding, write_findings
from fourfold.record.reader import RunReader, read_json, read_lines
from fourfold.record.run_dir import RunDir, claim
from fourfold.record.writer import JsonLines, dumps, write_json, write_request
from fourfold.spec.errors import DataError
from fourfold.spec.model import MlpSpec
from fourfold.spec.spec import Spec

SPEC = Spec(name="toy", model=MlpSpec(kind="mlp"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = claim(tmp_path / "runs" / "toy-1")
    write_request(made, SPEC, {}, "")
    return made


@given(
    st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text() | st.floats()), max_size=5),
    st.integers(min_value=0),
)
def test_any_cut_leaves_the_whole_lines_before_it(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, object]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "m.jsonl"
    whole = [(dumps(line) + "\n").encode() for line in lines]
    data = b"".join(whole)
    cut = cut % (len(data) + 1)
    path.write_bytes(data[:cut])
    read = list(read_lines(path))
    ends = [sum(map(len, whole[: n + 1])) for n in range(len(whole))]
    # A line that lost nothing but its newline still counts.
    assert read == [json.loads(line) for line, end in zip(whole, ends, strict=True) if cut >= end - 1]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    lines = read_lines(path)
    assert next(lines) == {"step": 1}
    with pytest.raises(DataError, match=r"m\.jsonl\n  found: line 2 is not JSON"):
        next(lines)


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text("[1]\n")
    with pytest.raises(DataError, match="line 1 is list"):
        list(read_lines(tmp_path / "m.jsonl"))


@pytest.mark.parametrize("content", [None, "", "{", "[]", "\xff"])
def test_a_document_that_cannot_be_read_is_a_data_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=r"plan\.json"):
        read_json(path)


def test_everything_written_comes_back(run: RunDir) -> None:
    finding = Finding(
        claim="c", kind="inference", expected="0", measured="0", verdict="pass", basis=("a", "b")
    )
    write_json(run.plan_json, {"world": 2})
    write_json(run.env_json, {"python": "3.11"})
    write_findings(run, "equal", [finding])
    for rank in (0, 10, 2):
        with JsonLines(run.events(rank)) as file:
            file.write({"rank": rank, "kind": "start"})
    run.failures_md.write_text("rank 1 died")
    reader = RunReader(run.path)
    assert reader.spec() == SPEC
    assert reader.plan() == {"world": 2}
    assert reader.env() == {"python": "3.11"}
    assert reader.findings() == (finding,)
    assert reader.ranks() == (0, 2, 10)
    assert [line["rank"] for line in reader.events(10)] == [10]
    assert reader.failures() == "rank 1 died"


def test_parts_not_written_yet_are_empty(run: RunDir) -> None:
    reader = RunReader(run.path)
    assert (reader.plan(), reader.env(), reader.findings(), reader.ranks()) == ({}, {}, (), ())
    assert (list(reader.metrics()), reader.failures(), reader.provenance()) == ([], "", {})
    with pytest.raises(DataError, match=r"rank0\.jsonl"):
        list(reader.events(0))


def test_a_folder_that_is_no_run_names_the_nearest(run: RunDir) -> None:
    with pytest.raises(DataError) as caught:
        RunReader(run.path.parent / "toy-11")
    (problem,) = caught.value.problems
    assert problem.found == "nothing has that name"
    assert problem.instead == str(run.path)
    with pytest.raises(DataError, match=r"a folder without spec\.json"):
        RunReader(run.path.parent)
    with pytest.raises(DataError, match="a file, not a folder"):
        RunReader(run.spec_json)


@pytest.mark.parametrize("damage", ["{}", '{"spec": {"model": 5}}', '{"spec": {}}'])
def test_a_damaged_spec_is_a_data_error(run: RunDir, damage: str) -> None:
    run.spec_json.write_text(damage)
    with pytest.raises(DataError, match="not a resolved Spec"):
        RunReader(run.path).spec()


def test_a_damaged_finding_is_a_data_error(run: RunDir) -> None:
    write_json(run.findings / "x.json", {"findings": [{"claim": "c", "kind": "rumour"}]})
    with pytest.raises(DataError, match=r"x\.json\n  found: not a Finding"):
        RunReader(run.path).findings()
