"""Words of messages that depend on a number."""

from __future__ import annotations


def counted(count: int, noun: str, form: str = "") -> str:
    """ "1 rank", "2 ranks", "0 ranks"; `form` is the number's format."""
    return f"{count:{form}} {noun}{'' if count == 1 else 's'}"
