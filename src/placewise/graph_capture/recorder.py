"""Records the ops that run on the meta device as a graph and a program."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from placewise.core.errors import CaptureError
from placewise.graph_capture.early_values import EarlyValue, compute_early, find_early
from placewise.graph_capture.error_guards import find_error_guard
from placewise.graph_capture.graph_builder import BACKWARD, FORWARD, UPDATE, GraphBuilder
from placewise.graph_capture.host_scalars import HostScalar
from placewise.graph_capture.known_values import KnownValues
from placewise.graph_capture.meta_kernels import MetaKernels, signature
from placewise.graph_capture.op_costs import (
    OpFacts,
    OwnFacts,
    bytes_moved,
    compute_type,
    device_kinds,
    estimated_flops,
    without_statistics,
)
from placewise.graph_capture.own_ops import OwnOp
from placewise.graph_capture.program import HERE, Call, Check, Precondition, Resident, Slot
from placewise.graph_capture.program_builder import ProgramBuilder
from placewise.graph_capture.random_draws import STATE_BYTES, Draw, DrawAgain
from placewise.graph_capture.random_tape import RandomTape, TapedDraw
from placewise.graph_capture.step_numbers import StepNumber
from placewise.graph_capture.views import View, Views

SUFFIXES = ("", ".backward", ".update")  # of the names of ops, by phase

_current_node = torch._C._current_autograd_node

_sequence_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class _LateRead(NamedTuple):
    """A tensor that the host reads a number from: its view, which version of it, and the op that made that."""

    view: View
    version: int
    maker: int


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every op that runs under it in a graph and a program."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = GraphBuilder()
        self.program = ProgramBuilder()
        self.views = Views(self.graph, self.program)
        self.kernels = MetaKernels()
        self.tape = RandomTape()
        self.known = KnownValues()
        self.numbers: list[StepNumber] = []  # that Python code has read with item()
        self.phase, self.micro_batch, self.path = FORWARD, -1, ""
        self.home = "cpu"  # the kind of device that the user's model is on
        self.real: dict[Slot, Tensor] = {}  # buffers and inputs that have values -> the user's own tensors
        self.originals: dict[int, str] = {}  # storage of a parameter that the user gave -> name: the step must not use it
        self.left: dict[int, str] = {}  # storage of a tensor that an earlier step has left in the model -> where
        self.reads_left: dict[str, None] = {}  # those of them that the step reads
        self._facts: dict[Any, OpFacts] = {}
        self._known_flops: dict[Any, float] = {}
        self._paths: dict[int, str] = {}  # autograd's sequence number -> the module path of the forward op
        self._name_counts: dict[str, int] = {}
        self._late: dict[Slot, _LateRead] = {}  # by the slot of the tensor
        self._meta_constants: dict[int, tuple[Tensor, Tensor]] = {}  # storage -> a tensor with data, its meta copy
        self._outer_storages: set[int] = set()  # of constants that existed before the step

    # --- tensors that exist before the step starts ---

    def add_resident(
        self, tensor: Tensor, kind: str, name: str, key: str | int = "", owner: str = "", real: Tensor | None = None
    ) -> None:
        """Adds a tensor that exists when the step starts, unless its storage has been added already.

        `real` is the user's tensor, of which this one is the meta copy.
        """
        if self.views.has_storage(tensor):
            return
        label = f"{name}.{key}" if kind == "state" else name
        if kind == "input" and isinstance(key, int) and key >= 0:
            label = f"{name}[micro-batch {key}]"
        number = self.views.add_storage(tensor, label, kind, owner)
        slot = self.views.find_or_add(tensor).slot
        self.program.residents.append(Resident(slot, number, kind, name, key, None, meta_like(tensor)))
        if real is not None and not real.is_meta:
            self.real[slot] = real

    def add_constant(self, meta: Tensor, value: Tensor | None) -> None:
        """Adds a constant: its meta copy, and its value if it has one."""
        name = f"constant_{len(self.program.residents)}"
        number = self.views.add_storage(meta, name, "constant")
        slot = self.views.find_or_add(meta).slot
        self.program.residents.append(Resident(slot, number, "constant", name, "", value, meta_like(meta)))

    def set_owner(self, tensor: Tensor, owner: str) -> None:
        """Sets the parameter that a tensor (its gradient) belongs to."""
        self.graph.tensor_owners[self.tensor_of(tensor)] = owner

    def tensor_of(self, tensor: Tensor) -> int:
        """Returns the graph's tensor with the newest value of this one's storage."""
        return self.views.newest[tensor.untyped_storage()._cdata]

    def meta_constant(self, value: Tensor) -> Tensor:
        """Returns the meta copy of a tensor with data that existed before the step, which is a constant."""
        self._refuse_original(value)
        address = value.untyped_storage()._cdata
        _, meta = self._meta_constants.get(address, (value, None))
        if meta is None or meta.size() != value.size() or meta.stride() != value.stride():
            meta = meta_like(value)
            self._meta_constants[address] = (value, meta)
            self.add_constant(meta, value)
            self._outer_storages.add(meta.untyped_storage()._cdata)
        return meta

    def where(self) -> str:
        """Returns the place in the step that is being recorded, as the end of an error message."""
        if self.phase == UPDATE:
            return ", in the optimizer's update"
        path = self._module_path()
        return f", in module {path!r}" if path else ""

    def needs_value(self, what: str, tensor: Tensor | None = None) -> CaptureError:
        """Returns the error of a step that reads a tensor's value."""
        if tensor is not None and self.known.find(tensor) is not None:
            return CaptureError(
                f"the step depends on a random number: {what} decides by it what runs{self.where()}: switch this off "
                "(layerdrop or stochastic depth with a probability of 0)"
            )
        return CaptureError(f"the step depends on data: {what} needs the value of a tensor{self.where()}")

    def known_value(self, tensor: Tensor) -> Any:
        """Returns the value of a tensor if it is known, else None; every step checks what is only assumed."""
        known = self.known.find(tensor)
        if known is None or not known.is_certain:
            return None
        if known.unless:
            self.program.checks.append(Check(self._input(tensor).slot, bool(known.lowest), known.unless + self.where()))
        return known.lowest

    def passing_value(self, tensor: Tensor) -> bool | None:
        """Returns the value with which a condition raises no error, and every step checks it; None if more depends on it."""
        guard = find_error_guard() if self.phase == FORWARD else None
        if guard is None or self.maker(tensor) < 0 or self.graph.alias_of[self.tensor_of(tensor)] >= 0:
            return None
        text = f"the model's own check fails: {guard.text}{self.where()}"
        self.program.checks.append(Check(self._input(tensor).slot, guard.outcome, text))
        return guard.outcome

    def early_value(self, tensor: Tensor, what: str) -> Any:
        """Returns the value of a tensor that is known before the step runs, as Python has it; None if it is not known.

        A float that is not the same in every step is not known either.
        """
        slot = self._input(tensor).slot
        early = self._find_early(slot)
        if early is None or (tensor.is_floating_point() and any(leaf in self.real for leaf in early.leaves)):
            return None
        outcome = early.value.tolist()
        if any(leaf in self.real for leaf in early.leaves):
            text = f"{what} decides what the step does{self.where()}"
            self.program.preconditions[slot, what] = Precondition(slot, early.calls, early.leaves, outcome, text)
        return outcome

    def is_early(self, tensor: Tensor) -> bool:
        """Returns whether the value of a tensor is known before the step runs."""
        return self._find_early(self._input(tensor).slot) is not None

    def is_same_in_every_step(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is computed from constants, and buffers that the step leaves alone."""
        view = self.views.find(tensor)
        early = None if view is None else self._find_early(view.slot)
        newest = frozenset(self.views.newest.values())
        steady = {r.slot for r in self.program.residents if r.kind == "buffer" and r.tensor in newest}
        return early is not None and all(leaf in steady or leaf not in self.real for leaf in early.leaves)

    def real_buffer(self, name: str) -> Tensor | None:
        """Returns the user's own tensor of a buffer, if it has values."""
        slot = next((r.slot for r in self.program.residents if (r.kind, r.name) == ("buffer", name)), None)
        return None if slot is None else self.real.get(slot)

    def _with_early_sizes(self, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Tensor | None:
        """Returns the result of an op whose sizes depend on data that is known before the step runs; they must stay."""
        tensors = [tensor for tensor in args if isinstance(tensor, Tensor)]
        if torch.Tag.dynamic_output_shape not in func.tags or len(func._schema.returns) != 1:
            return None
        early = [self._find_early(self._input(tensor).slot) for tensor in tensors]
        if not early or None in early:
            return None
        found = [value for value in early if value is not None]
        call = Call(func, self._template(args), kwargs, (self.program.new_slot(),), -1)
        needed = {id(earlier) for value in found for earlier in value.calls}
        calls = (*[earlier for earlier in self.program.calls if id(earlier) in needed], call)
        leaves = tuple(dict.fromkeys(leaf for value in found for leaf in value.leaves))
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            real = compute_early(call.results[0], calls, {**self.real, **self._constants()})
        if any(leaf in self.real for leaf in leaves):
            text = f"the number of entries that {facts.kind} finds decides what the step does{self.where()}"
            slot = call.results[0]
            self.program.preconditions[slot, ""] = Precondition(slot, calls, leaves, list(real.shape), text, True)
        return torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device="meta")

    def _constants(self) -> dict[Slot, Tensor]:
        return {r.slot: r.value for r in self.program.residents if r.kind == "constant" and r.value is not None}

    def _find_early(self, slot: Slot) -> EarlyValue | None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return find_early(slot, self.program.calls, self.views.storages, {**self.real, **self._constants()})

    def step_number(self, tensor: Tensor, what: str) -> StepNumber:
        """Returns the number in a tensor, which may leave the step."""
        self.numbers.append(StepNumber.of(tensor, self.needs_value(f"computing with what {what} returned")))
        return self.numbers[-1]

    def _refuse_original(self, tensor: Tensor) -> None:
        name = self.originals.get(tensor.untyped_storage()._cdata)
        if name is not None:
            raise CaptureError(
                f"the step uses {name!r} of the original model, not of its copy on the meta device: "
                f"access it through the model that is called{self.where()}"
            )

    # --- ops ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = OpFacts(func)
        if not facts.recorded:
            return func(*args, **kwargs)
        if self.phase == FORWARD or self.path:
            self._paths.setdefault(_sequence_number() - 1, self.path)
        tensors: list[Tensor] = []
        collect(args, tensors)
        if kwargs:
            collect(kwargs.values(), tensors)
        if facts.batch_norm is not None:
            args = without_statistics(facts, args)
            tensors = []
            collect(args, tensors)
        num_meta = sum([tensor.is_meta for tensor in tensors])
        if num_meta < len(tensors):
            if not num_meta and self.phase == UPDATE:
                return self._host_op(func, args, kwargs, tensors)
            args, kwargs = self._without_host_tensors(args, not num_meta), self._without_host_tensors(kwargs, not num_meta)
            tensors = []
            collect((args, kwargs.values()), tensors)
            tensors = [tensor for tensor in tensors if tensor.is_meta]
        return self._record(func, facts, args, kwargs, tensors)

    def record_own(self, function: OwnOp, args: Any, kwargs: Any) -> list[Tensor]:
        """Records an op of ours; returns its results on the meta device."""
        if self.phase == FORWARD or self.path:
            self._paths.setdefault(_sequence_number() - 1, self.path)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            tensors = [value for value in args if isinstance(value, Tensor)]
            return list(self._record(function, OwnFacts(function), args, kwargs, tensors))

    @property
    def last_op(self) -> int:
        """The graph's op that was recorded last."""
        return len(self.graph.op_names) - 1

    def maker(self, tensor: Tensor) -> int:
        """Returns the graph's op that made the newest value of a tensor's storage; -1 if no op did."""
        version, writes = self.tensor_of(tensor), self.graph.writes
        return next((op for op in reversed(range(len(writes))) if version in writes[op]), -1)

    def _record(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        inputs = [] if facts.shape_only else [self._input(tensor) for tensor in tensors]
        if facts.random and any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            raise CaptureError(
                f"{facts.kind} draws from a generator of its own, which can't be recorded: leave it out, and seed the "
                f"default one before training{self.where()}"
            )
        repeated = self.tape.next_repeated((func, signature(args)), self.where()) if facts.random else None
        if repeated is not None:
            inputs.append(self._input(self._saved_state(repeated)))
        late = self._read_late(args, kwargs, inputs) if self.program.scalars else ()
        out = self._run(func, facts, args, kwargs)
        results: list[Tensor] = []
        collect((out,), results)
        if not results and not facts.mutated:
            return out
        if facts.changes_shape:
            return self._reshaped(facts, out)
        newest = self.views.newest
        fresh = [t for t in results if t.untyped_storage()._cdata not in newest]
        op = -1
        if fresh or facts.mutated:
            op = self._add_op(func, facts, args, kwargs, inputs, tensors, fresh, out)
        elif None not in [self.views.find(t) for t in results]:
            return out  # a detach, or a view that has a slot already
        call_args = (meta_like(args[0]), *args[1:]) if facts.shape_only else self._template(args)
        call_kwargs = {key: self._template(value) for key, value in kwargs.items()} if kwargs else {}
        if facts.takes_device:
            call_kwargs["device"] = HERE
        self.graph.colocated += [(maker, op) for maker in late]
        function = func
        if repeated is not None:
            function, call_args = DrawAgain(func), (inputs[-1].slot, *call_args)
            self.graph.colocated.append((repeated.op, op))
        elif facts.random:
            self.tape.draws.append(TapedDraw((func, signature(args)), op, len(self.program.calls)))
        self.program.call(function, call_args, call_kwargs, [self.views.find_or_add(t).slot for t in results], op)
        return out

    def late_number(self, tensor: Tensor) -> HostScalar:
        """Returns the number in a tensor, which the host reads in the middle of the step."""
        view = self._input(tensor)
        version = self.views.newest[view.storage]
        maker = self.maker(tensor)
        if maker < 0:
            raise self.needs_value("item()")
        slot = self.program.late_number(view.slot)
        self._late[view.slot] = _LateRead(view, version, maker)
        return HostScalar.of(1 + slot * math.pi * 1e-6, slot, self.program)  # unlike any other number

    def _read_late(self, args: Any, kwargs: Any, inputs: list[View]) -> list[int]:
        """Adds the tensors that late numbers among the arguments come from to the inputs; returns the ops that made them."""
        makers = []
        for value in tree_leaves((args, kwargs)):
            slot = self.program.scalars.get(value) if type(value) is float else None
            for read in [self._late[tensor] for tensor in self.program.tensors_behind(slot)] if slot is not None else ():
                if self.views.newest[read.view.storage] != read.version:
                    raise CaptureError("the optimizer changes a tensor after it has read a number from it")
                inputs.append(read.view)
                makers.append(read.maker)
        return makers

    def _saved_state(self, draw: TapedDraw) -> Tensor:
        """Returns the generator's state before a draw; the op that draws gets it as one more output."""
        if draw.state is None:
            draw.state = torch.empty(STATE_BYTES, dtype=torch.uint8, device="meta")
            name = f"{self.graph.op_names[draw.op]}:generator"
            self.graph.writes[draw.op].append(self.views.add_storage(draw.state, name, "activation"))
            call = self.program.calls[draw.call]
            results = (*call.results, self.views.find_or_add(draw.state).slot)
            self.program.calls[draw.call] = call._replace(function=Draw(call.function), results=results)
        return draw.state

    def _reshaped(self, facts: OpFacts, out: Tensor) -> Tensor:
        """Records a tensor that an op has made another view of its storage, in place."""
        if facts.name in ("resize_", "set_"):
            raise CaptureError(f"{facts.kind} replaces a tensor's memory, which can't be recorded{self.where()}")
        self.views.find_or_record(out)
        return out

    def _run(self, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        if isinstance(func, OwnOp):
            return func.on_meta(*args, **kwargs)
        if facts.name == "_local_scalar_dense":
            if (value := self.early_value(args[0], "a number or a condition")) is not None:
                return value
            if args[0].dtype is torch.bool and (passing := self.passing_value(args[0])) is not None:
                return passing
            raise self.needs_value("a number or a condition")
        try:
            return self.kernels.run(func, facts, args, kwargs)
        except NotImplementedError:
            if (out := self._with_early_sizes(func, facts, args, kwargs)) is not None:
                return out
            if "sparse" in facts.name:
                raise CaptureError(
                    f"{facts.kind}: sparse tensors and sparse gradients can't be recorded{self.where()}"
                ) from None
            if facts.name == "_to_copy" and kwargs.get("device") is not None:
                raise CaptureError(
                    f"the step moves a tensor to {kwargs['device']} while it saves or restores it (save_on_cpu), which "
                    f"can't be recorded: the plan decides where tensors are{self.where()}"
                ) from None
            raise CaptureError(
                f"{facts.kind} can't run on the meta device: the size of its output depends on data (a mask as an "
                f"index, nonzero, unique), or torch has no meta kernel for it{self.where()}"
            ) from None

    def _add_op(
        self, func: Any, facts: OpFacts, args: Any, kwargs: Any, inputs: list[View], tensors: list[Tensor],
        fresh: list[Tensor], out: Any,
    ) -> int:  # fmt: skip
        g, newest, number = self.graph, self.views.newest, len(self.graph.op_names)
        reads = list(dict.fromkeys([newest[view.storage] for view in inputs]))
        written = [self.views.find_or_add(t) for t in self._written(facts, args, kwargs)] if facts.mutated else []
        owner = self._owner(reads, written) if self.phase == UPDATE else ""
        path = owner or self._module_path()
        name = self._unique(f"{path}.{facts.name}{SUFFIXES[self.phase]}" if path else facts.name + SUFFIXES[self.phase])
        after: dict[int, None] = {}
        writes: list[int] = []
        for storage in dict.fromkeys([view.storage for view in written]):
            after |= dict.fromkeys(g.readers[newest[storage]])
            newest[storage] = g.add_version(newest[storage], owner)
            writes.append(newest[storage])
        kind = "gradient" if self.phase == BACKWARD else "activation"
        for i, tensor in enumerate(fresh):
            if not self.views.has_storage(tensor):  # two outputs may share a storage
                writes.append(self.views.add_storage(tensor, name if i == 0 else f"{name}:{i}", kind, owner))
        for read in reads:
            g.readers[read].append(number)
        outputs = [self.views.find_or_add(t) for t in fresh] + written
        g.op_names.append(name)
        g.op_kinds.append(facts.kind)
        g.phases.append(self.phase)
        g.micro_batches.append(self.micro_batch)
        g.reads.append(reads)
        g.writes.append(writes)
        g.after.append(list(after))
        g.flops.append(self._flops(func, facts, args, kwargs, inputs, outputs, out))
        g.bytes_moved.append(bytes_moved(facts, inputs, outputs, written))
        dtype = tensors[0].dtype if tensors else None
        g.compute.append(compute_type(facts, dtype))
        g.devices.append(device_kinds(facts.name, dtype))
        g.owners.append(owner)
        return number

    def _owner(self, reads: list[int], written: list[View]) -> str:
        """Returns the parameter that an op of the update belongs to; "" if it combines tensors of several parameters."""
        owners = dict.fromkeys([owner for t in reads if (owner := self.graph.tensor_owners[t])])
        if len(owners) > 1:
            owners = dict.fromkeys([self.graph.tensor_owners[self.views.newest[view.storage]] for view in written])
        return next(iter(owners), "")

    def _written(self, facts: OpFacts, args: Any, kwargs: Any) -> list[Tensor]:
        """Returns the tensors that an op writes in place."""
        found: list[Tensor] = []
        if facts.batch_norm is not None and not args[facts.batch_norm[1]]:
            return found
        for key in facts.mutated:
            if isinstance(key, int):
                collect(args[key : key + 1], found)
            elif key in kwargs:
                collect((kwargs[key],), found)
        if any(not tensor.is_meta or tensor.untyped_storage()._cdata in self._outer_storages for tensor in found):
            raise CaptureError(
                f"{facts.kind} changes a tensor in place that is not a parameter, a buffer or a tensor of the step: "
                f"register it as a buffer{self.where()}"
            )
        return found

    def _flops(
        self, func: Any, facts: OpFacts, args: Any, kwargs: Any, inputs: list[View], outputs: list[View], out: Any
    ) -> float:
        if facts.flops_formula is None:
            return estimated_flops(facts, inputs, outputs)
        key = (func, signature(args))
        if key not in self._known_flops:
            self._known_flops[key] = float(facts.flops_formula(*args, **kwargs, out_val=out))
        return self._known_flops[key]

    def _host_op(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Runs and records an op on host tensors: the optimizer's step counters and learning rate."""
        if func is torch.ops.aten._local_scalar_dense.default:
            raise CaptureError("the optimizer reads a number that changes from step to step in a way that can't be recorded")
        for tensor in tensors:
            self._refuse_original(tensor)
            self.program.host_slot(tensor)  # a new constant must keep its value from before the call
        out = func(*args, **kwargs)
        results: list[Tensor] = []
        collect((out,), results)
        template = {key: self._template(value) for key, value in kwargs.items()}
        self.program.call(func, self._template(args), template, map(self.program.result_slot, results))
        return out

    # --- names ---

    def _module_path(self) -> str:
        """Returns the path of the module that is running; a backward op has the path of its forward op."""
        node = _current_node() if self.phase == BACKWARD else None
        if node is None or self.path:
            return self.path
        if (variable := getattr(node, "variable", None)) is not None:  # AccumulateGrad
            return self.graph.tensor_names[self.tensor_of(variable)].rpartition(".")[0]
        return self._paths.get(node._sequence_nr(), "")

    def _unique(self, name: str) -> str:
        count = self._name_counts[name] = self._name_counts.get(name, -1) + 1
        return f"{name}_{count}" if count else name

    # --- arguments ---

    def _input(self, tensor: Tensor) -> View:
        """Returns the view that an op reads; a meta tensor that existed before the step is a constant."""
        view = self.views.find(tensor)
        if view is not None:
            return view
        if not self.views.has_storage(tensor):
            self._refuse_original(tensor)
            if (left := self.left.get(tensor.untyped_storage()._cdata)) is not None:
                self.reads_left[left] = None
            if self.phase != FORWARD or tensor.requires_grad:
                raise CaptureError(
                    f"the step uses a tensor of shape {list(tensor.shape)} that it did not create{self.where()}"
                )
            self.add_constant(tensor, None)
            self._outer_storages.add(tensor.untyped_storage()._cdata)
        return self.views.find_or_record(tensor)

    def _template(self, value: Any) -> Any:
        """Returns arguments with slots instead of tensors and host scalars."""
        kind = type(value)
        if isinstance(value, Tensor):
            return self.views.find_or_add(value).slot if value.is_meta else self.program.host_slot(value)
        if kind is list or kind is tuple:
            return kind([self._template(entry) for entry in value])
        return self.program.scalar(value) if kind is float and self.program.scalars else value

    def _without_host_tensors(self, value: Any, scalars_too: bool) -> Any:
        """Returns arguments with meta copies of host tensors; scalars may stay, because every device can read them."""
        return tree_map_only(
            Tensor, lambda t: self.meta_constant(t) if not t.is_meta and (scalars_too or t.dim()) else t, value
        )


def meta_like(tensor: Tensor) -> Tensor:
    """Returns a meta tensor with the sizes, strides and dtype of another."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def collect(values: Any, into: list[Tensor]) -> None:
    """Appends every tensor in nested lists and tuples; several times faster than pytree, which would show in every op."""
    for value in values:
        if isinstance(value, Tensor):
            into.append(value)
        elif type(value) in (list, tuple):
            collect(value, into)
