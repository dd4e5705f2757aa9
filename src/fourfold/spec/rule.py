"""One row of the table of rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fourfold.spec.errors import Problem
from fourfold.spec.spec import Spec

When = Literal["always", "train"]
Owed = Literal["mathematics", "library", "not built"]
"""Why a refusal cannot be lifted by asking: it would compute something else, a library refuses it (the problem says
which), or nobody has built it here yet."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: `find` gives the problem of a Spec that breaks the rule; `keys` are the settings that collide.

    Of `[layout]`, `find` reads those named in `keys` and no others: verdicts on many layouts are kept by them.
    """

    name: str
    keys: tuple[str, ...]
    find: Callable[[Spec], Problem | None]
    when: When = "always"
    owed: Owed = "mathematics"

    def applies(self, spec: Spec) -> bool:
        """Whether `spec` breaks this rule."""
        return self.find(spec) is not None

    def problem(self, spec: Spec) -> Problem:
        """What is wrong; only for a Spec to which the rule applies."""
        problem = self.find(spec)
        assert problem is not None, f"rule {self.name} does not apply"
        return problem
