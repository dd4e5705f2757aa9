from __future__ import annotations

import subprocess
import sys

import pytest

from fourfold.launch.pulse import Pulse, clear_ranks, read_pulses
from fourfold.spec.errors import DataError


def test_the_last_beat_is_read_from_outside(tmp_path):
    pulses = [Pulse(tmp_path / "pulse", rank) for rank in (0, 1)]
    pulses[1].beat(4, "forward")
    pulses[1].beat(5, "backward", patient=True)
    read = read_pulses(tmp_path / "pulse")
    assert (read[1].beats, read[1].step, read[1].phase, read[1].patient) == (2, 5, "backward", True)
    assert (pulses[1].step, pulses[1].phase) == (5, "backward")
    assert read[1].time >= read[0].time > 0
    for pulse in pulses:
        pulse.close()
    assert read_pulses(tmp_path / "pulse") == read


def test_before_the_first_beat_a_rank_is_patient_at_step_0(tmp_path):
    Pulse(tmp_path, 3)
    beat = read_pulses(tmp_path)[3]
    assert (beat.beats, beat.step, beat.phase, beat.patient) == (0, 0, "start", True)


def test_a_beat_outlives_a_rank_that_is_killed(tmp_path):
    code = (
        "import os, sys; from fourfold.launch.pulse import Pulse\n"
        "Pulse(sys.argv[1], 0).beat(7, 'update'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert read_pulses(tmp_path)[0].step == 7


def test_a_phase_that_is_too_long_is_cut(tmp_path):
    pulse = Pulse(tmp_path, 0)
    pulse.beat(1, "x" * 50)
    assert read_pulses(tmp_path)[0].phase == "x" * 31


def test_what_is_no_pulse_is_passed_over_and_old_ones_are_cleared(tmp_path):
    (tmp_path / "rank7").write_bytes(b"short")
    (tmp_path / "rankx").write_bytes(b"")
    assert read_pulses(tmp_path) == {}
    assert read_pulses(tmp_path / "missing") == {}
    clear_ranks(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_data_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="keep a rank's pulse"):
        Pulse(tmp_path / "file", 0)
