"""Fuses chains of small ops into one op each, which a compiler makes a kernel of: a captured step becomes another one.

Ops join into a piece along the tensors that pass between them, if they are in one phase, micro-batch and block of the model
(`block_of`). A piece runs where one of its ops stood: all others move there, past nothing that they depend on or that
depends on them, so the order of everything else stays and no cycle can arise. What only a piece reads and writes is no
tensor of the graph any more.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from placewise.core.arrays import Floats, Ints, Ragged
from placewise.core.errors import CaptureError
from placewise.core.graph import PHASES, Graph, Ops, Tensors
from placewise.core.grouping import module_path
from placewise.core.labels import connected_components
from placewise.graph_capture.call_slots import slots_of, written_slots
from placewise.graph_capture.capture import CapturedStep
from placewise.graph_capture.program import Call, Layout, Program, Slot, fill_slots
from placewise.graph_capture.resolved_program import HOST_VALUE, ResolvedProgram
from placewise.rewrite.channels_last import lay_out
from placewise.rewrite.fusable_ops import DTYPE_NAMES, is_fusable
from placewise.rewrite.piece import LaidOut, Like, Piece
from placewise.rewrite.recomputing import find_repeated, is_cheap

MOST_OPS = 64  # of a piece: compilers take long for larger ones

STATISTICS = "batch_norm_with_update"  # in a name it says that a piece changes running statistics and nothing else

NAMED_OPS = 4  # how many of its ops a piece is named after

UPDATE = PHASES.index("update")

CAST = "aten._to_copy"

aten = torch.ops.aten

BY_STRIDES = frozenset({"view", "_unsafe_view", "as_strided", "_reshape_alias"})  # views of memory, not of dimensions

PORTABLE: dict[Any, Any] = {  # what reads what the forward kernel has kept -> what reads no more than a compiled one keeps
    aten.batch_norm_backward.default: aten.native_batch_norm_backward.default,
}


def fuse(step: CapturedStep) -> tuple[Graph, Program]:
    """Returns the step's graph and program with chains of small ops as one op each."""
    if step.graph.has_options:
        raise CaptureError("fuse: the graph has optional ops; fuse it before they are added")
    values = ResolvedProgram.of(step)
    program = lay_out(values)
    if program is not step.program:
        values = ResolvedProgram.of_program(step.graph, program)
    clusters = Clusters(values)
    clusters.grow()
    return _Rewriting(values, clusters).result()


def block_of(path: str, parents: frozenset[str]) -> str:
    """Returns the block of a module: its ancestor that stands in a list of blocks, or else the whole model.

    layers.3.mlp.act is in layers.3. A numbered module without modules inside, as in Sequential(Linear, ReLU), is not a
    block; `parents` are the paths of all modules that have some inside.
    """
    parts = path.split(".")
    for count, part in enumerate(parts, 1):
        if part.isdecimal() and ".".join(parts[:count]) in parents:
            return ".".join(parts[:count])
    return ""


# --- which ops are fused ---


