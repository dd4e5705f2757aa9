"""The command `fourfold`: finds the verb, runs it, and turns what goes wrong into words and an exit code.

How a verb joins. `VERBS` names where each stands, as text, so that no verb is imported before it is called:

- a single verb is a function of its own name in its own file: `fourfold.cli.train:train`;
- a group of verbs is `app = App(name="layout", help=...)` in its own file, with `@app.command` functions.

A function takes typed, documented parameters (`--set` as `Annotated[tuple[str, ...], Parameter(name="--set")]`,
`--json` as a bool), imports what is heavy (torch, numpy) in its body, prints its result with `fourfold.cli.output`,
raises the errors of `fourfold.spec.errors`, and returns its exit code, or None for 0.
Its docstring is its help: one line, more if need be, `Examples:` with three commands indented below it, then numpy's
`Parameters`. `fourfold.cli.help` shows the examples first. (Where fewer than two `Parameters` follow, as in a group's
`help`, say `For example:`; cyclopts would take `Examples:` for a section of a docstring and leave it out.)
"""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

from fourfold import __version__
from fourfold.cli.output import paint, print_error, story
from fourfold.spec.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_KILLED_BASE,
    EXIT_UNREADABLE,
    FourfoldError,
    Problem,
    SpecError,
)

if TYPE_CHECKING:
    from cyclopts import App, ArgumentCollection, CycloptsError

EXIT_INTERRUPTED = EXIT_KILLED_BASE + 2  # as a shell tells SIGINT
EXIT_PIPE_CLOSED = EXIT_KILLED_BASE + 13  # as a shell tells SIGPIPE

_JSON_TRUE = tuple(f"--json={word}" for word in ("true", "t", "yes", "y", "1"))  # as cyclopts reads them
_OURS = "this is a bug of ours"

EXAMPLES = """\
Examples:

    fourfold train tiny --nproc 2
    fourfold verify equal tiny --world 4
    fourfold spec copy small my.toml
"""


class Verb(NamedTuple):
    """`target` is "module:attribute"; `line` its line in the list of verbs; `habits` what people type in its place."""

    target: str
    line: str
    habits: tuple[str, ...] = ()


