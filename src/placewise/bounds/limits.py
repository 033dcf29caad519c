"""What limits a step, in words: one home for the command `bound`, the lines under a plan and the page."""

from typing import NamedTuple


class Limit(NamedTuple):
    """What a bound is made of, as two parts of a sentence."""

    what: str  # "... takes at least 8 s"
    why: str  # follows a colon


LIMITS = {
    "host": Limit("launching the ops", "a host launches them one after the other"),
    "path": Limit("the longest chain of ops", "more devices can't shorten it"),
    "work": Limit("the work that the devices share", "only more or faster devices can shorten it"),
    "window": Limit("the work that can neither start early nor end late", "the devices have only part of the step for it"),
    "segments": Limit(
        "the longest chain of ops with its side branches", "each branch needs time on the chain's device, or copies"
    ),
}