class Clusters:
    """The ops that are one piece; every other op is alone. A cluster runs at the position of one of its ops."""

    def __init__(self, values: ResolvedProgram) -> None:
        self.graph, self.values = values.graph, values
        graph, program, o = values.graph, values.program, values.graph.ops
        self.reads, self.writes, self.after = o.reads.lists(), o.writes.lists(), o.after.lists()
        for op, call in enumerate(values.op_calls):
            if call.function in PORTABLE:
                kept = {values.storages[slot] for slot in slots_of(_portable(call))}
                self.reads[op] = [tensor for tensor in self.reads[op] if int(graph.storage[tensor]) in kept]
        self.makers, self.readers = graph.producer.tolist(), graph.readers.lists()
        self.alias_of, self.groups = graph.tensors.alias_of.tolist(), o.groups.tolist()
        self.cluster = list(range(len(o)))  # [ops]
        self.members = {op: [op] for op in range(len(o))}  # of each cluster, in program order
        self.position = list(range(len(o)))  # [clusters]
        self.users: list[list[int]] = [[] for _ in range(len(o))]
        for op in range(len(o)):
            for needed in self._needs(op):
                self.users[needed].append(op)
        gate = len(o) if program.gate is None else program.gate.first_op
        self.group_size = np.bincount(o.groups, minlength=graph.num_groups).tolist()
        for home in graph.tensors.home[graph.tensors.home >= 0].tolist():
            self.group_size[home] += len(o)  # such a group is never one of a piece alone
        self.kinds = self._kinds(gate)
        self.group_pairs: list[tuple[int, int]] = []
        self.host_sets = self._host_sets()

    def grow(self) -> None:
        """Joins ops, in program order, with those that make what they read.

        What a later op stood in the way of, as the rest of a group, is tried once more at the end.
        """
        pairs = [
            (maker, op)
            for op, kind in enumerate(self.kinds)
            if kind is not None
            for tensor in self.reads[op]
            if (maker := self.makers[tensor]) >= 0 and self.kinds[maker] == kind
        ]
        for maker, op in (*pairs, *pairs):
            self._join(self.cluster[maker], self.cluster[op])

    def _kinds(self, gate: int) -> list[Any]:
        """Returns for each op what must be equal for ops to be fused, None for one that is not: [ops]."""
        o = self.graph.ops
        paths = [module_path(self.graph, op) for op in range(len(o))]
        parents = frozenset(path[:i] for path in set(paths) for i, letter in enumerate(path) if letter == ".")
        blocks = {path: block_of(path, parents) for path in set(paths)}
        phases, micro_batches, compute = o.phases.tolist(), o.micro_batches.tolist(), o.compute.tolist()
        known: dict[Any, bool] = {}
        checked = self._checked()
        found: list[Any] = []
        for op, call in enumerate(self.values.op_calls):
            if call.function not in known:
                known[call.function] = is_fusable(call)
            if not known[call.function] or op in checked or not self._is_plain(op, call):
                found.append(None)
            elif phases[op] == UPDATE:  # only what belongs to one parameter
                found.append((UPDATE, self.groups[op], op >= gate) if self.group_size[self.groups[op]] > len(o) else None)
            else:
                found.append((phases[op], micro_batches[op], blocks[paths[op]], compute[op], o.devices[op], op >= gate))
        self._move_casts(found)
        self._move_to_updates(found)
        return found

    def _move_casts(self, kinds: list[Any]) -> None:
        """Makes a cast between two blocks part of the one that makes what it reads, or else of the one that reads it."""
        for op in range(len(kinds)):
            if kinds[op] is None or self.graph.ops.kinds[op] != CAST or len(self.reads[op]) != 1:
                continue
            maker, (phase, micro_batch, _, *rest) = self.makers[self.reads[op][0]], kinds[op]
            near = [kinds[maker]] if maker >= 0 and kinds[maker] is not None else [kinds[user] for user in self.users[op]]
            if near and all(other == near[0] for other in near) and near[0] is not None:
                other_phase, other_micro_batch, _, *other_rest = near[0]
                if (phase, micro_batch, rest) == (other_phase, other_micro_batch, other_rest):
                    kinds[op] = near[0]

    def _move_to_updates(self, kinds: list[Any]) -> None:
        """Makes what only an update reads, as a gradient's cast, part of that update."""
        phases, outputs = self.graph.ops.phases.tolist(), set(self.graph.outputs.tolist())
        for op in range(len(kinds) - 1, -1, -1):
            if kinds[op] is None or phases[op] == UPDATE or len(self.writes[op]) > 1 or not self.users[op]:
                continue
            (made,) = self.writes[op]
            wanted = {kinds[user] if phases[user] == UPDATE else None for user in self.users[op]}
            if not is_cheap(self.values.op_calls[op]) or self.alias_of[made] >= 0 or made in outputs:
                continue
            if len(wanted) == 1 and None not in wanted:
                kinds[op] = wanted.pop()

    def _checked(self) -> set[int]:
        """The ops whose results the host reads."""
        return {self.makers[self.values.storages[slot]] for slot in _read_by_host(self.values)}

    def _is_plain(self, op: int, call: Call) -> bool:
        """Whether an op only reads tensors of the step, of types that can be compiled, and makes each result anew."""
        storages = self.values.storages
        of_host = self._host_slots(op)
        if of_host and (self.graph.ops.phases[op] != UPDATE or any(slot in self.values.late_calls for slot in of_host)):
            return False
        made = [slot for slot in dict.fromkeys(call.results) if storages[slot] in self.writes[op]]
        if len({storages[slot] for slot in made}) < len(made):
            return False  # several results share memory
        shapes = [self.graph.tensors.shape_of(tensor) for tensor in (*self.reads[op], *self.writes[op])]
        return all(shape is not None and shape.dtype in DTYPE_NAMES for shape in shapes)

    def _needs(self, op: int) -> set[int]:
        """Returns the ops that must run before an op."""
        needs = {self.makers[tensor] for tensor in self.reads[op]} | set(self.after[op])
        needs |= {self.makers[self.alias_of[tensor]] for tensor in self.writes[op] if self.alias_of[tensor] >= 0}
        return needs - {-1}

    def _join(self, first: int, second: int) -> None:
        """Makes two clusters one, if that changes no meaning."""
        if first == second:
            return
        ops = [*self.members[first], *self.members[second]]
        if len(ops) > MOST_OPS or not self._may_share_group(first, second):
            return
        position = self._common_position(*sorted((first, second), key=self.position.__getitem__))
        if position is None or not self._keeps_versions(set(ops)) or not self._keeps_host_values(ops, position):
            return
        self.group_pairs.append((self.groups[first], self.groups[second]))
        for op in self.members.pop(second):
            self.cluster[op] = first
        self.members[first] = sorted(ops)
        self.position[first] = position

    def _may_share_group(self, first: int, second: int) -> bool:
        """Whether two clusters are in one group, or one of them has groups of its own only."""
        bound = [self._bound_groups(self.members[cluster]) for cluster in (first, second)]
        return not bound[0] or not bound[1] or len(bound[0] | bound[1]) == 1

    def _bound_groups(self, members: list[int]) -> set[int]:
        """Returns the groups of ops that also have other ops, or a home."""
        counts = Counter(self.groups[op] for op in members)
        return {group for group, count in counts.items() if count < self.group_size[group]}

    def _common_position(self, first: int, second: int) -> int | None:
        """Returns the position of one of two clusters where both can run, None if there is none."""
        early, late = self.position[first], self.position[second]
        if all(self._position_of(user, second, late + 1) > late for op in self.members[first] for user in self.users[op]
               if self.cluster[user] != first):  # fmt: skip
            return late
        if all(self._position_of(need, first, early - 1) < early for op in self.members[second] for need in self._needs(op)
               if self.cluster[need] != second):  # fmt: skip
            return early
        return None

    def _position_of(self, op: int, inside: int, if_inside: int) -> int:
        """Returns where an op runs; for one of the cluster `inside`, the given position."""
        cluster = self.cluster[op]
        return if_inside if cluster == inside else self.position[cluster]

    def _host_sets(self) -> dict[Slot, list[int]]:
        """Returns before which ops the host sets each of its values."""
        host = {id(call) for call in self.values.host_calls}
        found: dict[Slot, list[int]] = {}
        next_op = 0
        for call in self.values.program.calls:
            if call.op >= 0:
                next_op = call.op + 1
            elif id(call) in host:
                for slot in {*call.results, *written_slots(call)}:
                    found.setdefault(slot, []).append(next_op)
        return found

    def _keeps_host_values(self, ops: list[int], position: int) -> bool:
        """Whether ops that read values of the host read the same at a position: at the last of them."""
        last = max(ops)
        reads = [(op, slot) for op in ops for slot in self._host_slots(op)]
        return not reads or (
            position == last and not any(op < at <= last for op, slot in reads for at in self.host_sets.get(slot, ()))
        )

    def _host_slots(self, op: int) -> list[Slot]:
        return [slot for slot in slots_of(self.values.op_calls[op]) if self.values.storages[slot] == HOST_VALUE]

    def _keeps_versions(self, ops: set[int]) -> bool:
        """Whether nobody else reads what a piece has made and then overwrites."""
        for op in ops:
            for tensor in self.writes[op]:
                old = self.alias_of[tensor]
                if old >= 0 and self.makers[old] in ops and not ops.issuperset(self.readers[old]):
                    return False
        return True


