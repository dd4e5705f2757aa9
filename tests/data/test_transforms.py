"""Transforms: the same change for a sample wherever it is made, another for every sample, epoch and seed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fourfold.data.sample import Sample
from fourfold.data.transforms import GaussianNoise, TokenNoise, make_transforms, transformed
from fourfold.spec.data import TransformSpec
from fourfold.spec.errors import SpecError


def tokens(length: int = 200, nonpadding: int | None = None) -> Sample:
    row = np.full(length, 7, dtype=np.int64)
    return Sample(row, row + 1, np.ones(length, bool), np.zeros(length, np.int32), nonpadding or length)


def vector() -> Sample:
    return Sample(np.zeros(5, np.float32), np.ones(1, np.float32), np.array(True), None, 1)


def noise(sample: Sample, seed: int = 0, epoch: int = 0, sample_id: int = 0) -> tuple[float, ...]:
    kind = "gaussian_noise" if sample.documents is None else "token_noise"
    spec = TransformSpec(kind=kind, std=1.0, probability=0.5)
    made = make_transforms([spec], None if sample.documents is None else 256)
    return tuple(transformed(made, sample, seed, epoch, sample_id).inputs.tolist())


@pytest.mark.parametrize("sample", [tokens(), vector()])
def test_the_draw_belongs_to_seed_epoch_and_sample(sample: Sample) -> None:
    keys = [(seed, epoch, sample_id) for seed in (0, 1) for epoch in (0, 1) for sample_id in (0, 1, 10**12)]
    found = [noise(sample, *key) for key in keys]
    assert len(set(found)) == len(keys)
    np.random.default_rng(0).random(5)
    np.random.seed(1)  # the process's own randomness has no say
    assert [noise(sample, *key) for key in keys] == found


def test_two_transforms_of_a_sample_draw_apart() -> None:
    spec = TransformSpec(kind="gaussian_noise", std=1.0)
    once = transformed(make_transforms([spec], None), vector(), 0, 0, 0).inputs
    twice = transformed(make_transforms([spec, spec], None), vector(), 0, 0, 0).inputs
    assert not np.allclose(twice, 2 * once)
    assert not np.allclose(twice, once)


def test_token_noise_replaces_the_share_of_inputs_and_nothing_else() -> None:
    sample = tokens(20_000, nonpadding=15_000)
    changed = TokenNoise(0.25, 256)(sample, np.random.default_rng(1))
    hit = changed.inputs != sample.inputs
    assert hit[:15_000].mean() == pytest.approx(0.25 * 255 / 256, abs=0.02)
    assert not hit[15_000:].any()
    assert changed.targets is sample.targets
    assert (sample.inputs == 7).all()
    assert 0 <= changed.inputs.min() <= changed.inputs.max() < 256


def test_noise_of_nothing_changes_nothing() -> None:
    assert (TokenNoise(0.0, 256)(tokens(), np.random.default_rng(1)).inputs == 7).all()
    assert not GaussianNoise(0.0)(vector(), np.random.default_rng(1)).inputs.any()


def test_gaussian_noise_keeps_the_dtype() -> None:
    changed = GaussianNoise(2.0)(vector(), np.random.default_rng(1))
    assert changed.inputs.dtype == np.float32
    assert changed.inputs.std() > 0.5


def test_a_function_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_changes.py").write_text(
        "from dataclasses import replace\n"
        "def double(sample, draws):\n    return replace(sample, inputs=sample.inputs + draws.integers(2**40))\n"
        "def widen(sample, draws):\n    return replace(sample, inputs=sample.inputs.astype('float64'))\n"
        "def forget(sample, draws):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def apply(name: str) -> Sample:
        spec = TransformSpec(kind="import", target=f"own_changes:{name}")
        return transformed(make_transforms([spec], 256), tokens(), 0, 0, 3)

    assert (apply("double").inputs == apply("double").inputs).all()
    assert (apply("double").inputs > 7).all()
    with pytest.raises(SpecError, match="float64"):
        apply("widen")
    with pytest.raises(SpecError, match="a NoneType"):
        apply("forget")


def test_all_that_does_not_fit_comes_at_once() -> None:
    specs = [
        TransformSpec(kind="gaussian_noise", std=1.0),
        TransformSpec(kind="token_noise", probability=0.1),
        TransformSpec(kind="import", target="no_such_package:change"),
        TransformSpec(kind="import", target="json:no_such_function"),
    ]
    with pytest.raises(SpecError) as error:
        make_transforms(specs, 256)
    assert [problem.where for problem in error.value.problems] == [f"data.transforms[{n}]" for n in (0, 2, 3)]
    with pytest.raises(SpecError, match="token_noise"):
        make_transforms(specs[1:2], None)


def test_a_function_in_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "changes_here.py").write_text("def keep(sample, draws):\n    return sample\nnumber = 5\n")
    (tmp_path / "broken_here.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path.copy())
    make_transforms([TransformSpec(kind="import", target="changes_here:keep")], 256)
    with pytest.raises(SpecError, match="number is a int"):
        make_transforms([TransformSpec(kind="import", target="changes_here:number")], 256)
    with pytest.raises(SpecError, match="ZeroDivisionError"):
        make_transforms([TransformSpec(kind="import", target="broken_here:change")], 256)


def test_no_transforms_leave_the_sample() -> None:
    sample = replace(tokens())
    assert transformed((), sample, 0, 0, 0) is sample
