"""No collective stands where only some ranks come by: a gather inside `if rank == 0` waits for ever for the others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fourfold

SOURCES = Path(fourfold.__file__).parent

# torch's, and our own functions whose docstring says that they run one.
COLLECTIVES = frozenset(
    [
        "all_reduce",
        "all_gather",
        "all_gather_object",
        "all_gather_single",
        "broadcast",
        "broadcast_object_list",
        "barrier",
        "gather",
        "gather_object",
        "scatter",
        "scatter_object_list",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "all_to_all",
        "all_to_all_single",
        "monitored_barrier",
        "init_process_group",
        "full_tensor",
        "redistribute",
        "agree",
        "agree_totals",
        "sum_floats",
        "start_sum",
        "gather_json",
        "save_state",
        "load_state",
        "open_together",
        "share_buffers",
        "observing",
        "validate",
        "evaluate",
        "accumulate",
        "open_training",
        "parallelize",
        "warm_up",
    ]
)


def names_a_rank(test: ast.expr) -> bool:
    """Whether a condition asks which rank this is."""
    words = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    return bool(words & {"rank", "_rank", "local_rank", "dp_rank", "get_rank", "speaks", "is_main"})


def calls(nodes: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    for top in nodes:
        for node in ast.walk(top):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
                yield node.lineno, name


def leaves(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Return | ast.Continue | ast.Break)


def under_a_rank_test(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and name of each collective in a branch for some ranks, or after a branch in which some ranks leave."""
    found = []
    for node in ast.walk(tree):
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(body, list):
                continue
            for index, statement in enumerate(body):
                if not isinstance(statement, ast.If | ast.While) or not names_a_rank(statement.test):
                    continue
                one_sided = [*statement.body, *statement.orelse]
                if leaves(statement.body) or leaves(statement.orelse):
                    one_sided += body[index + 1 :]
                found += [(line, name) for line, name in calls(one_sided) if name in COLLECTIVES]
    return sorted(set(found))


def test_no_collective_is_behind_a_question_for_the_rank():
    found = {
        f"{path.relative_to(SOURCES)}:{line}": name
        for path in sorted(SOURCES.rglob("*.py"))
        for line, name in under_a_rank_test(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_the_check_sees_a_gather_on_rank_0_alone():
    wrong = "if dist.get_rank() == 0:\n    whole = weight.full_tensor()\n"
    early = "def save(rank):\n    if rank != 0:\n        return\n    dist.barrier()\n"
    right = "whole = weight.full_tensor()\nif rank == 0:\n    write(whole)\n"
    assert under_a_rank_test(ast.parse(wrong)) == [(2, "full_tensor")]
    assert under_a_rank_test(ast.parse(early)) == [(4, "barrier")]
    assert under_a_rank_test(ast.parse(right)) == []
