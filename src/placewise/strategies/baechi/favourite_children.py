"""Favourite children: the op that should follow another on its device, by SCT's linear program (Hanen and Munier 1995)."""

import numpy as np

from placewise.core.arrays import Floats, Ints


def favourite_children(
    op_seconds: Floats, sources: Ints, targets: Ints, copy_seconds: Floats, threshold: float, max_iterations: int
) -> Ints | None:
    """Returns each op's favourite child, or -1 if it has none: [ops]; None if the program took too many iterations.

    Minimises w over x_ij in [0, 1] and starts s_i >= 0, where x_ij = 0 means that j follows i on its device (as in Jeon et
    al. 2020; edges and their copy times are [edges]):

        s_i + p_i + c_ij x_ij <= s_j         for every edge
        sum_j x_ij >= number of children - 1   i has at most one favourite child
        sum_i x_ij >= number of parents - 1    j is the favourite of at most one parent
        s_i + p_i <= w

    Edges with x_ij < threshold lead to favourites; an op can't have two below 0.5. Edges without a copy have no x. An edge
    that is the only copy out of i and into j is a favourite in some best answer, so its x is fixed at 0.
    """
    num_ops = len(op_seconds)
    copied = copy_seconds > 0
    num_children = np.bincount(sources[copied], minlength=num_ops)
    num_parents = np.bincount(targets[copied], minlength=num_ops)
    alone = copied & (num_children[sources] == 1) & (num_parents[targets] == 1)
    favourites = np.full(num_ops, -1)
    favourites[sources[alone]] = targets[alone]
    chosen = np.flatnonzero(copied & ~alone)
    if len(chosen):
        x = _solve(op_seconds, sources, targets, copy_seconds, chosen, max_iterations)
        if x is None:
            return None
        near = chosen[x < threshold]
        favourites[sources[near]] = targets[near]
    return favourites


def _solve(
    op_seconds: Floats, sources: Ints, targets: Ints, copy_seconds: Floats, chosen: Ints, max_iterations: int
) -> Floats | None:
    """Returns x of the chosen edges at a vertex of the best answers, or None. The variables are x, then s, then w."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, vstack

    num_ops, num_chosen = len(op_seconds), len(chosen)
    num_variables = num_chosen + num_ops + 1

    def rows(count: int, *entries: tuple[Ints, Ints, Floats]) -> csr_array:
        row, column, value = (np.concatenate(part) for part in zip(*entries, strict=True))
        return csr_array((value, (row, column)), shape=(count, num_variables))

    def ones(count: int) -> Floats:
        return np.ones(count)

    unit = max(float(op_seconds.sum() + copy_seconds.sum()), np.finfo(np.float64).tiny)  # so that all times are below 1
    edge, x = np.arange(len(sources)), np.arange(num_chosen)
    start_before = (edge, num_chosen + sources, ones(len(edge)))
    start_after = (edge, num_chosen + targets, -ones(len(edge)))
    matrices = [rows(len(edge), start_before, start_after, (chosen, x, copy_seconds[chosen] / unit))]
    limits = [-op_seconds[sources] / unit]
    last = np.setdiff1d(np.arange(num_ops), sources)  # no other op can be the last one
    end, makespan = np.arange(len(last)), np.full(len(last), num_variables - 1)
    matrices.append(rows(len(last), (end, num_chosen + last, ones(len(last))), (end, makespan, -ones(len(last)))))
    limits.append(-op_seconds[last] / unit)
    for ends in (sources[chosen], targets[chosen]):
        nodes, node, count = np.unique(ends, return_inverse=True, return_counts=True)
        matrices.append(rows(len(nodes), (node.ravel(), x, -ones(num_chosen))))
        limits.append(1.0 - count.astype(np.float64))
    cost, upper = np.zeros(num_variables), np.full(num_variables, np.inf)
    cost[-1], upper[:num_chosen] = 1.0, 1.0
    answer = linprog(
        cost, A_ub=vstack(matrices, format="csr"), b_ub=np.concatenate(limits), method="highs-ds",
        bounds=np.stack([np.zeros(num_variables), upper], axis=1), options={"maxiter": max_iterations},
    )  # fmt: skip
    return np.asarray(answer.x[:num_chosen], np.float64) if answer.status == 0 else None
