"""The manifest: JSON both ways, and a seal that every change breaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from fourfold.checkpoint.manifest import MANIFEST, SCHEMA, SEAL, Manifest, seal
from fourfold.checkpoint.validate import read_manifest
from fourfold.spec.errors import DataError
from tests.checkpoint.example import flip, forge, write_checkpoint


def test_it_comes_back_from_json(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    manifest = read_manifest(folder)
    assert manifest.step == 10 and manifest.position == 160
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest
    assert Manifest.model_validate(manifest.model_dump()) == manifest
    assert manifest.total_bytes == sum(
        path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST
    )


def test_its_json_begins_with_its_schema_and_ends_with_its_seal(tmp_path: Path) -> None:
    body = json.loads((write_checkpoint(tmp_path) / MANIFEST).read_text())
    assert next(iter(body.items())) == ("schema", SCHEMA)
    assert list(body)[-1] == SEAL
    assert body.pop(SEAL) == seal(body)


def test_a_changed_value_breaks_the_seal(tmp_path: Path) -> None:
    body = json.loads((write_checkpoint(tmp_path) / MANIFEST).read_text())
    with pytest.raises(ValidationError, match="seal is broken"):
        Manifest.model_validate({**body, "position": 161})


def test_no_flipped_bit_changes_what_it_says(tmp_path: Path) -> None:
    """Each flip is found, or is one that says the same ("1e9" as "1E9")."""
    folder = write_checkpoint(tmp_path)
    path, whole, found = folder / MANIFEST, read_manifest(folder), 0
    bits = range(0, path.stat().st_size * 8, 7)
    for bit in bits:
        flip(path, bit)
        try:
            assert read_manifest(folder) == whole
        except DataError:
            found += 1
        flip(path, bit)
    assert found >= 0.99 * len(bits)


@pytest.mark.parametrize("at", [0, 1, 2, 100, -2, -1])
def test_a_cut_manifest(tmp_path: Path, at: int) -> None:
    folder = write_checkpoint(tmp_path)
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes()[:at])
    with pytest.raises(DataError, match="not JSON"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "list, not an object"),
        ("{}", "schema None"),
        ('{"schema": "other/1"}', "schema 'other/1'"),
        ('{"schema": "fourfold.checkpoint/1"}', "no seal"),
        ("[" * 100_000, "not JSON"),
        ('{"step": ' + "9" * 5000 + "}", "not JSON"),
        ('{"schema": "fourfold.checkpoint/1", "created": NaN, "seal": "0"}', "not JSON compliant"),
    ],
)
def test_other_json(tmp_path: Path, text: str, says: str) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / MANIFEST).write_text(text)
    with pytest.raises(DataError, match=says):
        read_manifest(folder)


def test_a_newer_version_is_named_as_such(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    forge(folder, lambda body: body.update({"schema": "fourfold.checkpoint/2", "more": 1}))
    with pytest.raises(DataError) as error:
        read_manifest(folder)
    said = str(error.value)
    assert "format version 2" in said and "a newer Fourfold wrote this" in said
    assert "pip install --upgrade fourfold" in said


def test_all_wrong_fields_at_once(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    forge(folder, lambda body: body.update({"step": -1, "world": "two", "surplus": 1}))
    with pytest.raises(DataError) as error:
        read_manifest(folder)
    assert len(error.value.problems) == 3
    assert all(part in str(error.value) for part in ("step: ", "world: ", "surplus: "))


@pytest.mark.parametrize(
    ("field", "value"), [("world", 0), ("world", -3), ("created", 1e300), ("created", -1e18)]
)
def test_a_number_that_is_none_of_its_kind(tmp_path: Path, field: str, value: float) -> None:
    folder = write_checkpoint(tmp_path)
    forge(folder, lambda body: body.update({field: value}))
    with pytest.raises(DataError, match=f"{field}: Input should be"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "name", ["../step-9/rank00000.safetensors", "/etc/passwd", "a\0b", ".x", MANIFEST, ""]
)
def test_a_file_that_is_not_beside_it(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path)
    forge(folder, lambda body: body["files"].update({name: {"bytes": 1, "xxh3_128": "0" * 32}}))
    with pytest.raises(DataError, match="no name of a file beside it"):
        read_manifest(folder)


def test_state_must_be_among_its_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    forge(folder, lambda body: body["files"].pop("state.json"))
    with pytest.raises(DataError, match=r"no state\.json"):
        read_manifest(folder)


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not there"):
        read_manifest(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        read_manifest(tmp_path / "nowhere")
