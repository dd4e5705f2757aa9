"""How the help of a verb reads: its examples, how it is used, what it does, its parameters; in the terminal's width."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from cyclopts.help import HelpPanel, InlineText
from cyclopts.help.formatters import DefaultFormatter

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

_HEADS = ("Examples:", "For example:")


class VerbHelp(DefaultFormatter):
    """cyclopts' own, but for the order, and for docstrings: their lines are those of the source, not of a terminal."""

    _usage: Any = None

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:  # noqa: ARG002
        """Keep it until the examples have been shown: they come with the description."""
        self._usage = usage

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        """The examples, then the usage, then all else."""
        paragraphs = _text(description).strip("\n").split("\n\n")
        head = next((number for number, one in enumerate(paragraphs) if one.strip() in _HEADS), None)
        if head is not None:
            examples = paragraphs[head + 1]
            del paragraphs[head : head + 2]
            console.out(f"Examples:\n\n{examples}\n", highlight=False)
        super().render_usage(console, options, self._usage)
        width = min(options.max_width, console.width)
        for paragraph in filter(None, paragraphs):
            console.out(f"{_filled(paragraph, width)}\n", highlight=False)

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """A panel, the text of each entry as one paragraph."""
        entries = [
            entry.copy(
                description=InlineText.from_format(" ".join(_text(entry.description).split()), "plaintext")
            )
            for entry in panel.entries
        ]
        super().__call__(console, options, panel.copy(entries=entries))


def _text(description: Any) -> str:
    """What the plain text of a docstring was; "" where there is none."""
    return (
        str(getattr(description.primary_renderable, "plain", ""))
        if isinstance(description, InlineText)
        else ""
    )


def _filled(paragraph: str, width: int) -> str:
    """As wide as there is room; what is indented was meant to stand as it does."""
    if paragraph.startswith(" "):
        return paragraph
    return textwrap.fill(paragraph, width, break_long_words=False, break_on_hyphens=False)
