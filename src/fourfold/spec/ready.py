"""The Specs that come with Fourfold: small ones to train at once, published shapes to plan with."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path

from fourfold.spec.errors import DataError, Problem, SpecError

_FOLDER = Path(__file__).parent / "ready"


@cache
def ready_names() -> tuple[str, ...]:
    """Names of all ready Specs, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def ready_text(name: str) -> str:
    """The TOML text of a ready Spec. Raises SpecError (with the nearest name) if there is none."""
    if name not in ready_names():
        raise SpecError(unknown_ready(name))
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def copy_ready(name: str, to: str | Path | None = None) -> Path:
    """Write a ready Spec to `to` (a file or a folder; default: NAME.toml here) and return the file.

    Raises SpecError if there is no such Spec or the file exists already, DataError if it cannot be written.
    """
    text = ready_text(name)
    target = Path(to) if to is not None else Path(f"{name}.toml")
    if target.is_dir():
        target = target / f"{name}.toml"
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        free = next(path for n in range(2, 10_000) if not (path := _numbered(target, n)).exists())
        raise SpecError(
            Problem(
                asked=f"copy {name} to {target}",
                found=f"{target} exists",
                why="a Spec that someone wrote is never overwritten",
                instead=f"fourfold spec copy {name} {free}",
            )
        ) from None
    except OSError as error:
        raise DataError(_unwritable(name, target, error)) from error
    return target


def unknown_ready(name: str) -> Problem:
    """No ready Spec of this name: the nearest, or all."""
    near = difflib.get_close_matches(name, ready_names(), n=1, cutoff=0.5)
    return Problem(
        asked=f"the Spec {name!r}",
        found="no ready Spec of that name, and no file",
        why=f"the ready Specs are {', '.join(ready_names())}",
        instead=near[0] if near else "one of them, or the path of a TOML file",
    )


def _unwritable(name: str, target: Path, error: OSError) -> Problem:
    if target.parent.exists():
        instead = f"fourfold spec copy {name} A_FOLDER_YOU_MAY_WRITE_TO"
    else:
        instead = f"mkdir -p {target.parent} && fourfold spec copy {name} {target}"
    return Problem(
        asked=f"copy {name} to {target}",
        found=(error.strerror or str(error)).lower(),
        why="the file cannot be written there",
        instead=instead,
    )


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number}{path.suffix}")
