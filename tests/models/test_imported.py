"""A user's own model: found, checked, and equal in every split like any other."""

from __future__ import annotations

import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.data.batch import Batch
from fourfold.models.imported import ImportedKit, imported_kit
from fourfold.models.protocol import BoxedKit, Heads, LossModule, StagedKit, Start
from fourfold.spec.errors import SpecError
from fourfold.spec.model import ImportSpec
from fourfold.spec.spec import Spec

MODELS = """
import torch
from torch import nn
from fourfold.models.protocol import Heads

SIZE = 3

class Line(nn.Module):
    def __init__(self, inputs=4):
        super().__init__()
        self.linear = nn.Linear(inputs, 1)

    def forward(self, batch):
        error = (self.linear(batch.inputs) - batch.targets).square().mean(-1)
        return torch.where(batch.valid, error, 0.0).sum(), batch.valid.sum()

class Mean(Line):
    def forward(self, batch):
        return super().forward(batch)[0] / 3

class Detached(Line):
    def forward(self, batch):
        total, count = super().forward(batch)
        return total.detach(), count

class Kit:
    def __init__(self, **values):
        self.values = values
    def build(self, seed, dtype):
        if self.values.get("built") is None and "built" in self.values:
            raise KeyError("no such thing")
        return self.values.get("built", Line().to(dtype))
    def loss(self, module, batch):
        return module(batch)
    def sharding(self):
        return self.values.get("table", {"*": "replicate"}) or {"*": Heads()}
    def blocks(self, module):
        return self.values.get("blocks", ("linear",))

class Staged(Kit):
    # One that can run in parts; what it says is named by its arguments.
    def ends(self, module):
        given = self.values.get("ends", [[], []])
        return given["nothing"] if given == {} else given
    def stream(self, batch):
        return self.values.get("stream", (2, 4))
    def part(self, module, batch, stream, last): ...

class Boxed(Kit):
    # One that can be made in parts; what it does wrong is named by its arguments.
    def skeleton(self, dtype):
        with torch.device("cpu" if self.values.get("real") else "meta"):
            module = Line().to(torch.float32 if self.values.get("narrow") else dtype)
            if self.values.get("empty"):
                module.register_buffer("mask", torch.ones(2))
        if self.values.get("full"):
            module.register_buffer("mask", torch.ones(2))
        return None if self.values.get("nothing") else module
    def start(self, name):
        return {"linear.weight": (0.0, 1)}.get(name, (1, 0.0)) if not self.values.get("lost") else {}[name]

class Half:
    def build(self, seed, dtype): ...
    def loss(self, module, batch): ...

def line(inputs=4): return Line(inputs)
def mean(): return Mean()
def number(): return 7
def half(): return Half()
def raises(): raise KeyError("no such thing")
def kit(): return Kit()
def kit_of_text(): return Kit(built="text")
def kit_of_fp32(): return Kit(built=Line())
def kit_that_raises(): return Kit(built=None)
def boxed(**values): return Boxed(**values)
def given(**values): return Kit(**values)
def staged(**values): return Staged(**values)
def frozen(): return Line().requires_grad_(False)
def lazy(): return nn.LazyLinear(3)
def detached(): return Detached()
def kit_whose_table_raises(): return Kit(table={})
def kit_without_table(): return Kit(table={"*.weight": "replicate"})
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's, worked in, with modules of his own."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "models.py").write_text(MODELS)
    (package / "broken.py").write_text("import a_package_nobody_has\n")
    (package / "syntax.py").write_text("def factory(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


def kit(target: str, **args: Any) -> ImportedKit:
    return imported_kit(ImportSpec(kind="import", target=target, args=args))


def refused(target: str, **args: Any) -> Any:
    with pytest.raises(SpecError) as error:
        kit(target, **args)
    (problem,) = error.value.problems
    assert problem.asked == f'model.target = "{target}"'
    assert problem.found
    assert problem.why
    assert problem.instead
    return problem


@pytest.mark.usefixtures("here")
def test_a_module_alone_is_a_model(vectors: Callable[..., Batch]) -> None:
    state = torch.random.get_rng_state()
    line = kit("mine.models:line", inputs=6)
    module = line.build(3, torch.float64)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator was advanced"
    assert torch.equal(module.linear.weight, line.build(3, torch.float32).linear.weight.double())
    assert not torch.equal(module.linear.weight, line.build(4, torch.float64).linear.weight)
    assert line.sharding() == {"*": "replicate"}
    assert line.blocks(module) == ()
    batch = vectors(5, 6, torch.zeros(5, 1, dtype=torch.float64))
    total, count = LossModule(line, module)(batch)
    assert total.item() == pytest.approx(module.linear(batch.inputs).square().sum().item())
    assert count == 5


@pytest.mark.usefixtures("here")
def test_a_kit_is_passed_through() -> None:
    mine = kit("mine.models:kit")
    module = mine.build(0, torch.float64)
    assert mine.sharding() == {"*": "replicate"}
    assert mine.blocks(module) == ("linear",)


def test_a_module_nowhere_is_answered_with_the_nearest(here: Path) -> None:
    assert "mine.models" in refused("mine.model:line").instead
    assert "mine" in refused("minee.models:line").instead
    problem = refused("qqqqq:line")
    assert str(here) in problem.found
    assert problem.instead.startswith("one of mine")
    assert "no module mine.models.line" in refused("mine.models.line:factory").found


@pytest.mark.usefixtures("here")
def test_an_attribute_nowhere_is_answered_with_the_nearest() -> None:
    problem = refused("mine.models:lien")
    assert problem.instead == "mine.models:line"
    assert "models.py" in problem.found
    assert "must be a function" in refused("mine.models:SIZE").why


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("mine.broken:factory", "ModuleNotFoundError: No module named 'a_package_nobody_has'"),
        ("mine.syntax:factory", "SyntaxError"),
        ("mine.models:raises", "KeyError: 'no such thing'"),
    ],
)
def test_a_module_that_fails_says_where(target: str, found: str) -> None:
    problem = refused(target)
    assert found in problem.found
    assert ".py" in problem.found


@pytest.mark.usefixtures("here")
def test_arguments_the_factory_does_not_take() -> None:
    problem = refused("mine.models:line", input=3)
    assert "input" in problem.found
    assert "inputs" in problem.instead


@pytest.mark.usefixtures("here")
def test_what_the_factory_returns_must_be_a_model() -> None:
    assert "returned 7 without build, loss, sharding, blocks" in refused("mine.models:number").found
    assert "a Half without sharding, blocks" in refused("mine.models:half").found


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("mine.models:kit_of_text", "build() returned 'text'"),
        ("mine.models:kit_of_fp32", "linear.weight, linear.bias"),
        ("mine.models:kit_without_table", "no pattern matches it"),
        ("mine.models:kit_whose_table_raises", "TypeError: Heads.__new__() missing 1 required"),
        ("mine.models:kit_that_raises", "KeyError: 'no such thing'"),
        ("mine.models:frozen", "no parameter with requires_grad = True"),
        ("mine.models:lazy", "weight, bias without a shape"),
    ],
)
def test_what_build_returns_is_checked(target: str, found: str) -> None:
    with pytest.raises(SpecError) as error:
        kit(target).build(0, torch.float64)
    assert found in error.value.problems[0].found


@pytest.mark.usefixtures("here")
def test_a_kit_that_can_be_made_in_parts_is_known_as_one() -> None:
    mine = kit("mine.models:boxed", full=True)
    assert isinstance(mine, BoxedKit)
    assert mine.start("linear.weight") == Start(0.0, 1.0)
    module = mine.skeleton(torch.float64)
    assert all(p.is_meta and p.dtype == torch.float64 for p in module.parameters())
    assert torch.equal(module.mask, torch.ones(2))
    assert not isinstance(kit("mine.models:kit"), BoxedKit)
    assert not isinstance(kit("mine.models:line"), BoxedKit)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ("real", "linear.weight, linear.bias with memory"),
        ("narrow", "linear.weight, linear.bias in another dtype"),
        ("empty", "buffers mask without values"),
        ("nothing", "skeleton() returned None"),
    ],
)
def test_what_a_skeleton_is_without_is_refused(wrong: str, found: str) -> None:
    mine = kit("mine.models:boxed", **{wrong: True})
    assert isinstance(mine, BoxedKit)
    with pytest.raises(SpecError) as error:
        mine.skeleton(torch.float64)
    assert found in error.value.problems[0].found


@pytest.mark.usefixtures("here")
def test_a_start_that_is_none_is_refused_by_name() -> None:
    mine = kit("mine.models:boxed", lost=True)
    assert isinstance(mine, BoxedKit)
    with pytest.raises(SpecError, match=r'start\("linear\.bias"\)'):
        mine.start("linear.bias")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("linear", "blocks() gives 'linear'"),
        (None, "blocks() gives None"),
        ([3], "blocks() gives a list"),
        (["linear", "lost"], "blocks() names lost"),
        (["linear", "linear"], "blocks() names linear that is named already"),
    ],
)
def test_blocks_that_are_no_names_of_modules_are_refused(given: object, found: str) -> None:
    mine = kit("mine.models:given", blocks=given)
    module = mine.build(0, torch.float64)
    with pytest.raises(SpecError) as error:
        mine.blocks(module)
    assert found in error.value.problems[0].found


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, "ends() gives None"),
        ([["linear"]], "ends() gives a list"),
        (["linear", []], "ends() gives 'linear'"),
        ([["lost"], []], "ends() names lost"),
        ([[], ["linear"]], "ends(), with blocks(), names linear that is named already"),
        ({}, "KeyError: 'nothing'"),
    ],
)
def test_ends_that_are_no_ends_are_refused(given: object, found: str) -> None:
    mine = kit("mine.models:staged", ends=given)
    assert isinstance(mine, StagedKit)
    with pytest.raises(SpecError) as error:
        mine.ends(mine.build(0, torch.float64))
    assert found in error.value.problems[0].found
    if given == {}:
        assert "models.py:" in error.value.problems[0].found  # where he wrote it


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("given", [7, None, [2, 0], [2, 4.0], "24"])
def test_a_stream_that_is_no_shape_is_refused(given: object, vectors: Callable[..., Batch]) -> None:
    mine = kit("mine.models:staged", stream=given)
    assert isinstance(mine, StagedKit)
    with pytest.raises(SpecError, match=r"stream\(\) gives"):
        mine.stream(vectors(2, 4, torch.zeros(2, 1)))
    assert kit("mine.models:staged", stream=[2, 4]).stream(vectors(2, 4, torch.zeros(2, 1))) == (2, 4)


@pytest.mark.usefixtures("here")
def test_a_loss_that_is_no_pair_is_refused(vectors: Callable[..., Batch]) -> None:
    mean = kit("mine.models:mean")
    with pytest.raises(SpecError, match=r"a tensor of shape \(\)"):
        mean.loss(mean.build(0, torch.float64), vectors(2, 4, torch.zeros(2, 1)))


@pytest.mark.usefixtures("here")
def test_a_loss_without_a_gradient_is_refused_in_training_only(vectors: Callable[..., Batch]) -> None:
    detached = kit("mine.models:detached")
    module, batch = detached.build(0, torch.float64), vectors(2, 4, torch.zeros(2, 1, dtype=torch.float64))
    with pytest.raises(SpecError, match="a loss without a gradient"):
        detached.loss(module, batch)
    with torch.no_grad():
        assert detached.loss(module, batch)[1] == 2


def example() -> Spec:
    folder = Path(__file__).parents[2] / "examples"
    return Spec.model_validate(tomllib.loads((folder / "own_model.toml").read_text()))


def test_the_example_trains_and_is_equal_in_every_split(
    tokens: Callable[..., Batch], rows_of: Callable[..., Batch]
) -> None:
    model = example().model
    assert isinstance(model, ImportSpec)
    mine = imported_kit(model)
    module = mine.build(0, torch.float64)
    batch = tokens([[24], [5, 19], [8, 8, 8]])
    whole, count = mine.loss(module, batch)
    parts = [mine.loss(module, rows_of(batch, rows))[0] for rows in ([2], [0, 1])]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-13, atol=0)
    assert count == batch.valid.sum()
    whole.backward()
    assert all(p.grad is not None for p in module.parameters())
    assert mine.blocks(module) == ("layers.0", "layers.1")
    assert isinstance(mine, BoxedKit)
    skeleton = {n: (p.shape, p.dtype) for n, p in mine.skeleton(torch.float64).named_parameters()}
    assert skeleton == {n: (p.shape, p.dtype) for n, p in module.named_parameters()}


def test_the_page_shows_code_that_runs(vectors: Callable[..., Batch]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "own_model.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn}
    exec(textwrap.dedent(code), names)
    module = names["Line"](4).double()
    total, count = module(vectors(3, 4, torch.zeros(3, 1, dtype=torch.float64)))
    assert total.shape == ()
    assert count == 3


def test_the_pages_table_has_rules_that_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "own_model.md").read_text()
    names: dict[str, Any] = {}
    (code,) = (block for block in page.split("```python\n")[1:] if "def sharding" in block)
    exec(code.split("```")[0], names)
    table = names["sharding"](None)
    assert {rule for rule in table.values() if isinstance(rule, str)} == {
        *("vocabulary", "replicate", "row", "column")
    }
    assert table["query.*"] == Heads(8)