# --- the new graph and program ---


@dataclass(frozen=True)
class _Fused:
    """A cluster as an op: its piece, and the slots and tensors that cross its border."""

    piece: Piece
    call: Call  # without the op's number
    reads: tuple[int, ...]  # the old graph's tensors
    writes: tuple[int, ...]
    bytes_moved: float


class _Rewriting:
    def __init__(self, values: ResolvedProgram, clusters: Clusters) -> None:
        self.graph, self.program, self.values, self.clusters = values.graph, values.program, values, clusters
        self.known: dict[Piece, Piece] = {}
        kept = {*self.program.outputs, *(check.slot for check in self.program.checks), *_read_by_host(values)}
        self.kept_storages = {values.storages[slot] for slot in kept}
        self.repeated = find_repeated(clusters, self.kept_storages)
        self.needed_outside = self._needed_outside()
        self.outputs = set(self.graph.outputs.tolist())

    def result(self) -> tuple[Graph, Program]:
        fused = {c: self._fused(c) for c in self.clusters.members if self._is_piece(c)}
        order = sorted(self.clusters.members, key=self.clusters.position.__getitem__)  # [new ops] -> clusters
        number = {cluster: op for op, cluster in enumerate(order)}
        new_op = np.array([number[cluster] for cluster in self.clusters.cluster], np.int64)  # [old ops]
        graph, new_tensor = self._graph(order, fused, new_op)
        return graph, self._program(fused, new_op, new_tensor)

    def _is_piece(self, cluster: int) -> bool:
        """Whether a cluster becomes a piece; batch norm's backward pass does also if it is alone, see PORTABLE."""
        members = self.clusters.members[cluster]
        return len(members) > 1 or cluster in self.repeated or self.values.op_calls[members[0]].function in PORTABLE

    def _needed_outside(self) -> set[int]:
        """The old graph's tensors that another cluster than their maker's reads or overwrites."""
        c, found = self.clusters, set[int]()
        for cluster in c.members:
            inside = {*c.members[cluster], *self.repeated.get(cluster, ())}
            for op in inside:
                overwritten = [c.alias_of[tensor] for tensor in c.writes[op] if c.alias_of[tensor] >= 0]
                found.update(t for t in (*c.reads[op], *overwritten) if c.makers[t] >= 0 and c.makers[t] not in inside)
        return found

    # --- a piece ---

    def _fused(self, cluster: int) -> _Fused:
        c, values, storages = self.clusters, self.values, self.values.storages
        members, repeated = c.members[cluster], self.repeated.get(cluster, [])
        ops, again = set(members), {t: op for op in repeated for t in c.writes[op]}
        made_here = {t for op in members for t in c.writes[op] if c.alias_of[t] < 0}  # storages
        viewed = self._viewed_by_strides([*repeated, *members])
        local: dict[Slot, Slot] = {}
        inputs: dict[Slot, Like | None] = {}
        given: list[Slot] = []
        calls: list[Call] = []

        def name(slot: Slot) -> Slot:
            """Returns the piece's own slot for one of the program's; adds the views and repeated ops that make it."""
            if slot in local:
                return local[slot]
            if slot in values.views:
                add(values.views[slot])
                return local[slot]
            if storages[slot] in again:
                add(values.op_calls[again[storages[slot]]])
                return local[slot]
            local[slot] = Slot(len(local))
            inputs[local[slot]] = None if storages[slot] == HOST_VALUE else self._like(slot)
            given.append(slot)
            return local[slot]

        def add(call: Call) -> None:
            call = _portable(call)
            renamed = {slot: name(slot) for slot in slots_of(call)}
            for slot in call.results:
                local.setdefault(slot, Slot(len(local)))
            kwargs = {key: fill_slots(value, renamed) for key, value in call.kwargs.items()}
            calls.append(
                Call(call.function, fill_slots(call.args, renamed), kwargs, tuple(local[s] for s in call.results), -1)
            )
            for slot in call.results:
                if slot not in values.views and storages[slot] in viewed:
                    laid_out = LaidOut(self._layout(slot).strides)
                    calls.append(Call(laid_out, (local[slot],), {}, (local[slot],), -1))

        leaving: list[Slot] = []
        for op in members:
            call = values.op_calls[op]
            add(call)
            fresh = [slot for slot in dict.fromkeys(call.results) if storages[slot] in c.writes[op]]
            leaving += [slot for slot in fresh if slot not in leaving and self._leaves(storages[slot], ops)]
        results = {local[slot]: self._like(slot) for slot in leaving}
        overwritten = {storages[slot] for slot in given} & self._overwritten(members)
        written = tuple(i for i, slot in enumerate(given) if storages[slot] in overwritten)
        piece = Piece.of("", inputs, calls, results, written)
        piece = replace(piece, name=_name([self.graph.ops.kinds[op] for op in members], piece.only_updates_statistics))
        piece = self.known.setdefault(piece, piece)
        inside = [*repeated, *members]
        here = set(inside)
        reads = dict.fromkeys(t for op in inside for t in c.reads[op] if c.makers[t] not in here)
        writes = [storages[slot] for slot in leaving]
        for op in members:  # in place: the first version stands for all that are made here
            for tensor in c.writes[op]:
                old = c.alias_of[tensor]
                if old >= 0 and c.makers[old] not in ops:
                    writes.append(tensor)
        assert all(storages[slot] in made_here for slot in leaving)
        call = Call(piece, tuple(given), {}, tuple(leaving), -1)
        made_here |= again.keys()
        bytes_moved = self._border_bytes(inside, leaving, made_here)
        return _Fused(piece, call, tuple(reads), tuple(writes), bytes_moved)

    def _viewed_by_strides(self, ops: list[int]) -> set[int]:
        """Returns the storages of which ops read views that their strides decide; kernels may make others."""
        found: set[int] = set()
        waiting = [slot for op in ops for slot in slots_of(self.values.op_calls[op])]
        seen = set(waiting)
        while waiting:
            view = self.values.views.get(slot := waiting.pop())
            if view is None:
                continue
            if isinstance(view.function, OpOverload) and view.function._overloadpacket.__name__ in BY_STRIDES:
                found.add(self.values.storages[slot])
            waiting += [source for source in slots_of(view) if source not in seen]
            seen.update(slots_of(view))
        return found - {HOST_VALUE}

    def _leaves(self, storage: int, ops: set[int]) -> bool:
        """Whether something outside reads or overwrites a storage that a piece has made."""
        versions = [t for op in ops for t in self.clusters.writes[op] if self.graph.storage[t] == storage]
        return storage in self.kept_storages or any(t in self.needed_outside or t in self.outputs for t in versions)

    def _overwritten(self, members: list[int]) -> set[int]:
        """The storages that ops write in place."""
        c = self.clusters
        return {int(self.graph.storage[t]) for op in members for t in c.writes[op] if c.alias_of[t] >= 0}

    def _like(self, slot: Slot) -> Like:
        layout = self._layout(slot)
        shape = self.graph.tensors.shape_of(self.values.storages[slot])
        assert shape is not None
        return Like(getattr(torch, shape.dtype), layout.sizes, layout.strides)

    def _layout(self, slot: Slot) -> Layout:
        layout = self.program.layouts[slot]
        assert layout is not None
        return Layout(tuple(layout.sizes), tuple(layout.strides))

    def _border_bytes(self, members: list[int], leaving: list[Slot], made_here: set[int]) -> float:
        """Returns the bytes that a piece reads from outside and leaves there: each element once."""
        read: dict[int, dict[Slot, None]] = {}
        for op in members:
            for slot in slots_of(self.values.op_calls[op]):
                if self.values.storages[slot] not in (*made_here, HOST_VALUE):
                    read.setdefault(self.values.storages[slot], {})[slot] = None
        nbytes = self.graph.tensors.nbytes
        total = sum(min(sum(map(self._slot_bytes, views)), int(nbytes[storage])) for storage, views in read.items())
        total += sum(map(self._slot_bytes, leaving))
        total += sum(int(nbytes[storage]) for storage in self._overwritten(members) - made_here)
        return float(total)

    def _slot_bytes(self, slot: Slot) -> int:
        layout = self._layout(slot)
        elements = 1
        for size, stride in zip(layout.sizes, layout.strides, strict=True):
            elements *= size if stride or not size else 1
        return elements * self._like(slot).dtype.itemsize

    # --- the graph ---

    def _graph(self, order: list[int], fused: dict[int, _Fused], new_op: Ints) -> tuple[Graph, Ints]:
        """Returns the new graph, and for each of the old tensors its new number, -1 for none."""
        old, c = self.graph, self.clusters
        new_tensor = self._new_tensors(fused)
        stays = np.zeros(len(old.tensors), np.bool_)
        for tensor, number in enumerate(new_tensor.tolist()):
            stays[tensor] = number == tensor
        rank = np.cumsum(stays) - 1
        new_tensor = np.where(new_tensor >= 0, rank[new_tensor], -1)
        groups = connected_components(old.num_groups, c.group_pairs)
        names, kinds, reads, writes, after = [], [], [], [], []
        counts: dict[str, int] = {}
        taken = {old.ops.names[cluster] for cluster in order if cluster not in fused}
        late_readers = self._late_readers()
        for op, cluster in enumerate(order):
            members = c.members[cluster]
            if cluster in fused:
                names.append(self._fused_name(fused[cluster], members, counts, taken))
                kinds.append(f"fused.{fused[cluster].piece.name}")
                reads.append(_mapped(fused[cluster].reads, new_tensor))
                writes.append(_mapped(fused[cluster].writes, new_tensor))
            else:
                names.append(old.ops.names[cluster])
                kinds.append(old.ops.kinds[cluster])
                reads.append(_mapped(c.reads[cluster], new_tensor))
                writes.append(_mapped(c.writes[cluster], new_tensor))
            earlier = {*(e for member in members for e in c.after[member]), *late_readers.get(cluster, ())}
            after.append(sorted({int(new_op[e]) for e in earlier} - {op}))
        o, last = old.ops, np.array([c.members[cluster][-1] for cluster in order], np.int64)
        moved = [fused[k].bytes_moved if k in fused else float(o.bytes_moved[k]) for k in order]
        ops = Ops(
            names=tuple(names),
            kinds=tuple(kinds),
            phases=o.phases[last],
            groups=groups[o.groups[last]],
            reads=Ragged.of(reads),
            writes=Ragged.of(writes),
            after=Ragged.of(after),
            flops=np.bincount(new_op, weights=o.flops, minlength=len(order)).astype(np.float64)
            + self._repeated_flops(order),
            bytes_moved=np.array(moved, np.float64),
            devices=tuple([o.devices[op] for op in last.tolist()]),
            micro_batches=o.micro_batches[last],
            compute=o.compute[last],
        )
        t = old.tensors
        kept = np.flatnonzero(stays)
        tensors = Tensors(
            names=tuple([t.names[i] for i in kept.tolist()]),
            nbytes=t.nbytes[kept],
            kinds=t.kinds[kept],
            home=np.append(groups, -1)[t.home[kept]],
            alias_of=np.append(new_tensor, -1)[t.alias_of[kept]],
            shapes=t.shapes,
            shape=t.shape[kept],
        )
        outputs = np.array(list(dict.fromkeys(new_tensor[old.outputs].tolist())), np.int64)
        return replace(old, tensors=tensors, ops=ops, outputs=outputs), new_tensor

    def _late_readers(self) -> dict[int, list[int]]:
        """Returns for each cluster that overwrites something the clusters that read it because they repeat an op."""
        c, readers = self.clusters, dict[int, list[int]]()
        for cluster, ops in self.repeated.items():
            for tensor in dict.fromkeys(tensor for op in ops for tensor in c.reads[op]):
                readers.setdefault(tensor, []).append(cluster)
        found: dict[int, list[int]] = {}
        for tensor, old in enumerate(c.alias_of):
            if old in readers:
                found.setdefault(c.cluster[c.makers[tensor]], []).extend(readers[old])
        return found

    def _repeated_flops(self, order: list[int]) -> Floats:
        """Returns the flops of what each cluster repeats: [new ops]."""
        flops = self.graph.ops.flops
        return np.array([float(flops[self.repeated.get(cluster, [])].sum()) for cluster in order])

    def _new_tensors(self, fused: dict[int, _Fused]) -> Ints:
        """Returns for each tensor the one that stands for it: itself, an earlier version from the same piece, or -1."""
        c, storage = self.clusters, self.graph.storage.tolist()
        found = np.arange(len(self.graph.tensors))
        for cluster, one in fused.items():
            standing = {storage[tensor]: tensor for tensor in one.writes}
            for op in c.members[cluster]:
                for tensor in c.writes[op]:
                    found[tensor] = standing.get(storage[tensor], -1)
        return found

    def _fused_name(self, fused: _Fused, members: list[int], counts: dict[str, int], taken: set[str]) -> str:
        """Returns a name like those of other ops: the path of the modules that a piece is in, what it does, the phase."""
        paths = [module_path(self.graph, op).split(".") for op in members]
        common = paths[0]
        for path in paths[1:]:
            same = [a == b for a, b in zip(common, path, strict=False)]
            common = common[: same.index(False) if False in same else len(same)]
        phase = int(self.graph.ops.phases[members[-1]])
        suffix = f".{PHASES[phase]}" if phase else ""
        name = ".".join([*filter(None, common), f"fused_{fused.piece.name}"]) + suffix
        while True:
            count = counts[name] = counts.get(name, -1) + 1
            unique = f"{name}_{count}" if count else name
            if unique not in taken:
                return unique

    # --- the program ---

    def _program(self, fused: dict[int, _Fused], new_op: Ints, new_tensor: Ints) -> Program:
        """Returns the new program: calls in their old order, each piece where it runs, views where they are first read."""
        old, c = self.program, self.clusters
        calls: list[Call] = []
        made: set[int] = set()  # ids of the calls of views

        def add_views(slots: Iterable[Slot]) -> None:
            for slot in slots:
                view = self.values.views.get(slot)
                if view is not None and id(view) not in made:
                    made.add(id(view))
                    add_views(slots_of(view))
                    calls.append(view)

        views = {id(view) for view in self.values.views.values()}
        for call in old.calls:
            if id(call) in views:
                continue
            if call.op >= 0:
                cluster = c.cluster[call.op]
                if c.position[cluster] != call.op:
                    continue
                call = (fused[cluster].call if cluster in fused else call)._replace(op=int(new_op[call.op]))
            add_views(slots_of(call))
            calls.append(call)
        add_views(dict.fromkeys([*old.outputs, *(check.slot for check in old.checks)]))
        residents = tuple(r._replace(tensor=int(new_tensor[r.tensor])) if r.tensor >= 0 else r for r in old.residents)
        gate = old.gate
        if gate is not None:
            before = {int(new_op[op]) for op in range(gate.first_op)}
            gate = gate._replace(first_op=len(before))
        return replace(old, calls=tuple(calls), residents=residents, gate=gate)


