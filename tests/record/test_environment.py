from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.record.environment import environment, source_hash


def make_package(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_the_environment_is_json_and_says_what_a_repeat_needs() -> None:
    env = environment()
    assert json.loads(json.dumps(env)) == env
    assert env["python"] == ".".join(map(str, sys.version_info[:3]))
    assert env["packages"]["torch"].startswith("2.13")
    assert 1 <= env["cores"] <= (os.cpu_count() or 1)
    assert env["memory_bytes"] > 2**27
    assert env["source_hash"] == source_hash()


def test_the_environment_is_found_without_torch() -> None:
    program = (
        "import sys; from fourfold.record.environment import environment; environment();"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_source_hash_sees_content_and_names_only(tmp_path: Path) -> None:
    base = make_package(tmp_path / "a", {"x.py": "1", "sub/y.py": "2"})
    same = make_package(tmp_path / "b", {"sub/y.py": "2", "x.py": "1", "__pycache__/x.pyc": "junk"})
    assert source_hash(base) == source_hash(same)
    for n, other in enumerate(
        ({"x.py": "1", "sub/z.py": "2"}, {"x.py": "21", "sub/y.py": ""}, {"x.py": "1"})
    ):
        assert source_hash(make_package(tmp_path / f"other{n}", other)) != source_hash(base)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_git_state_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment()["git"] is None

    def git(*words: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", *who, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "--quiet")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "--quiet", "-m", "m")
    clean = {"commit": git("rev-parse", "HEAD"), "dirty": False, "untracked_files": 0}
    assert environment()["git"] == clean
    (tmp_path / "new").write_text("")
    assert environment()["git"] == {**clean, "untracked_files": 1}
    (tmp_path / "f").write_text("2")
    assert environment()["git"] == {**clean, "dirty": True, "untracked_files": 1}


def test_without_git_the_state_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert environment()["git"] is None
