"""Where each key of a TOML text stands: `tomllib` keeps no line numbers, and an error without one is half an error.

The text has passed `tomllib` before, so the scanner only finds its way; it does not check.
Keys inside inline tables are not recorded: they stand where their table stands.
"""

from __future__ import annotations

import re

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_QUOTES = ('"""', "'''", '"', "'")


def key_lines(text: str) -> dict[str, int]:
    """Line (from 1) of every table and key by dotted path; items of `[[arrays]]` are numbered: `a.0.key`.

    A table that is only implied (`a` in `a.b = 1`) has the line of the first key that implies it.
    """
    scan = _Scan(text)
    lines: dict[str, int] = {}
    items: dict[str, int] = {}  # items so far of each array of tables
    prefix = ""
    while scan.skip_blank():
        line = scan.line
        if scan.take("[["):
            path = _resolve(scan.key(), items)
            items[path] = items.get(path, -1) + 1
            prefix = f"{path}.{items[path]}"
            lines.setdefault(path, line)
            lines[prefix] = line
            scan.to_line_end()
        elif scan.take("["):
            prefix = _resolve(scan.key(), items)
            _record(lines, "", prefix, line)
            scan.to_line_end()
        else:
            _record(lines, prefix, ".".join(scan.key()), line)
            scan.take("=")
            scan.skip_value()
    return lines


def _resolve(parts: list[str], items: dict[str, int]) -> str:
    """The path of a table header, by way of the newest item of every array of tables above it."""
    path = parts[0]
    for part in parts[1:]:
        if path in items:
            path = f"{path}.{items[path]}"
        path = f"{path}.{part}"
    return path


def _record(lines: dict[str, int], prefix: str, key: str, line: int) -> None:
    path = prefix
    for part in key.split("."):
        path = f"{path}.{part}" if path else part
        lines.setdefault(path, line)


class _Scan:
    """A cursor over TOML text that counts lines."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def take(self, token: str) -> bool:
        """Pass `token` (after spaces) if it is next."""
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        return True

    def skip_blank(self) -> bool:
        """Pass white space and comments; False at the end of the text."""
        while self.at < len(self.text):
            if self.text[self.at] == "#":
                self.to_line_end()
            elif self.text[self.at].isspace():
                self.at += 1
            else:
                return True
        return False

    def to_line_end(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def key(self) -> list[str]:
        """A dotted key; parts may be bare or quoted."""
        parts = [self._key_part()]
        while self.take("."):
            parts.append(self._key_part())
        return parts

    def _key_part(self) -> str:
        self.take("")
        if self.text[self.at] in "\"'":
            start = self.at + 1
            self._skip_string()
            return self.text[start : self.at - 1]
        match = _BARE.match(self.text, self.at)
        assert match is not None, "the text has passed tomllib"
        self.at = match.end()
        return match.group()

    def skip_value(self) -> None:
        """Pass a value: to the end of its line, or of the lines that its brackets and strings span."""
        depth = 0
        while self.at < len(self.text):
            here = self.text[self.at]
            if here in "\"'":
                self._skip_string()
                continue
            if here == "#":
                self.to_line_end()
                continue
            if here == "\n" and depth == 0:
                return
            depth += (here in "[{") - (here in "]}")
            self.at += 1

    def _skip_string(self) -> None:
        quote = next(quote for quote in _QUOTES if self.text.startswith(quote, self.at))
        self.at += len(quote)
        while not self.text.startswith(quote, self.at):
            self.at += 2 if quote[0] == '"' and self.text[self.at] == "\\" else 1
        self.at += len(quote)
        while len(quote) == 3 and self.text[self.at : self.at + 1] == quote[0]:
            self.at += 1  # up to two quotes may stand before the closing three
