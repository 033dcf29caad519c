"""Checks of a profile: placements that are predicted with it and then run."""

import numpy as np
import pytest
from small_steps import signatures_of, two_cpus, words_step

from placewise.core.profile import CheckedPrediction, Profile, ProfiledDevice, Timing
from placewise.measure import prediction_checks
from placewise.measure.prediction_checks import check_predictions


def profile_of(seconds: float) -> Profile:
    """A profile in which each op takes this long, on CPU devices that don't slow each other down."""
    devices = tuple(ProfiledDevice(name, "cpu", "", "cpu:0", 2) for name in ("cpu:0", "cpu:1"))
    timings = {signature: {"cpu:0": Timing(seconds, 1)} for signature in signatures_of(words_step())}
    return Profile(devices, timings)


def test_placements_of_different_kinds_are_run_once_each() -> None:
    """Everything on one device is predicted to take as long as all ops that do work: 1 ms each."""
    step, lines = words_step(), list[str]()
    checks = check_predictions(step, two_cpus(), profile_of(1e-3), report=lines.append).checks
    names = [check.placement for check in checks]
    assert names[0] == "gpu-only"  # without a GPU, all devices take their place
    assert names[-1] == "random blocks"
    assert len(set(names)) == len(names) >= 3
    assert "cpu-only" not in names  # the same placement as gpu-only
    assert lines == [f"check of {name}" for name in names]
    assert checks[0].predicted_seconds == pytest.approx(1e-3 * len(step.graph.ops))
    assert all(check.measured_seconds > 0 for check in checks)


def test_what_takes_too_long_or_runs_out_of_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_predictions(words_step(), two_cpus(), profile_of(60.0)).checks == ()
    monkeypatch.setattr(prediction_checks, "step_times", lambda *given: None)
    assert check_predictions(words_step(), two_cpus(), profile_of(1e-3)).checks == ()


def test_the_largest_factor_is_doubted_in_either_direction() -> None:
    """Half the time is as bad as twice the time, and worse than 60% too much."""
    half, more = CheckedPrediction("towers", 1.0, 2.0), CheckedPrediction("expert", 1.6, 1.0)
    profile = Profile((), {}, checks=(more, half))
    assert profile.worst_check is half
    assert profile.doubt() == "its prediction for towers was off by -50% when it was made (1 s predicted, 2 s measured)"
    close = Profile((), {}, checks=(CheckedPrediction("auto", 1.1, 1.0),))
    assert np.isclose(close.checks[0].error, 0.1)
    assert close.doubt() == Profile((), {}).doubt() == ""


def test_absurd_times_are_far_apart() -> None:
    """What a file says may be absurd: the ratio of these has no float, or has 300 digits."""
    tiny, huge = CheckedPrediction("tiny", 1e-320, 1e299), CheckedPrediction("huge", 1e299, 1e-320)
    assert Profile((), {}, checks=(CheckedPrediction("near", 3.0, 1.0), tiny)).worst_check is tiny
    assert "for tiny was off by -100% when" in Profile((), {}, checks=(tiny,)).doubt()
    assert "for huge was off by a factor of inf when" in Profile((), {}, checks=(huge,)).doubt()
