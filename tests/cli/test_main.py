"""The command: verbs found, errors told in words, exit codes, and nothing heavy imported for a page of help."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from cyclopts import App

from fourfold import __version__
from fourfold.cli import main as command
from fourfold.cli.main import VERBS, Verb, build_app, main
from fourfold.cli.output import next_command, paint, print_document, story, table
from fourfold.spec.errors import (
    CheckFailed,
    DataError,
    FourfoldError,
    NoLayoutFits,
    Problem,
    RankFailed,
    SpecError,
)

PROBLEM = Problem("this", "that", "so", "the other")


def fake_verb(monkeypatch: pytest.MonkeyPatch, function: object) -> None:
    """`fourfold fake` calls `function`."""
    monkeypatch.setattr(command, "fake", function, raising=False)
    monkeypatch.setattr(command, "VERBS", {**VERBS, "fake": Verb("fourfold.cli.main:fake", "For this test.")})


def fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_begins_with_three_examples_and_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    head, examples, *_ = out.split("\n\n")
    assert head == "Examples:"
    assert len(examples.splitlines()) == 3
    assert all(re.search(rf"^│ {name} +\w", out, re.MULTILINE) for name in VERBS)
    assert max(map(len, out.splitlines())) <= 80


def test_no_verb_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("Examples:")


def test_help_of_a_verb_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spec", "show", "--help"]) == 0
    out = capsys.readouterr().out
    assert "Print a Spec with every setting resolved" in out
    assert "    fourfold spec show my.toml --json\n" in out
    assert "--no-json" not in out
    assert main(["spec", "--help"]) == 0
    assert "    fourfold spec copy small my.toml\n" in capsys.readouterr().out


def test_every_verb_can_be_found() -> None:
    """The targets exist, and are what the top of `cli/main.py` says."""
    app = build_app("train")
    for name, verb in VERBS.items():
        target = verb.target.rpartition(":")[2]
        assert target in ("app", name)
        assert isinstance(app[name], App)


EVERY_VERB = [
    (name, *words)
    for name in VERBS
    for words in ((), *((sub,) for sub in build_app(name)[name] if not sub.startswith("-")))
]


@pytest.mark.parametrize("words", EVERY_VERB, ids=" ".join)
def test_help_of_every_verb_begins_with_three_examples(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--help"]) == 0
    head, examples, usage, *_ = capsys.readouterr().out.split("\n\n")
    assert head == "Examples:"
    lines = examples.splitlines()
    assert len(lines) == 3
    assert all(re.match(r"    (?:fourfold|torchrun) \S", line) for line in lines)
    assert usage.startswith(f"Usage: fourfold {' '.join(words)} ")


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("words", EVERY_VERB, ids=" ".join)
def test_help_is_broken_only_where_a_line_is_full(
    words: tuple[str, ...], width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for app in (build_app(words[0])[name] for name in VERBS if name in words):
        monkeypatch.setattr(app, "_fallback_console", None)  # made by an earlier test, with its width
        for sub in words[1:]:
            monkeypatch.setattr(app[sub], "_fallback_console", None)
    assert main([*words, "--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    lines = out.partition("Usage: ")[2].splitlines()
    for line, then in pairwise(lines):
        panel = then.startswith("│      ")  # a further line of an entry
        if panel or (line and then and "│" not in line + then and "─" not in line + then):
            room = width - 2 if panel else width
            word = then.strip("│ ").split()[0]
            assert len(line.rstrip("│ ")) + 1 + len(word) > room, (line, then)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fourfold {__version__}\n"


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("trian tiny", "fourfold train --help"),
        ("config", "fourfold spec --help"),
        ("tiny", "fourfold train tiny, or fourfold spec show tiny"),
        ("my.toml", "fourfold train my.toml, or fourfold spec show my.toml"),
        ("xyzzy", "fourfold --help"),
        ("--nproc 2 train tiny", "fourfold train --nproc 2 tiny"),
        ("--wrold", "fourfold --help"),
        ("spec shw tiny", "show; see: fourfold spec --help"),
        ("spec show", "fourfold spec show --help"),
        ("spec list extra", "fourfold spec list --help"),
        ("spec show tiny --wrold 4", "--world; see: fourfold spec show --help"),
        ("spec show tiny --world four", "fourfold spec show --help"),
        ("spec show tiny --set run.steps 5", "--set run.steps=5; see: fourfold spec show --help"),
        ("spec show tiny -- --debug", "fourfold spec show --help"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], line: str, instead: str) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: fourfold {line}\n")
    assert f"  type:  {instead}\n" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FourfoldError(PROBLEM), 1),
        (SpecError(PROBLEM), 2),
        (CheckFailed(PROBLEM), 3),
        (NoLayoutFits(PROBLEM), 4),
        (DataError(PROBLEM), 5),
        (RankFailed(PROBLEM, rank=3, exit_code=137), 137),
        (KeyboardInterrupt(), 130),
        (ValueError("oops\nmore"), 1),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def fake() -> None:
        raise error

    fake_verb(monkeypatch, fake)
    assert main(["fake"]) == code
    plain = capsys.readouterr().err
    assert "Traceback" not in plain
    assert main(["fake", "--debug"]) == code
    assert "Traceback" in capsys.readouterr().err
    if isinstance(error, FourfoldError):
        assert plain == f"error: {PROBLEM}\n\n"
    elif isinstance(error, ValueError):
        assert re.fullmatch(
            r"this is a bug of ours: ValueError: oops at fourfold/cli/main\.py:\d+ \(--debug .*\)\n", plain
        )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError([PROBLEM, PROBLEM]), 2),
        (CheckFailed(PROBLEM), 3),
        (DataError(PROBLEM), 5),
        (RankFailed(PROBLEM, rank=3, exit_code=137), 137),
        (KeyboardInterrupt(), 130),
        (ValueError("oops"), 1),
    ],
)
def test_with_json_an_error_is_a_document_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def fake(*, json: bool = False) -> None:  # noqa: ARG001
        raise error

    fake_verb(monkeypatch, fake)
    assert main(["fake"]) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert main(["fake", "--json"]) == code
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["schema"] == "fourfold.error/1" and document["command"] == "fourfold fake --json"
    assert (document["verdict"], document["findings"], document["exit_code"]) == ("fail", [], code)
    if isinstance(error, FourfoldError):
        assert document["problems"] == [dataclasses.asdict(problem) for problem in error.problems]
        assert err == told.err
    else:
        assert [problem["asked"] for problem in document["problems"]] == ["fourfold fake --json"]


@pytest.mark.parametrize(
    "line",
    [
        "layout list tini --world 2 --json",
        "layout list tiny --json",
        "verify equal tiny --world 2 --wrold 3 --json=true",
        "train tiny --json --nproc two",
        "lab nothing --json",
        "nothing --json",
        "--json train tiny",
        "ckpt validate nowhere --json",
        "replay nowhere --json",
        "report nowhere --json",
    ],
)
def test_what_is_refused_is_one_document(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(line.split())
    assert code in (2, 5)
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["schema"] == "fourfold.error/1" and document["exit_code"] == code
    assert [problem["found"] in err for problem in document["problems"]] == [True]


def test_only_the_verb_itself_is_asked_for_a_document_and_of_ranks_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["spec", "show", "--json=false"]) == 2
    assert main(["spec", "show", "tiny", "--", "--json"]) == 2
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert main(["train", "tini", "--json"]) == 2
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "tini", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_a_full_disk_behind_stdout_is_told() -> None:
    command = [sys.executable, "-m", "fourfold", "spec", "list"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=buffered
        )
    assert ended.returncode == 5
    assert "error: stdout\n  found: No space left on device\n" in ended.stderr


def test_several_problems_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake() -> None:
        raise SpecError([PROBLEM, PROBLEM])

    fake_verb(monkeypatch, fake)
    main(["fake"])
    assert capsys.readouterr().err.endswith("2 problems\n")


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (3, 3), ("text", 0)])
def test_what_a_verb_returns(monkeypatch: pytest.MonkeyPatch, returned: object, code: int) -> None:
    def fake() -> object:
        return returned

    fake_verb(monkeypatch, fake)
    assert main(["fake"]) == code


def test_repeated_settings_and_debug_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr("fourfold.cli.spec.load_spec", lambda _, sets, __: seen.append(sets) or 1 / 0)
    assert main(["--debug", "spec", "show", "tiny", "--set", "a=1", "--debug", "--set=b=2"]) == 1
    assert seen == [("a=1", "b=2")]


def test_help_and_spec_show_import_nothing_heavy() -> None:
    script = (
        "import sys; from fourfold.cli.main import main\n"
        "assert main(['--help']) == 0 and main(['spec', 'show', 'tiny', '--world', '2']) == 0\n"
        "heavy = [name for name in ('torch', 'numpy', 'matplotlib', 'jinja2') if name in sys.modules]\n"
        "raise SystemExit(', '.join(heavy) or 0)"
    )
    ended = fresh("-c", script)
    assert ended.returncode == 0, ended.stderr


def test_as_a_module_and_a_reader_that_goes_away() -> None:
    assert fresh("-m", "fourfold", "--version").stdout == f"fourfold {__version__}\n"
    reader = "import subprocess, sys\n" + (
        "child = subprocess.Popen([sys.executable, '-m', 'fourfold', 'spec', 'schema'],"
        " stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "child.stdout.close(); error = child.stderr.read(); child.stderr.close(); child.wait()\n"
        "assert (child.returncode, error) == (141, b''), (child.returncode, error)"
    )
    ended = fresh("-c", reader)
    assert ended.returncode == 0, ended.stderr


def test_a_document_names_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    print_document({"schema": "fourfold.test/1", "value": float("nan")})
    assert '"value": "nan"' in capsys.readouterr().out
    with pytest.raises(AssertionError):
        print_document({"value": 1})


def test_the_story_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    story("once")
    next_command("fourfold a", "fourfold b")
    assert capsys.readouterr() == ("", "once\nnext: fourfold a\n  or: fourfold b\n")


def test_a_next_command_can_be_pasted_where_fourfold_is_not_on_the_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def told() -> str:
        next_command("fourfold report runs/a", "python -m webbrowser x", "torchrun -m fourfold train tiny")
        return capsys.readouterr().err

    plain = (
        "next: fourfold report runs/a\n  or: python -m webbrowser x\n  or: torchrun -m fourfold train tiny\n"
    )
    here, other = tmp_path / "a venv/bin", tmp_path / "other"
    for folder in (here, other):
        folder.mkdir(parents=True)
        for name in ("fourfold", "python"):
            (folder / name).write_text("#!/bin/sh\n")
            (folder / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert told() == plain, "called as a module, or from another program"
    monkeypatch.setattr(sys, "argv", ["a venv/bin/fourfold", "report"])
    changed = (
        "next: 'a venv/bin/fourfold' report runs/a\n  or: 'a venv/bin/python' -m webbrowser x\n"
        "  or: torchrun -m fourfold train tiny\n"
    )
    assert told() == changed
    monkeypatch.setenv("PATH", str(other))
    assert told() == changed, "another one is on the path"
    monkeypatch.setenv("PATH", str(here))
    assert told() == plain


def test_tables_fit() -> None:
    rows = [("a", "1", "word " * 30), ("longer", "22", "")]
    text = table(("name", "n", "what"), rows)
    assert text.splitlines()[0] == "name    n   what"
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("word") == 30
    assert table(("name",), []) == "name"


def test_colour_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    terminal: object = Terminal()
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert paint("x", "red", terminal) == "\x1b[31mx\x1b[0m"  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("x", "red", terminal) == "x"  # type: ignore[arg-type]
    monkeypatch.delenv("NO_COLOR")
    with (tmp_path / "file").open("w") as file:
        assert paint("x", "red", file) == "x"


@pytest.mark.parametrize(
    "line",
    [
        "train tiny --nproc 1.5",
        "train tiny --max-restarts 1.5",
        "verify coverage tiny --world 2 --epochs=1.5",
        "verify coverage tiny --world 2 --max-steps 1.5",
        "verify equal tiny --world 2.5",
        "verify resume tiny --world 2.5",
        "ckpt prune nowhere --keep-last 1.5",
        "ckpt prune nowhere --keep-last 1 --keep-every 1.5",
        "layout show tiny --world 1.5",
        "spec show tiny --world 1.5",
        "lab demo --nproc 1.5",
    ],
)
def test_no_integer_takes_a_fraction(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    told = capsys.readouterr().err
    assert re.search(r'Invalid value for --[a-z-]+: ".\.5" is not a whole number', told)
    assert told.count("\n") >= 4 and "--help" in told
