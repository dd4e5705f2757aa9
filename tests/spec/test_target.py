from __future__ import annotations

import sys

from fourfold.spec.target import look_here_first, source_file


def test_a_module_of_the_working_directory_is_found_and_not_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "pack_of_mine").mkdir()
    (tmp_path / "pack_of_mine" / "model.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "alone_of_mine.py").write_text("raise RuntimeError('imported')\n")
    assert source_file("pack_of_mine.model:factory") == tmp_path / "pack_of_mine" / "model.py"
    assert source_file("alone_of_mine:factory") == tmp_path / "alone_of_mine.py"
    assert "alone_of_mine" not in sys.modules


def test_what_is_not_there_has_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert source_file("nowhere_at_all:factory") is None
    assert source_file("nowhere_at_all.sub:factory") is None
    assert source_file("sys:path") is None  # built in


def test_the_working_directory_is_put_in_front_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert look_here_first() == tmp_path
    look_here_first()
    assert sys.path[0] == str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1
