from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from fourfold.record.run_dir import (
    RunDir,
    claim,
    claim_filled,
    claim_next,
    give_back,
    nearest_run,
    next_free,
)
from fourfold.spec.errors import DataError, SpecError


def make_run(path: Path, when: int = 0) -> Path:
    path.mkdir(parents=True)
    (path / "spec.json").write_text("{}")
    os.utime(path, (when, when))
    return path


def test_a_name_is_claimed_with_its_parents(tmp_path: Path) -> None:
    run = claim(tmp_path / "a" / "b")
    assert run.path.is_dir()
    assert not run.is_run


def test_a_used_name_is_refused_with_the_next_free_one(tmp_path: Path) -> None:
    for name in ("tiny", "tiny-1", "tiny-7"):
        claim(tmp_path / name)
    for name in ("tiny", "tiny-7"):
        with pytest.raises(SpecError) as caught:
            claim(tmp_path / name)
        assert caught.value.problems[0].instead == f"--set run.dir={tmp_path / 'tiny-8'}"


def test_going_on_is_proposed_only_where_there_is_a_run_and_to_whom_it_is_open(tmp_path: Path) -> None:
    def instead(name: str, resumes: bool) -> str:
        with pytest.raises(SpecError) as caught:
            claim_filled(tmp_path / name, lambda _: None, resumes)
        return caught.value.problems[0].instead

    claim(tmp_path / "no run").path.joinpath("file").touch()
    make_run(tmp_path / "a run")
    free = "--set 'run.dir=" + str(tmp_path / "a run-1") + "'"
    assert instead("a run", resumes=True) == f"{free}, or --resume auto to go on with it"
    assert instead("a run", resumes=False) == free
    assert "resume" not in instead("no run", resumes=True)


def test_what_is_given_back_is_as_it_was(tmp_path: Path) -> None:
    def fill(run: RunDir) -> None:
        run.spec_json.write_text("{}")

    (tmp_path / "empty").mkdir()
    for name, left in (("new", []), ("empty", ["empty"]), ("new", ["empty"])):
        run = claim_filled(tmp_path / name, fill)
        (run.path / "logs").mkdir()
        give_back(run)
        assert [path.name for path in tmp_path.iterdir()] == (left or ["empty"])
    assert list((tmp_path / "empty").iterdir()) == []
    give_back(run)  # gone already


def test_folders_made_around_what_is_given_back_go_too_unless_they_are_used(tmp_path: Path) -> None:
    give_back(claim_filled(tmp_path / "a" / "b" / "new", lambda _: None))
    assert list(tmp_path.iterdir()) == []
    run = claim_filled(tmp_path / "a" / "b" / "new", lambda _: None)
    claim(tmp_path / "a" / "other")
    give_back(run)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["other"]


def test_a_filled_directory_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    seen = []

    def fill(run: RunDir) -> None:
        seen.append(run.path.name)
        run.spec_json.write_text("{}")

    assert claim_filled(tmp_path / "tiny", fill).is_run
    assert seen[0].startswith(".tiny-")
    with pytest.raises(SpecError, match="used already"):
        claim_filled(tmp_path / "tiny", fill)
    (tmp_path / "empty").mkdir()
    assert claim_filled(tmp_path / "empty", fill).is_run
    assert claim_next(tmp_path, "tiny", fill).path == tmp_path / "tiny-1"

    def broken(_: RunDir) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        claim_filled(tmp_path / "other", broken)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "tiny", "tiny-1"]


def test_of_two_that_fill_the_same_name_one_succeeds(tmp_path: Path) -> None:
    both, ends = threading.Barrier(2), []

    def fill(run: RunDir) -> None:
        both.wait(10)
        (run.path / "whose").write_text(run.path.name)

    def claimed() -> None:
        try:
            ends.append(claim_filled(tmp_path / "tiny", fill))
        except SpecError:
            ends.append(None)

    threads = [threading.Thread(target=claimed) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(end is None for end in ends) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_used_name_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_text("a file of the user's")
    with pytest.raises(SpecError):
        claim(tmp_path / "tiny")
    assert (tmp_path / "tiny").read_text() == "a file of the user's"


def test_a_parent_that_is_a_file_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    for path in (tmp_path / "runs" / "a", tmp_path / "runs" / "a" / "b"):
        with pytest.raises(DataError, match="nothing was written"):
            claim(path)


def test_the_next_free_number_is_above_every_used_one(tmp_path: Path) -> None:
    assert next_free(tmp_path / "none yet", "t") == tmp_path / "none yet" / "t-1"
    for name in ("t-1", "t-12", "t-x", "other-40", "t-3-99"):
        (tmp_path / name).mkdir()
    assert next_free(tmp_path, "t") == tmp_path / "t-13"


def test_many_that_claim_at_once_get_different_names(tmp_path: Path) -> None:
    got: list[Path] = []
    start = threading.Barrier(8)

    def one() -> None:
        start.wait()
        got.extend(claim_next(tmp_path, "t").path for _ in range(5))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(path.name[2:]) for path in got) == list(range(1, 41))


def test_claiming_the_next_where_nothing_can_be_made_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(DataError):
        claim_next(tmp_path / "runs", "t")


def test_the_nearest_run_is_around_inside_or_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert nearest_run(tmp_path / "nowhere") is None
    old = make_run(tmp_path / "runs" / "tiny-1", when=1_000)
    new = make_run(tmp_path / "runs" / "small-1", when=2_000)
    assert nearest_run(old / "events" / "rank0.jsonl") == old
    assert nearest_run(tmp_path / "runs") == new
    assert nearest_run(tmp_path) == new
    assert nearest_run(tmp_path / "runs" / "tiny-2") == old
    assert nearest_run(tmp_path / "elsewhere" / "x") == Path("runs/small-1")


def test_every_file_lies_in_the_directory() -> None:
    run = RunDir(Path("r"))
    names = {
        run.spec_toml, run.spec_json, run.plan_json, run.env_json, run.metrics, run.events(3), run.findings,
        run.failures_md, run.failures_dir, run.attempts, run.report_html, run.report_json, run.log,
    }  # fmt: skip
    assert len(names) == 13
    assert all(name.is_relative_to(run.path) for name in names)
    assert run.events(3) == Path("r/events/rank3.jsonl")
