"""A translation model cut by function: encoder, decoder, attention and softmax are each kept whole."""

from collections.abc import Iterator

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.problem import Problem
from placewise.strategies.layers_modules import find_layers
from placewise.strategies.single import accelerators, settle

FUNCTIONS = ("encoder", "decoder", "attention", "projection")  # modules of the zoo's nmt; the last one is the softmax's


def split_by_function(problem: Problem) -> Ints:
    """Returns every way to give each function one of the GPUs, up to the GPUs' names: [ways, groups]; none for other models.

    With four functions there are at most 15 ways. Embeddings are with the half that they belong to.
    """
    layers, gpus = find_layers(problem), accelerators(problem)
    functions = [name.partition(".")[0] for name in layers.names]
    if not {*FUNCTIONS} <= {*functions}:
        return np.zeros((0, problem.num_groups), np.int64)
    number = np.array([FUNCTIONS.index(name) if name in FUNCTIONS else 0 for name in functions])  # [layers]
    ways = np.array(list(partitions(len(FUNCTIONS), len(gpus))))  # [ways, functions]
    return settle(problem, gpus[ways[:, number[layers.of_group]]])


def partitions(members: int, most_parts: int) -> Iterator[tuple[int, ...]]:
    """Yields every way to put members into parts, as the part of each; a part is named by when it is first used."""

    def extend(parts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(parts) == members:
            yield parts
            return
        for part in range(min(max(parts, default=-1) + 2, most_parts)):
            yield from extend((*parts, part))

    return extend(())
