"""safetensors: what is written reads back, others' code reads it too, and what is broken is refused with one line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placewise.core.errors import StrategyError
from placewise.formats.safetensors_file import from_safetensors, read_safetensors, to_safetensors, write_safetensors

ARRAYS = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "step": np.array(7.0),
    "label": np.array([3, -1], np.int64),
    "empty": np.zeros((0, 4), np.float32),
}


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_safetensors(ARRAYS, path, {"width": "4"})
    arrays, metadata = read_safetensors(path, StrategyError)
    assert metadata == {"width": "4"}
    assert list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert np.array_equal(arrays[name], array)
        assert arrays[name].flags.writeable


def test_the_layout_by_hand() -> None:
    """One float32 of 1.0: 8 bytes of length, a header padded to 8 bytes, then 4 bytes."""
    data = to_safetensors({"a": np.array([1.0], np.float32)})
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    assert json.loads(data[8 : 8 + length]) == {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    assert data[8 + length :] == bytes([0, 0, 128, 63])


def test_the_format_is_that_of_others(tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "ours.safetensors"
    write_safetensors(ARRAYS, path)
    for name, array in theirs.load_file(path).items():
        assert np.array_equal(array, ARRAYS[name])
    arrays, _ = from_safetensors(theirs.save(ARRAYS), "theirs", StrategyError)
    assert {name: array.tolist() for name, array in arrays.items()} == {k: v.tolist() for k, v in ARRAYS.items()}


def file_of(header: Any, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "its header has no end"),
        (b"\xff" * 16, "its header has no end"),
        (file_of([]), "its header must be a dict"),
        ((3).to_bytes(8, "little") + b"{{{", "is not JSON"),
        (file_of({"__metadata__": {"a": 1}}), "__metadata__ must be a dict of texts"),
        (file_of({"a": 1}), "dtype must be one of"),
        (file_of({"a": {"dtype": "F8", "shape": [], "data_offsets": [0, 1]}}), "dtype must be one of"),
        (file_of({"a": {"dtype": [], "shape": [], "data_offsets": [0, 4]}}), "dtype must be one of"),
        (file_of({"a": {"dtype": "F32", "shape": [1] * 70, "data_offsets": [0, 4]}}, b"1234"), "at most 32 dimensions"),
        (file_of({"a": {"dtype": "F32", "shape": [0, 2**47, 2**47], "data_offsets": [0, 0]}}), "and 1,099,511,627,776"),
        (file_of({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}), "shape must be a list of whole numbers"),
        (file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}), "data_offsets must be 4 bytes apart"),
        (file_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "must be 8 bytes apart"),
        (file_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"), "inside the file"),
    ],
)
def test_broken_files_are_refused(data: bytes, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(data)
    with pytest.raises(StrategyError) as refusal:
        read_safetensors(path, StrategyError)
    assert "broken.safetensors" in str(refusal.value)
    assert rule in str(refusal.value)
    assert "\n" not in str(refusal.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**62) | st.floats() | st.text(max_size=3),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=3), inside, max_size=3),
    max_leaves=5,
)
SIZES = st.lists(st.integers(0, 3) | st.just(2**47), max_size=70)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["F32", "F64", "I64"]) | VALUES,
            "shape": SIZES | VALUES,
            "data_offsets": st.lists(st.integers(0, 16), min_size=2, max_size=2) | VALUES,
        },
    )
    | VALUES,
    st.binary(max_size=16),
)
def test_any_entry_is_read_or_refused_with_one_line(entry: Any, body: bytes) -> None:
    rules = []
    try:
        arrays, _ = from_safetensors(file_of({"a": entry}, body), "any", StrategyError)
    except StrategyError as refusal:
        rules.append(str(refusal))
    else:
        assert list(arrays) == ["a"]
    assert "\n" not in "".join(rules)
