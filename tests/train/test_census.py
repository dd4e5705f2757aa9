from __future__ import annotations

import pytest
import torch
from torch import nn

from fourfold.launch.rank import Rank
from fourfold.spec.errors import CheckFailed
from fourfold.train.census import check_world, code_hash, named_state, parameter_hash
from tests.train import rank_jobs


def test_another_seed_on_one_rank_is_named_before_the_model_is_built(ranks):
    for text in ranks(2).run(rank_jobs.census_of_different_seeds):
        assert "the same Spec on every rank" in text
        assert "rank 1" in text


def test_initial_parameters_that_differ_in_one_bit_are_named(ranks):
    for text in ranks(2).run(rank_jobs.different_parameters):
        assert "the same initial parameters on every rank" in text


def test_parameter_hash_sees_values_names_dtypes_and_buffers():
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    plain = parameter_hash(model())
    assert parameter_hash(model()) == plain
    assert parameter_hash(model().double()) != plain
    changed = model()
    changed[1].running_mean[0] = 1e-30
    assert parameter_hash(changed) != plain
    assert parameter_hash(nn.Sequential(nn.Identity(), *model())) != plain


def test_the_world_that_joined_must_be_the_world_of_the_layout():
    check_world(rank_jobs.spec(2), Rank(0, 0, 2, 2))
    with pytest.raises(CheckFailed, match="a world of 2 ranks"):
        check_world(rank_jobs.spec(2), Rank(0, 0, 4, 4))


def test_the_code_hash_holds_an_imported_models_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    target = ('model.kind="import"', 'model.target="census_model:factory"')
    sets = ('data.task="regression"', "data.inputs=4", "data.outputs=1")
    hashes = []
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / "census_model.py").write_text(text)
        spec = rank_jobs.load_spec("tiny", [*target, *rank_jobs.SMALLEST[3:], *sets]).spec
        hashes.append(code_hash(spec))
    assert hashes[0] != hashes[1]


def test_state_that_is_no_tensor_is_no_part_of_the_hash():
    class WithExtraState(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: object) -> None:
            pass

    torch.manual_seed(0)
    plain = nn.Linear(2, 2)
    torch.manual_seed(0)
    assert parameter_hash(WithExtraState(2, 2)) == parameter_hash(plain)


def test_a_tied_tensor_is_held_under_each_of_its_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert {"0.weight", "1.weight"} <= named_state(model).keys()
