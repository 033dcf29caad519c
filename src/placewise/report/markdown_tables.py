"""Tables for pages in Markdown."""

from collections.abc import Iterator, Sequence


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a Markdown table."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for cells in lines:
        yield f"| {' | '.join(cells)} |"