VERBS: Mapping[str, Verb] = {
    "train": Verb(
        "fourfold.cli.train:train", "Train a Spec on local ranks or under torchrun.", ("run", "fit")
    ),
    "verify": Verb(
        "fourfold.cli.verify:app",
        "Prove a run right: every sample once, equal to one device, the same after a kill.",
        ("check", "test"),
    ),
    "layout": Verb(
        "fourfold.cli.layout:app",
        "Show the grid of ranks, and list the layouts of a Spec.",
        ("mesh", "ranks"),
    ),
    "spec": Verb("fourfold.cli.spec:app", "Show, list and copy Specs.", ("config", "specs")),
    "data": Verb(
        "fourfold.cli.data:app", "Prepare data as a token file.", ("dataset", "prepare", "tokenize")
    ),
    "ckpt": Verb(
        "fourfold.cli.ckpt:app",
        "Inspect, validate and prune checkpoints.",
        ("checkpoint", "checkpoints", "inspect", "validate", "prune"),
    ),
    "replay": Verb(
        "fourfold.cli.replay:replay", "Run the step of a failure bundle again, on one device.", ("debug",)
    ),
    "report": Verb("fourfold.cli.report:report", "Write the report of a run as one page.", ("html",)),
    "lab": Verb("fourfold.cli.lab:app", "The experiments and the demonstration.", ("demo", "exercise")),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fourfold ARGV` (default: of this process) and return its exit code.

    Errors are told on stderr: those raised on purpose with all their problems, anything else as a bug of ours in one
    line. With `--json` they are the document on stdout, too. `--debug`, anywhere before a `--`, shows the traceback.
    """
    tokens, debug = _take_debug(list(sys.argv[1:] if argv is None else argv))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without "×" shows "?", and nothing fails
    try:
        code = _outcome(tokens, debug)
        sys.stdout.flush()
    except OSError as error:
        # Of stdout itself; keep the interpreter from complaining about it again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader has gone (`| head`)
            return EXIT_PIPE_CLOSED
        why = "the result of a verb is printed there"
        _tell([Problem("stdout", str(error.strerror), why, f"{_command(tokens)} > ANOTHER/PLACE")])
        return EXIT_UNREADABLE
    return code


def _outcome(tokens: list[str], debug: bool) -> int:
    """The exit code, all told that went wrong. Raises only what writing to stdout does."""
    try:
        return _run(tokens)
    except FourfoldError as error:
        _traceback_if(debug)
        _tell(error.problems)
        problems, code = error.problems, error.exit_code
    except KeyboardInterrupt:
        _traceback_if(debug)
        story("interrupted")
        problems, code = (Problem(_command(tokens), "interrupted", "Ctrl-C", ""),), EXIT_INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        _traceback_if(debug)
        hint = "" if debug else " (--debug shows the traceback)"
        story(f"{_OURS}: {_one_line(error)}{hint}")
        problems, code = (Problem(_command(tokens), _one_line(error), _OURS, ""),), EXIT_BUG
    if _wants_json(tokens):
        print_error(_command(tokens), code, problems)
    return code


def build_app(verb: str | None = None) -> App:
    """The cyclopts app. Without a `verb` it knows each by its line, and imports none."""
    from cyclopts import App, Parameter

    from fourfold.cli.help import VerbHelp

    app = App(
        name="fourfold",
        help="Train a model on many devices, and prove the run right.",
        help_prologue=None if verb else EXAMPLES,
        help_epilogue=None
        if verb
        else "Help on a verb: fourfold VERB --help. A SPEC is a TOML file or a ready name. "
        "With --json every verb prints one JSON document, also of what it refuses; --debug shows tracebacks.",
        help_format="plaintext",
        help_formatter=VerbHelp(),
        version=f"fourfold {__version__}",
        suppress_keyboard_interrupt=False,  # `main` tells it
        config=(_whole_numbers,),
        default_parameter=Parameter(negative=(), show_default=lambda value: value if value else None),
    )
    for name, entry in VERBS.items():
        # A line given here would replace the verb's own, longer help.
        app.command(entry.target, name=name, help=entry.line if verb is None else None)
    return app


def _whole_numbers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:  # noqa: ARG001
    """No fraction for an integer, of any verb: cyclopts would round it."""
    from cyclopts import CoercionError

    for argument in arguments:
        if int in (argument.hint, *get_args(argument.hint)):
            for token in argument.tokens:
                if "." in token.value:
                    message = f'"{token.value}" is not a whole number'
                    raise CoercionError(msg=message, argument=argument, token=token)


def _run(tokens: list[str]) -> int:
    verb = tokens[0] if tokens and not tokens[0].startswith("-") else None
    if verb is not None and verb not in VERBS:
        raise SpecError(_unknown_verb(verb, tokens))
    if verb is None and tokens and tokens[0] not in ("--help", "-h", "--version"):
        raise SpecError(_no_verb(tokens))
    from cyclopts import CycloptsError

    try:
        code = build_app(verb)(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise SpecError(_usage(error, tokens)) from error
    return code if isinstance(code, int) else EXIT_DONE


def _unknown_verb(verb: str, tokens: list[str]) -> Problem:
    from fourfold.spec.ready import ready_names

    near = [name for name, entry in VERBS.items() if verb in entry.habits]
    near = near or difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.5)
    if verb in ready_names() or verb.endswith(".toml"):
        instead = f"fourfold train {shlex.quote(verb)}, or fourfold spec show {shlex.quote(verb)}"
    else:
        instead = f"fourfold {near[0]} --help" if near else "fourfold --help"
    return Problem(_command(tokens), f'no verb "{verb}"', f"the verbs are {', '.join(VERBS)}", instead)


def _no_verb(tokens: list[str]) -> Problem:
    verb = next((token for token in tokens if token in VERBS), None)
    others = [token for token in tokens if token != verb]
    return Problem(
        asked=_command(tokens),
        found=f"the option {tokens[0]} before a verb",
        why="options belong to a verb, and stand behind it",
        instead=_command([verb, *others]) if verb else "fourfold --help",
    )


def _usage(error: CycloptsError, tokens: list[str]) -> Problem:
    """cyclopts' one sentence or two, in four parts."""
    found, _, hint = str(error).replace("Unused Tokens:", "Unknown words:").partition(" Did you mean ")
    meant = hint.partition("?")[0].strip('"')
    loose = [
        f"--set {a}={b}"
        for option, a, b in zip(tokens, tokens[1:], tokens[2:], strict=False)
        if option == "--set" and "=" not in a
    ]
    help_command = " ".join(["fourfold", *(error.command_chain or tokens[:1]), "--help"])
    return Problem(
        asked=_command(tokens),
        found=found.strip().rstrip("."),
        why="the verb does not take this" if "nknown" in found else "the verb cannot be called like this",
        instead="; see: ".join(part for part in (meant or " ".join(loose), help_command) if part),
    )


def _tell(problems: Sequence[Problem]) -> None:
    for problem in problems:
        story(f"{paint('error:', 'red', sys.stderr)} {problem}\n")
    if len(problems) > 1:
        story(f"{len(problems)} problems")


def _wants_json(tokens: list[str]) -> bool:
    """Whether the verb was asked for its document, however wrong the rest is. Of several ranks, the first tells it."""
    options = tokens[: tokens.index("--")] if "--" in tokens else tokens
    asked = any(token == "--json" or token.lower() in _JSON_TRUE for token in options)
    return asked and ("LOCAL_RANK" not in os.environ or os.environ.get("RANK", "0") == "0")


def _command(tokens: list[str]) -> str:
    return f"fourfold {shlex.join(tokens)}"


def _take_debug(tokens: list[str]) -> tuple[list[str], bool]:
    end = tokens.index("--") if "--" in tokens else len(tokens)
    kept = [token for token in tokens[:end] if token != "--debug"]
    return kept + tokens[end:], len(kept) < end


def _traceback_if(debug: bool) -> None:
    if debug:
        import traceback

        traceback.print_exc()


def _one_line(error: Exception) -> str:
    """The exception's class and first line, and the place in our own code that it came through last."""
    first = str(error).partition("\n")[0]
    package = str(Path(__file__).parents[1]) + os.sep
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(package):
            place = f" at fourfold/{file.removeprefix(package)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__}{': ' if first else ''}{first}{place}"
