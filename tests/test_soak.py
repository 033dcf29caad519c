"""A small part of `python -m tests.soak`: threads, open files and children don't grow; its verdict notices what does."""

from dataclasses import replace

import pytest
from soak.__main__ import what_grew
from soak.work import Sample, Soak


def test_a_few_rounds_leave_nothing_open() -> None:
    soak = Soak()
    held = []
    for number in (1, 1, 3, 3):
        soak.round(number)
        held.append(Sample.now(0.0))
    assert [(sample.files, sample.children) for sample in held[2:]] == [(held[1].files, held[1].children)] * 2
    threads = min(Sample.now(0.0).threads for _ in range(5))  # one that was told to end may still do so
    assert threads <= held[2].threads  # the first round of a kind may start a pool of threads, which stays


@pytest.mark.parametrize("name", ["resident_bytes", "threads", "files", "children"])
def test_the_verdict_names_what_grows(name: str) -> None:
    flat = [Sample(0.0, 1000, 4, 10, 0)] * 20
    growing = [replace(sample, **{name: int(getattr(sample, name) * (1 + i / 10) + i)}) for i, sample in enumerate(flat)]
    assert what_grew(flat) == []
    assert len(what_grew(growing)) == 1
    assert ("memory" if name == "resident_bytes" else name) in what_grew(growing)[0]
