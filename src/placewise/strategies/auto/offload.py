"""Starts for GPUs that can't hold the optimizer's state: stages on the GPUs, and as few updates as possible on the CPU.

A parameter is at home with its update. If that is the CPU, every step copies the parameter to its stage and the gradient
back, but the state needs no room on the GPU (Ren et al.: ZeRO-Offload, USENIX ATC 2021).
"""

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.core.graph import PHASES, TENSOR_KINDS
from placewise.core.labels import sum_by_label
from placewise.core.problem import Problem
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.candidates import Candidate
from placewise.strategies.layers.model_layers import find_layers, group_values, layer_bytes, layer_seconds
from placewise.strategies.layers.pipeline_order import one_forward_one_backward
from placewise.strategies.layers.placers import cut_stages
from placewise.strategies.single_device import accelerators, cpus, move_to_allowed, run_seconds

USED = 0.95  # share of a GPU's memory that stages may fill; the estimate leaves out short-lived tensors
PASSES = 3  # of moving updates back to their stages


def offloads(model: Simulator) -> list[Candidate]:
    """Returns stages with as few updates on the CPU as memory allows; none if there is no CPU besides the GPUs.

    There are two: in the order of one forward, one backward; and one micro-batch after the other, which needs less memory.
    """
    problem, gpus = model.problem, accelerators(model.problem)
    spare = [device for device in cpus(problem) if device not in gpus]
    update = group_values(problem, problem.graph.ops.phases) == PHASES.index("update")  # [groups]
    if not spare or not update.any():
        return []
    numbers = np.unique(problem.graph.ops.micro_batches)
    count = max(int((numbers >= 0).sum()), 1)
    shares = [np.full(len(gpus), 1 / count)]  # [stages], of the micro-batches that are under way
    if count > 1:
        shares.append(np.minimum(np.arange(len(gpus), 0, -1) / count, 1.0))
    found = []
    for number, share in enumerate(shares):
        stages = _stages(problem, gpus, share)  # [groups]
        _, used = np.unique(stages, return_inverse=True)
        order = np.arange(problem.num_ops)
        if number:
            order = one_forward_one_backward(problem, used[problem.op_groups], int(used.max()) + 1)
        staged = move_to_allowed(problem, gpus[stages][None])[0]
        away = move_to_allowed(problem, np.where(update, spare[0], staged)[None])[0]
        found.append(_bring_home(model, staged, away, order))
    return found


def _stages(problem: Problem, gpus: Ints, share: Floats) -> Ints:
    """Returns the stage of each group, cut as if stages held no optimizer state: [groups]."""
    layers = find_layers(problem)
    always, passing = layer_bytes(problem, layers)
    held = _state_bytes(problem)
    always = always - sum_by_label(layers.of_group, held, layers.num_layers)
    seconds = layer_seconds(problem, layers, run_seconds(problem))[:, gpus]
    room: Floats = problem.cluster.memory_bytes[gpus].astype(np.float64) * USED
    return cut_stages(seconds, always[:, None] + passing[:, None] * share, room)[layers.of_group]


def _state_bytes(problem: Problem) -> Floats:
    """Returns the bytes of the optimizer's state that is at home with each group: [groups]."""
    graph, tensors = problem.graph, problem.graph.tensors
    is_state = (tensors.kinds == TENSOR_KINDS.index("state")) & (tensors.home >= 0) & (graph.producer < 0)
    homes = problem.merged[tensors.home[is_state]]
    return sum_by_label(homes, tensors.nbytes[is_state].astype(np.float64), problem.num_groups)


def _bring_home(model: Simulator, staged: Ints, placement: Ints, order: Ints) -> Candidate:
    """Returns the placement with updates moved back to their stages, the smallest first, as long as they fit.

    `staged` [groups] has everything on the stages, `placement` [groups] has the updates elsewhere.
    """
    problem, held = model.problem, _state_bytes(model.problem)
    smallest = np.argsort(held, kind="stable")
    best = Candidate.of(model, placement, order)
    for _ in range(PASSES):
        peaks = model.simulate(best.placement[None], order[None]).peak_bytes[0]
        room = (problem.cluster.memory_bytes - peaks).astype(np.float64)  # [devices]
        away: Bools = best.placement != staged
        moved = best.placement.copy()
        for group in smallest[away[smallest]].tolist():
            if held[group] <= room[staged[group]]:
                room[staged[group]] -= held[group]
                moved[group] = staged[group]
        trial = Candidate.of(model, moved, order)
        if trial.cost >= best.cost:
            break
        best = trial
    return best
