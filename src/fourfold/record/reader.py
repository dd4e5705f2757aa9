"""The one reader of a run directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fourfold.record.finding import Finding
from fourfold.record.problems import unreadable
from fourfold.record.run_dir import RunDir, nearest_run
from fourfold.spec.errors import DataError, Problem
from fourfold.spec.spec import Spec


def read_lines(path: Path | str) -> Iterator[dict[str, Any]]:
    """The lines of a JSON-lines file, one after another; a last line cut off by a death is left out.

    DataError for a file that cannot be read and for a broken line anywhere else.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    line = json.loads(raw)
                except ValueError as error:
                    if not raw.endswith(b"\n"):
                        return
                    raise unreadable(path, f"line {number} is not JSON: {error}") from error
                if not isinstance(line, dict):
                    raise unreadable(path, f"line {number} is {type(line).__name__}, not an object")
                yield line
    except DataError:
        raise
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error


def read_json(path: Path | str) -> dict[str, Any]:
    """One JSON document; DataError if it is missing, cut off, or not an object."""
    path = Path(path)
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error
    except ValueError as error:
        raise unreadable(path, f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise unreadable(path, f"{type(value).__name__}, not an object")
    return value


class RunReader:
    """What a run directory holds. Parts not written yet are empty; unreadable ones are a DataError."""

    def __init__(self, path: Path | str) -> None:
        """DataError, naming the nearest run directory, if `path` is none."""
        self.dir = RunDir(Path(path))
        if not self.dir.is_run:
            raise DataError(_no_run(self.dir.path))

    def spec(self) -> Spec:
        """What was asked, resolved."""
        path = self.dir.spec_json
        try:
            return Spec.model_validate_json(json.dumps(self._spec_document()["spec"]))
        except (KeyError, ValidationError) as error:
            raise unreadable(path, f"not a resolved Spec: {error}") from error

    def provenance(self) -> dict[str, str]:
        """Where each setting that is not a default came from, by dotted key."""
        return {str(key): str(where) for key, where in self._spec_document().get("provenance", {}).items()}

    def plan(self) -> dict[str, Any]:
        """What was predicted; empty if nothing was."""
        return _read_if_there(self.dir.plan_json)

    def env(self) -> dict[str, Any]:
        """The machine, the versions and the code; empty if not recorded."""
        return _read_if_there(self.dir.env_json)

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of `metrics.jsonl` in the order of writing."""
        return read_lines(self.dir.metrics) if self.dir.metrics.exists() else iter(())

    def ranks(self) -> tuple[int, ...]:
        """The ranks that left events, ascending."""
        names = (path.stem.removeprefix("rank") for path in self.dir.events_dir.glob("rank*.jsonl"))
        return tuple(sorted(int(name) for name in names if name.isdigit()))

    def events(self, rank: int) -> Iterator[dict[str, Any]]:
        """What one rank did, in the order of writing."""
        return read_lines(self.dir.events(rank))

    def findings(self) -> tuple[Finding, ...]:
        """The findings of all checks, in the order of the files' names."""
        found: list[Finding] = []
        for path in sorted(self.dir.findings.glob("*.json")):
            for entry in read_json(path).get("findings", []):
                try:
                    found.append(Finding.model_validate(entry))
                except ValidationError as error:
                    raise unreadable(path, f"not a Finding: {error}") from error
        return tuple(found)

    def failures(self) -> str:
        """What went wrong, for people; empty if nothing did."""
        path = self.dir.failures_md
        try:
            return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        except OSError as error:
            raise unreadable(path, error.strerror or str(error)) from error

    def _spec_document(self) -> Mapping[str, Any]:
        return read_json(self.dir.spec_json)


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _no_run(path: Path) -> Problem:
    if not os.path.exists(path):
        found = "nothing has that name"
    elif os.path.isdir(path):
        found = "a folder without spec.json"
    else:
        found = "a file, not a folder"
    near = nearest_run(path)
    return Problem(
        asked=f"the run directory {path}",
        found=found,
        why="every run directory holds the resolved request, spec.json",
        instead=str(near) if near else "fourfold train tiny --nproc 2  (makes one under runs/)",
    )
