"""Profile files: what is written reads back, and what is broken is refused with one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import profile_of_two_slices

from placewise.core.errors import ProfileError
from placewise.core.profile import CheckedPrediction, Profile
from placewise.formats.profile_file import format_profile, parse_profile, read_profile, write_profile


def test_a_file_says_what_the_profile_says(tmp_path: Path) -> None:
    write_profile(profile_of_two_slices(), tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile_of_two_slices()


def test_checks_survive_their_file() -> None:
    profile = replace(
        profile_of_two_slices(), checks=(CheckedPrediction("towers", 1.5, 0.5), CheckedPrediction("m", 1e-3, 2))
    )
    assert parse_profile(json.loads(format_profile(profile))) == profile


def test_devices_that_share_hardware_survive_their_file() -> None:
    profile = profile_of_two_slices()
    unlike = tuple(replace(device, times_of=device.name, part_of="cuda:0") for device in profile.devices)
    profile = replace(profile, devices=unlike, contention={"gpu:1": profile.contention["gpu"]})
    assert parse_profile(json.loads(format_profile(profile))) == profile


def test_links_over_which_the_host_waits_survive_their_file() -> None:
    profile = profile_of_two_slices()
    links = tuple(replace(link, host_waits=i == 1) for i, link in enumerate(profile.links))
    profile = replace(profile, links=links, copy_dispatch_seconds=2e-5)
    assert parse_profile(json.loads(format_profile(profile))) == profile


def test_an_empty_profile_survives_its_file() -> None:
    assert parse_profile(json.loads(format_profile(Profile((), {})))) == Profile((), {})


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        (("format",), "placewise-plan", "format must be 'placewise-profile'"),
        (("version",), 2, "version must be 1"),
        (("devices",), {}, "devices must be a list"),
        (("devices", 0, "kind"), 3, r"devices\[0\]: kind must be text"),
        (("devices", 1, "times_of"), "gpu:7", r"devices\[1\]: times_of must be a device"),
        (("devices", 1, "part_of"), 3, r"devices\[1\]: part_of must be text"),
        (("links", 0, "bytes_per_second"), 0, r"links\[0\]: bytes_per_second must be a finite number above 0"),
        (("links", 1, "host_waits"), 1, r"links\[1\]: host_waits must be true or false, got 1"),
        (("links", 1, "to"), "gpu:7", "there is no device 'gpu:7'"),
        (("dispatch_seconds",), -1, "dispatch_seconds must be a finite number at least 0"),
        (("timings",), [], "timings must be a dict"),
        (("timings", "mm", "gpu:0", "seconds"), "fast", r"timings\['mm'\]: gpu:0: seconds must be a finite number"),
        (("timings", "mm", "gpu:9"), {}, r"timings\['mm'\]: unknown field 'gpu:9'"),
        (("contention", "gpu", "memory"), [0.5], "none below 1"),
        (
            ("checks",),
            [{"placement": "a", "predicted_seconds": 0, "measured_seconds": 1}],
            r"checks\[0\]: predicted_seconds",
        ),
        (("checks",), 3, "checks must be a list"),
        (("other",), 1, "unknown field 'other'"),
    ],
)
def test_a_broken_file_is_refused_with_its_name_and_the_rule(tmp_path: Path, path: Any, value: Any, rule: str) -> None:
    data: Any = json.loads(format_profile(profile_of_two_slices()))
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ProfileError, match=rf"broken.json: .*{rule}") as caught:
        read_profile(file)
    assert "\n" not in str(caught.value)
