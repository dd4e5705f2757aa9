"""The machine, the versions and the code of a run: what somebody else needs to repeat it."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import fourfold

_PACKAGES = (
    "torch", "numpy", "pydantic", "cyclopts", "rich", "safetensors", "xxhash", "jinja2", "matplotlib",
    "transformers", "datasets", "tokenizers", "accelerate", "deepspeed",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Python, platform, processor, memory, package versions, git state of the working folder, code hash."""
    return {
        "fourfold": fourfold.__version__,
        "source_hash": source_hash(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": cores(),
        "memory_bytes": _memory_bytes(),
        "packages": _versions(),
        "git": _git(Path.cwd()),
    }


def source_hash(package: Path | None = None) -> str:
    """xxh3-128, in hex, of every source file of the fourfold package: names and contents, in sorted order."""
    import xxhash

    root = package or Path(fourfold.__file__).parent
    digest = xxhash.xxh3_128()
    for path in sorted(root.rglob("*"), key=lambda path: path.relative_to(root).as_posix()):
        if path.is_file() and "__pycache__" not in path.parts:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "n/a"


def cores() -> int:
    """Cores this process may use (a container or taskset may allow fewer than the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int | str:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "n/a"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit, whether tracked files are changed, and how many files git does not know; None outside git."""
    commit = _ask_git(folder, "rev-parse", "HEAD")
    status = _ask_git(folder, "status", "--porcelain")
    if commit is None or status is None:
        return None
    lines = status.splitlines()
    untracked = sum(line.startswith("??") for line in lines)
    return {"commit": commit.strip(), "dirty": len(lines) > untracked, "untracked_files": untracked}


def _ask_git(folder: Path, *question: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *question],
            capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None
