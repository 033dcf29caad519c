"""Placements from a network's scores: greedy ones, and samples; with less room where memory turns out to be short."""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Bools, Ints
from placewise.simulate.simulator import Simulator
from placewise.strategies.learned.graph_policy.block_graph import BlockGraph
from placewise.strategies.learned.graph_policy.placing import Placed, Scorer, place_blocks

ROOMS = (1.0, 0.85, 0.7, 0.55, 0.4)  # shares of the memory that are tried until a placement fits

OFTEN = 0.5  # share of samples that do not fit with which the next ones get less room


class Drawn(NamedTuple):
    """A placement, and the share of the memory that it was made for."""

    placement: Ints  # [blocks]
    room: float


def greedy(graph: BlockGraph, scorer: Scorer, room: float = 1.0, usable: Bools | None = None) -> Ints:
    """Returns the placement of highest score, block by block, on usable devices [devices] where possible: [blocks]."""
    shape = graph.placing.block_seconds.shape
    usable = np.ones(shape[1], np.bool_) if usable is None else usable
    return np.asarray(place_blocks(graph.placing, scorer, np.zeros(shape), np.full(shape[0], -1), room, usable).placement)


def fitting(graph: BlockGraph, model: Simulator, scorer: Scorer) -> Drawn:
    """Returns the greedy placement with most room that fits, or the one that overflows least."""
    best, least = Drawn(greedy(graph, scorer), 1.0), None
    for room in ROOMS:
        placement = best.placement if least is None else greedy(graph, scorer, room)
        overflow = int(model(placement[None]).overflow_bytes[0])
        if least is None or overflow < least:
            best, least = Drawn(placement, room), overflow
        if not overflow:
            break
    return best


def place_greedily(graph: BlockGraph, model: Simulator, scorer: Scorer, most: int) -> list[Drawn]:
    """Returns the greedy placement that fits, and others for fewer devices: the 1, 2, 3 ... fastest; at most so many.

    Devices are as fast as they are for the whole step; ties go to the first.
    """
    first = fitting(graph, model, scorer)
    seconds = graph.placing.block_seconds.sum(axis=0) + np.where(graph.problem.allowed, 0.0, 1e9).sum(axis=0)
    fastest = np.argsort(seconds, kind="stable")
    found = [first]
    for count in range(1, min(len(fastest), most)):
        usable = np.zeros(len(fastest), np.bool_)
        usable[fastest[:count]] = True
        found.append(Drawn(greedy(graph, scorer, first.room, usable), first.room))
    return found


def samples(
    graph: BlockGraph, scorer: Scorer, count: int, temperature: float, room: float, rng: np.random.Generator
) -> list[Placed]:
    """Returns placements drawn from the policy: the highest of logit + Gumbel noise is a sample."""
    shape = graph.placing.block_seconds.shape
    free, usable = np.full(shape[0], -1), np.ones(shape[1], np.bool_)
    noises = (temperature * rng.gumbel(size=shape) for _ in range(count))
    return [place_blocks(graph.placing, scorer, noise, free, room, usable) for noise in noises]


def next_room(room: float, share: float) -> float:
    """Returns the room of the next samples, from that of the last ones and the share of them that did not fit."""
    if share > OFTEN:
        return max(room * 0.85, ROOMS[-1])
    return min(room / 0.95, 1.0) if share == 0 else room
