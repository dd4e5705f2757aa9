from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fourfold.lab.report import asked, build_report
from fourfold.lab.report_course import course
from fourfold.lab.report_page import loss_unit
from fourfold.lab.report_words import shown
from fourfold.record.finding import Finding, write_findings
from fourfold.record.lock import locked
from fourfold.record.run_dir import RunDir, claim
from fourfold.record.writer import JsonLines, write_json, write_request, write_text
from fourfold.spec.errors import DataError
from fourfold.spec.model import ImportSpec, MlpSpec
from fourfold.spec.spec import Spec
from tests.checkpoint.example import write_checkpoint
from tests.record.example_run import COVERAGE, EIGHT, EQUAL, GPU, example_spec, write_example_run

VOID = {"meta", "br", "hr", "img", "input", "link", "rect", "path", "use", "circle", "line"}
NASTY = "<script>alert('&\"')</script>"


class Page(HTMLParser):
    """Checks that elements nest, and keeps what a test asks about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == [], "elements left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def read(run: RunDir) -> tuple[Page, str, dict[str, object]]:
    html = build_report(run.path)
    assert html == run.report_html
    text = html.read_text(encoding="utf-8")
    return Page(text), text, json.loads(run.report_json.read_text())


def test_the_page_says_all_of_it(tmp_path: Path) -> None:
    page, _, report = read(write_example_run(tmp_path / "tiny-1"))
    words = re.sub(r"\s+", " ", page.text)
    for expected in (
        "tiny on 2 ranks", "✓ pass", "The run finished and 3 claims held; 1 left open.",
        "optimizer.lr", "0.003", "--set #1", "batch.accumulation", "arithmetic",
        COVERAGE.claim, EQUAL.measured, EIGHT.basis[1], GPU.would_test, EQUAL.command,
        "loss (nats per target token)", "optimizer step", "3.26 MiB", "activations: they depend on the kernels",
        "fourfold train tiny --nproc 2 --set optimizer.lr=3e-3", "15,360", "27 s", "from 2023-11-14 22:13:20 UTC",
        "training data", "9f2c0d7e",
    ):  # fmt: skip
        assert expected in words, expected
    assert (report["schema"], report["verdict"]) == ("fourfold.report/1", "pass")
    assert len(page.of("caption")) == len(page.of("table"))


def test_the_page_asks_nothing_of_a_network(tmp_path: Path) -> None:
    page, text, _ = read(write_example_run(tmp_path / "tiny-1"))
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            assert (attributes.get(name) or "#").startswith("#"), attributes
    assert re.findall(r"url\((?!#)", text) == []
    assert "@import" not in text
    assert re.findall(r"https?:", text) == []
    assert {"script", "link", "iframe", "img", "object"} & {tag for tag, _ in page.tags} == set()


def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    run = write_example_run(tmp_path / "tiny-1")
    _, first, _ = read(run)
    _, second, _ = read(run)
    assert first == second


def test_everything_is_escaped(tmp_path: Path) -> None:
    spec = example_spec(note=NASTY)
    finding = EQUAL.model_copy(
        update={"claim": NASTY, "measured": NASTY, "command": NASTY, "tolerance": NASTY}
    )
    run = write_example_run(tmp_path / "r", spec=spec, findings=[finding], failures=NASTY)
    write_json(run.env_json, {"cpu": NASTY, NASTY: "x"})
    plan = {"command": [NASTY], "world": 2, NASTY: 1, "not_predicted": [NASTY], "notes": [NASTY]}
    write_json(run.plan_json, plan)
    write_request(run, spec, {"note": NASTY}, "")
    page, text, report = read(run)
    assert page.of("script") == []
    assert "<script>" not in text
    assert page.text.count("alert(") >= 12
    assert report["note"] == NASTY


@pytest.mark.parametrize(
    ("steps", "ending", "findings", "failures", "verdict", "reason"),
    [
        (60, "finished", [EQUAL], "", "pass", "The run finished and 1 claim held."),
        (60, "finished", [], "", "open", "The run finished; nothing about it was checked."),
        (60, "finished", [GPU], "", "open", "The run finished; nothing about it was checked."),
        (7, None, [EQUAL], "", "open", "not finished"),
        (0, None, [], "", "open", "not finished"),
        (1, "stopped", [EQUAL], "", "open", "stopped by a signal after 1 step."),
        (7, None, [EQUAL], "rank 1 was killed", "fail", "failed after 7 steps"),
    ],
)
def test_the_verdict_of_a_run(
    tmp_path: Path,
    steps: int,
    ending: str | None,
    findings: list[Finding],
    failures: str,
    verdict: str,
    reason: str,
) -> None:
    run = write_example_run(tmp_path / "r", steps=steps, ending=ending, findings=findings, failures=failures)
    page, _, report = read(run)
    assert report["verdict"] == verdict
    assert reason in str(report["reason"])
    assert reason in page.text
    assert ("No step was recorded." in page.text) == (steps == 0)


def test_a_check_that_failed_fails_the_report(tmp_path: Path) -> None:
    run = write_example_run(tmp_path / "r")
    write_findings(run, "more", [EQUAL.model_copy(update={"verdict": "fail", "measured": "nan"})])
    page, _, report = read(run)
    assert (report["verdict"], report["reason"]) == ("fail", "1 of 5 claims did not hold.")
    assert "✕ fail" in page.text


def test_ranks_that_took_different_steps_fail_the_report(tmp_path: Path) -> None:
    run = write_example_run(tmp_path / "r")
    with JsonLines(run.events(1)) as file:
        file.write({"t": 0, "rank": 1, "step": 61, "kind": "step", "sample_ids": []})
    page, _, report = read(run)
    assert (report["verdict"], report["reason"]) == ("fail", "The ranks did not take the same steps.")
    assert "NOT the same on every rank; by rank: 60, 61" in page.text


def test_a_failed_run_shows_what_went_wrong_and_how_to_run_it_again(tmp_path: Path) -> None:
    run = write_example_run(
        tmp_path / "r", steps=4, ending=None, failures="# Failed\n\n    rank 1 failed at step 5\n\ndetails"
    )
    bundle = run.failures_dir / "step-000005-rank1"
    bundle.mkdir(parents=True)
    write_json(bundle / "bundle.json", {})
    page, _, report = read(run)
    assert "First to fail: rank 1 failed at step 5" in page.text
    assert "details" in page.text
    assert {"repeats": "the failing step", "command": f"fourfold replay {bundle}"} in report["commands"]


def test_the_course_of_a_run_that_was_killed_stopped_and_could_not_save(tmp_path: Path) -> None:
    run = write_example_run(tmp_path / "r", steps=4, ending=None)
    killed = {"rank": 1, "kind": "killed", "step": 5, "phase": "forward"}
    again = (
        "restart 1 of 1: rank 1 was killed by SIGKILL at step 5 (forward); goes on after step 2, from ckpt/2"
    )
    with JsonLines(run.attempts) as file:
        file.write({"t": 1.7e9, "attempt": 0, "kind": "start", "pids": [1, 2]})
        file.write({"t": 1.7e9 + 9, "attempt": 0, "kind": "end", "exit_code": 137, "failures": [killed]})
        file.write({"t": 1.7e9 + 9, "attempt": 0, "kind": "restart", "told": again})
        file.write({"t": 1.7e9 + 10, "attempt": 1, "kind": "start", "pids": [3, 4]})
        file.write(
            {
                "t": 1.7e9 + 40,
                "attempt": 1,
                "kind": "end",
                "exit_code": 75,
                "signal": "SIGTERM",
                "failures": [],
            }
        )
    for rank in (0, 1):
        with JsonLines(run.events(rank)) as file:
            base = {"rank": rank, "t": 1.7e9 + 13}
            file.write({**base, "step": 0, "kind": "joined", "attempt": 1, "pid": 3 + rank})
            file.write({**base, "step": 2, "kind": "start", "world": 2})
            file.write({**base, "step": 3, "kind": "step", "sample_ids": []})
            file.write(
                {**base, "step": 3, "kind": "not_saved", "error": "save step 3\n  found: no space left"}
            )
            file.write({**base, "step": 4, "kind": "step", "sample_ids": []})
            file.write({**base, "step": 4, "kind": "saved", "checkpoint": "step-00000004", "seconds": 2.0})
            file.write({**base, "step": 4, "kind": "end", "ending": "stopped"})
    run.log.write_text("passed over ckpt/step-00000003: manifest.json: not JSON\n")
    write_checkpoint(run.checkpoints, 4)
    page, _, report = read(run)
    words = re.sub(r"\s+", " ", page.text)
    for expected in (
        "The run was stopped by a signal after 4 steps.", "Course of the run", again,
        "steps 3-4; stopped by a signal: SIGTERM (took up the run 4 s after the end of the one before)",
        "4 s from the end of an attempt to the next one's first step; 2 steps done again",
        "1 checkpoint, the last of step 4, 2 s each (median)", "step 3: save step 3 found: no space left",
        "step-00000003: manifest.json: not JSON", "1 valid, the newest of step 4",
        "To go on with it: fourfold train tiny --nproc 2 --set optimizer.lr=3e-3",
    ):  # fmt: skip
        assert expected in words, expected
    assert [attempt["ending"] for attempt in report["history"]["attempts"]] == [
        "failed",
        "stopped by a signal",
    ]
    assert report["checkpoints"]["newest_valid"] == str(run.checkpoints / "step-00000004")
    assert str(report["go_on"]).endswith(f"--set run.dir={run.path} --resume auto")


def test_a_finished_run_and_one_at_work_have_nothing_to_go_on_with(tmp_path: Path) -> None:
    page, _, report = read(write_example_run(tmp_path / "r"))
    assert report["go_on"] == "" and "Course of the run" not in page.text
    run = write_example_run(tmp_path / "s", steps=7, ending=None)
    with locked(run):
        _, _, report = read(run)
    assert (report["go_on"], report["reason"]) == (
        "", "The run is not finished: it is still going, 7 of 60 steps done.",
    )  # fmt: skip
    assert (
        read(run)[2]["reason"]
        == "The run is not finished: it ended without leaving a word, 7 of 60 steps done."
    )


def test_many_attempts_are_cut_short() -> None:
    one = {
        "ranks": 2,
        "after_step": 0,
        "reached": 1,
        "ending": "failed",
        "why": "x",
        "then": "",
        "lost_s": 1.0,
    }
    report = {
        "history": {
            "attempts": [{**one, "number": number} for number in range(40)],
            "saved": [], "not_saved": [], "passed_over": [], "lost_s": 39.0, "steps_again": 39,
        },
        "checkpoints": {"checkpoints": [], "newest_valid": None, "valid": 0, "bytes": 0},
    }  # fmt: skip
    rows = course(report)
    assert [name for name, _ in rows[:4]] == ["attempt 0", "attempt 1", "…", "attempt 31"]
    assert rows[2][1] == "29 more attempts, in report.json" and rows[11][0] == "attempt 39"
    assert rows[0][1].startswith("step 1; failed: x")


def test_losses_that_are_not_finite_are_said_not_drawn(tmp_path: Path) -> None:
    run = write_example_run(tmp_path / "r", steps=5)
    with JsonLines(run.metrics) as file:
        file.write({"step": 6, "loss": float("nan")})
        file.write({"step": 7, "loss": float("inf")})
    page, text, _ = read(run)
    assert "not drawn, at 2 steps, first at step 6" in page.text
    assert "nan" not in text[text.index("<svg viewBox") : text.rindex("</svg>")]


def test_a_run_that_recorded_only_its_request_is_reported(tmp_path: Path) -> None:
    run = claim(tmp_path / "r")
    write_request(run, Spec(name="toy", model=MlpSpec(kind="mlp")), {}, "")
    page, _, report = read(run)
    assert report["title"] == "toy on n/a ranks"
    for words in ("Every setting was its default.", "No plan was recorded.", "No environment was recorded."):
        assert words in page.text


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    run = write_example_run(tmp_path / "r", steps=10, ending=None)
    write_text(run.metrics, "".join(json.dumps({"step": k, "loss": 1 / k}) + "\n" for k in range(1, 50_001)))
    page, text, _ = read(run)
    assert "the mean of 63 steps" in page.text
    assert len(text) < 100_000


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a folder without spec\.json"):
        build_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_settings_are_shown_with_where_they_came_from() -> None:
    rows = asked(example_spec(), {"optimizer.lr": "--set #1", "model.nothing": "x.toml:9"})
    assert rows[:2] == [
        {"key": "optimizer.lr", "value": 0.003, "from": "--set #1"},
        {"key": "model.nothing", "value": "n/a", "from": "x.toml:9"},
    ]
    settled = {row["key"]: row["value"] for row in rows[2:]}
    assert settled == {
        "batch.global_batch": 48, "batch.micro_batch": 2, "batch.accumulation": 12, "layout.dp_replicate": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("memory_bytes", 17_179_869_184, "16.00 GiB"),
        ("gradient_bytes_per_step", 1023, "1,023 bytes"),
        ("state_bytes", 2**60, "1,048,576.00 TiB"),
        ("state_bytes", 0, "0 bytes"),
        ("wall_s", 41.234, "41.2 s"),
        ("wall_s", 3725.0, "1 h 2 min"),
        ("wall_s", 119.9, "2 min 0 s"),
        ("parameters", 213_952, "213,952"),
        ("lr", 0.003, "0.003"),
        ("tied", True, "yes"),
        ("parameters", None, "n/a"),
        ("state_bytes", {"moments": 2048, "total": 4096}, "moments 2.00 KiB · total 4.00 KiB"),
        ("packages", {"torch": "2.13.0", "numpy": "2.4"}, "torch 2.13.0 · numpy 2.4"),
        ("betas", [0.9, 0.95], "[0.9, 0.95]"),
    ],
)
def test_values_in_words(key: str, value: object, words: str) -> None:
    assert shown(key, value) == words


def test_the_unit_of_the_loss() -> None:
    assert loss_unit(MlpSpec(kind="mlp")) == "mean squared error"
    assert loss_unit(MlpSpec(kind="mlp", task="classification")) == "nats per sample"
    assert loss_unit(ImportSpec(kind="import", target="a:b")) == "as the model defines it"


def test_a_report_is_built_without_torch_or_a_display(tmp_path: Path) -> None:
    run = write_example_run(tmp_path / "r")
    program = (
        "import sys; from fourfold.lab.report import build_report\n"
        "assert 'matplotlib' not in sys.modules and 'jinja2' not in sys.modules\n"
        "build_report(sys.argv[1])\n"
        "print([m for m in ('torch', 'matplotlib.pyplot') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, run.path], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