def _portable(call: Call) -> Call:
    """Returns a call as it is in a piece."""
    if call.function not in PORTABLE:
        return call
    *args, mask = call.args[: len(call.args) - 1]  # without what cuDNN has kept
    if len(call.results) == len(mask):  # also of gradients that nobody needs
        mask = [True] * len(mask)
    return call._replace(function=PORTABLE[call.function], args=(*args, mask))


def _read_by_host(values: ResolvedProgram) -> set[Slot]:
    """Returns the tensors that the host reads numbers from in the middle of the step."""
    return {slot for call in values.late_calls.values() for slot in slots_of(call) if values.storages[slot] != HOST_VALUE}


def _mapped(tensors: Iterable[int], new_tensor: Ints) -> list[int]:
    """Returns the new numbers of tensors, each once."""
    return list(dict.fromkeys(int(new_tensor[tensor]) for tensor in tensors))


def _name(kinds: list[str], is_batch_norm: bool) -> str:
    """Returns a name for a piece: its first few kinds of op; batch norm comes first if nothing else is changed."""
    names = dict.fromkeys(kind.rpartition(".")[2].strip("_") for kind in kinds)
    if is_batch_norm:
        return "_".join([STATISTICS, *[name for name in names if name != STATISTICS][: NAMED_OPS - 1]])
    return "_".join(["batch_norm" if name == STATISTICS else name for name in list(names)[:NAMED_OPS]])
