"""What to say about a misspelt name."""

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns "did you mean 'heft'?" if a known name is close to the word, else "expected one of ..."."""
    names = list(known)
    if close := closest(word, names):
        return f"did you mean {close!r}?"
    return f"expected one of {', '.join(names)}" if names else "there are none"


def closest(word: str, known: Iterable[str]) -> str | None:
    """Returns the known name that is most like a misspelt word, whatever its case; None if none is close."""
    import difflib  # here, because only mistakes need it

    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), names, n=1)
    return names[found[0]] if found else None
