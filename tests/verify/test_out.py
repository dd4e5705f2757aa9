from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.spec.errors import CheckFailed, DataError, Problem, SpecError
from fourfold.verify.out import open_folder, open_room

REFUSED = SpecError(Problem("a request", "nothing", "it cannot be", "another"))


def paths(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused(out, written=()):
    """A check that is refused when it has made its folders, and `written` was made beside or in them."""
    with open_folder(Path(out) if out else None, "tiny") as folder, open_room(folder, "resume") as room:
        (room / "undisturbed" / "logs").mkdir(parents=True)
        for path in written:
            path.touch()
        raise REFUSED


@pytest.mark.parametrize("out", [None, "findings", "a/b/c"])
def test_a_refused_check_leaves_no_folder_that_was_made_for_it(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError):
        refused(out)
    assert paths(tmp_path) == []


@pytest.mark.parametrize("out", [None, "findings"])
def test_what_was_there_before_stays(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    before = Path(out or "runs")
    before.mkdir()
    for stands in ([], [before / "file"]):
        for path in stands:
            path.touch()
        with pytest.raises(SpecError):
            refused(out)
        assert paths(tmp_path) == sorted(map(str, [before, *stands]))


def test_what_another_has_written_there_meanwhile_stays(tmp_path):
    with pytest.raises(SpecError):
        refused(tmp_path / "a" / "b", [tmp_path / "a" / "other"])
    assert paths(tmp_path) == ["a", "a/other"]


def test_a_check_that_ends_keeps_its_findings_and_one_that_fails_its_runs(tmp_path):
    with open_folder(tmp_path / "out", "tiny") as folder, open_room(folder, "resume"):
        pass
    assert paths(tmp_path) == ["out", "out/resume-1"]
    broken = CheckFailed(Problem("a check", "broken off", "it failed", ""))
    with pytest.raises(CheckFailed), open_folder(tmp_path / "out", "tiny"), open_room(folder, "resume"):
        raise broken
    assert paths(tmp_path) == ["out", "out/resume-1", "out/resume-2"]


def test_a_folder_that_cannot_be_made_is_told_with_another_place(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError) as caught, open_folder(tmp_path / "file" / "out", "tiny"):
        pass
    assert caught.value.problems[0].instead == "--out ANOTHER/PLACE"
    assert paths(tmp_path) == ["file"]
