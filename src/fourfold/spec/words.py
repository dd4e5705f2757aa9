"""Words of messages that depend on a number."""

from __future__ import annotations


def counted(count: int, noun: str, form: str = "") -> str:
    """ "1 rank", "2 ranks", "0 ranks", "3 batches"; `form` is the number's format."""
    plural = "" if count == 1 else "es" if noun.endswith(("ch", "sh", "s", "x")) else "s"
    return f"{count:{form}} {noun}{plural}"
