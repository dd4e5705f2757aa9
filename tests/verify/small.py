"""A Spec that is small, and awkward where it matters: dropout, tied weights, biases, documents, grouped heads."""

from __future__ import annotations

from pathlib import Path

SPEC = """
[model]
kind = "decoder"
layers = 2
width = 32
heads = 2
kv_heads = 1
tied = true
biases = true
dropout = 0.1

[data]
kind = "text"
path = "{text}"
sequence = 64

[batch]
global_batch = 8
micro_batch = 2

[optimizer]
warmup_steps = 4

[run]
steps = 20
"""


def write_small(folder: Path) -> Path:
    """The Spec as a file in `folder`, beside its text: 60 documents of unequal length, 150 training samples or so."""
    text = folder / "text"
    text.mkdir(parents=True, exist_ok=True)
    for number in range(60):
        words = [f"word{(number * 7 + i * i) % 97}" for i in range(10 + 13 * number % 41)]
        _write(text / f"{number:02}.txt", " ".join(words))
    path = folder / "small.toml"
    _write(path, SPEC.format(text=text))
    return path


def _write(path: Path, content: str) -> None:
    """A file that is there already is not touched: somebody may be reading it."""
    if not path.exists() or path.read_text(encoding="utf-8") != content:
        path.write_text(content, encoding="utf-8")
