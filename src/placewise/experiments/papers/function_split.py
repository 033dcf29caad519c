"""A translation model split by function: encoder, decoder, attention and softmax each stay on one GPU."""

from collections.abc import Iterator

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.grouping import module_path
from placewise.core.problem import Problem
from placewise.strategies.layers.model_layers import find_layers, group_values
from placewise.strategies.single_device import accelerators, move_to_allowed

FUNCTIONS = ("encoder", "decoder", "attention", "projection")  # modules of the zoo's nmt; the projection is the softmax's


def split_by_function(problem: Problem) -> Ints:
    """Returns every way to put each function on one of the GPUs, up to renaming them: [ways, groups]; none for other models.

    Four functions have at most 15 ways. Embeddings are with their encoder or decoder, ops in no module with the layer
    before them.
    """
    layers, gpus = find_layers(problem), accelerators(problem)
    of_layer = [_function(name) for name in layers.names]
    if not {*range(len(FUNCTIONS))} <= {*of_layer}:
        return np.zeros((0, problem.num_groups), np.int64)
    followed = np.array(of_layer)[layers.of_group]  # [groups]
    own = group_values(problem, np.array([_function(module_path(problem.graph, n)) for n in range(problem.num_ops)]))
    functions = np.where(own >= 0, own, np.maximum(followed, 0))  # [groups]
    ways = np.array(list(ways_to_share(len(FUNCTIONS), len(gpus))))  # [ways, functions]
    return move_to_allowed(problem, gpus[ways[:, functions]])


def _function(path: str) -> int:
    """Returns the number of a module's function, -1 if it has none."""
    name = path.partition(".")[0]
    return FUNCTIONS.index(name) if name in FUNCTIONS else -1


def ways_to_share(members: int, most_parts: int) -> Iterator[tuple[int, ...]]:
    """Yields every way to put members into parts, as the part of each; parts are numbered as they come into use."""

    def extend(parts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(parts) == members:
            yield parts
            return
        for part in range(min(max(parts, default=-1) + 2, most_parts)):
            yield from extend((*parts, part))

    return extend(())
