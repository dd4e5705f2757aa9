"""The four parts of every error of the record: which file, what the system said, what is kept."""

from __future__ import annotations

import errno
from pathlib import Path

from fourfold.spec.errors import DataError, Problem

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


def is_full(error: BaseException | None) -> bool:
    """Whether it says that there is no room: on the disk, in a quota, under a limit of a file's size."""
    return isinstance(error, OSError) and error.errno in _FULL


def unwritable(
    path: Path, error: OSError, what: str, kept: str, elsewhere: str = "--set run.dir=ANOTHER/PLACE"
) -> DataError:
    """A file that cannot be written; `kept` says what of it is safe, `elsewhere` is the way to another place."""
    place = path.parent
    while place.name.startswith("."):  # a folder of a save, which is removed when it fails
        place = place.parent
    if is_full(error):
        instead = f"df -h {place}  (free some space there, or {elsewhere})"
    elif error.errno in _FORBIDDEN:
        instead = f"ls -ld {place}  (shows who may write there; or {elsewhere})"
    else:
        instead = elsewhere
    return DataError(
        Problem(
            asked=f"{what}: {path}",
            found=error.strerror or str(error),
            why=f"a run that cannot keep its record cannot prove anything; {kept}",
            instead=instead,
        )
    )


def unreadable(path: Path, found: str) -> DataError:
    """A file of the record that is missing or damaged."""
    return DataError(
        Problem(
            asked=f"read {path}",
            found=found,
            why="this part of the record is missing or damaged; the files beside it can still be read",
            instead=f"ls -l {path.parent}",
        )
    )
