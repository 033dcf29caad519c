"""Records every ATen op that runs, and which memory it reads and writes."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from placewise.capture.meta_kernels import MetaKernels, signature
from placewise.capture.op_costs import OpFacts, device_kinds
from placewise.capture.program import HERE, Call, Resident, Slot
from placewise.core.errors import CaptureError

FORWARD, BACKWARD, UPDATE = 0, 1, 2
SUFFIXES = ("", ".backward", ".update")
Geometry = tuple[int, torch.dtype, int | torch.SymInt, torch.Size, tuple[int, ...]]
_current_node = torch._C._current_autograd_node
_sequence_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class Recorded:
    """The columns of a graph while they grow."""

    def __init__(self) -> None:
        self.op_names: list[str] = []
        self.op_kinds: list[str] = []
        self.phases: list[int] = []
        self.micro_batches: list[int] = []
        self.reads: list[list[int]] = []
        self.writes: list[list[int]] = []
        self.after: list[list[int]] = []
        self.flops: list[float] = []
        self.bytes_moved: list[float] = []
        self.devices: list[tuple[str, ...] | None] = []
        self.owners: list[str] = []  # the parameter that an op of the update belongs to, or ""
        self.tensor_names: list[str] = []
        self.tensor_bytes: list[int] = []
        self.tensor_kinds: list[str] = []
        self.alias_of: list[int] = []
        self.readers: list[list[int]] = []  # of each tensor: ops
        self.tensor_owners: list[str] = []

    def add_tensor(self, name: str, nbytes: int, kind: str, alias_of: int = -1, owner: str = "") -> int:
        """Returns the number of a new tensor."""
        self.tensor_names.append(name)
        self.tensor_bytes.append(nbytes)
        self.tensor_kinds.append(kind)
        self.alias_of.append(alias_of)
        self.readers.append([])
        self.tensor_owners.append(owner)
        return len(self.tensor_names) - 1


class View:
    """What the recorder knows of one window on a storage."""

    __slots__ = ("elements", "nbytes", "slot", "storage")

    def __init__(self, slot: Slot, storage: int, tensor: Tensor) -> None:
        self.slot, self.storage = slot, storage
        self.elements = 1
        for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
            if stride or not size:
                self.elements *= size  # an expanded dimension is one element in memory
        self.nbytes = self.elements * tensor.itemsize


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns the ops that run on the meta device into columns and calls.

    Tensors are told apart by their storage and their window on it, never by identity: holding on to a tensor would
    change what autograd does (it adds in place into a gradient that nobody else holds).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Recorded()
        self.calls: list[Call] = []
        self.residents: list[Resident] = []
        self.num_slots = 0
        self.phase, self.micro_batch, self.path = FORWARD, -1, ""
        self.scalars: Callable[[], dict[float, Slot]] = dict  # the host's scalars in the call under way
        self.kernels = MetaKernels()
        self._facts: dict[Any, OpFacts] = {}
        self._known_flops: dict[Any, float] = {}
        self._views: dict[Geometry, View] = {}
        self._storages: dict[int, int] = {}  # storage -> its newest tensor
        self._bases: dict[int, Slot] = {}  # storage -> the first slot on it
        self._alive: list[StorageWeakRef] = []  # keeps the address of a storage that is gone from being used again
        self._paths: dict[int, str] = {}  # autograd's sequence number -> module path of the forward op
        self._name_counts: dict[str, int] = {}
        self._host_slots: dict[int, Slot] = {}
        self._host_tensors: list[Tensor] = []
        self._constants: dict[int, Tensor] = {}
        self.forbidden: dict[int, str] = {}  # the user's own parameters, which the step must not touch: id -> name

    # --- what is there before the step starts ---

    def add_resident(self, tensor: Tensor, kind: str, name: str, key: str | int = "", owner: str = "") -> None:
        """Makes a tensor known that is at home when the step starts; one whose storage is known already is the same."""
        address = tensor.untyped_storage()._cdata
        if address in self._storages:
            return
        label = f"{name}.{key}" if kind == "state" else name
        if kind == "input" and isinstance(key, int) and key >= 0:
            label = f"{name}[micro-batch {key}]"
        number = self._add_storage(tensor, label, kind, owner)
        self.residents.append(Resident(self._view(tensor).slot, number, kind, name, key))

    def add_host_resident(self, tensor: Tensor, kind: str, name: str, key: str | int = "") -> None:
        """Makes a tensor known that the host keeps (a step counter)."""
        self.residents.append(Resident(self._add_host_tensor(tensor), -1, kind, name, key))

    def add_hyper_parameter(self, name: str, group: int) -> Slot:
        """Returns the slot of a number that the host reads from the optimizer in every step."""
        slot = self._new_slot()
        self.residents.append(Resident(slot, -1, "hyper-parameter", name, group))
        return slot

    def set_owner(self, tensor: Tensor, owner: str) -> None:
        """Says which parameter a tensor (its gradient) belongs to."""
        self.graph.tensor_owners[self.tensor_of(tensor)] = owner

    def tensor_of(self, tensor: Tensor) -> int:
        """Returns the graph's tensor that holds the newest value of this one's storage."""
        return self._storages[tensor.untyped_storage()._cdata]

    def slot_of(self, tensor: Tensor) -> Slot:
        """Returns the slot of a tensor of the step."""
        return self._input(tensor).slot

    def constant(self, value: Tensor) -> Tensor:
        """Returns the stand-in on the meta device of a tensor whose value is known."""
        if (name := self.forbidden.get(id(value))) is not None:
            raise CaptureError(
                f"the step uses {name!r} of the model that was given, not of its copy on the meta device: "
                f"reach it through the model that is called{self._where()}"
            )
        if self.phase == UPDATE and not value.dim():
            self.host_slot(value)  # a number of the optimizer's
            return value
        address = value.untyped_storage()._cdata
        twin = self._constants.get(address)
        if twin is None or twin.size() != value.size() or twin.stride() != value.stride():
            twin = self._constants[address] = torch.empty_like(value, device="meta")
            self._host_tensors.append(value)
            number = self._add_storage(twin, f"constant_{len(self._constants)}", "constant", "")
            slot = self._view(twin).slot
            self.residents.append(Resident(slot, number, "constant", self.graph.tensor_names[number], "", value))
        return twin

    # --- the host's own arithmetic ---

    def host_call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Slot:
        """Records a call of the host and returns the slot of its result."""
        slot = self._new_slot()
        self.calls.append(Call(function, args, {}, (slot,), -1))
        return slot

    def host_tensor(self, scalar: float, slot: Slot, dtype: torch.dtype | None) -> Tensor:
        """Returns a host's number as a tensor that the host keeps."""
        tensor = torch.tensor(float(scalar), dtype=dtype)
        result = self._add_host_tensor(tensor)
        self.calls.append(Call(torch.tensor, (slot,), {"dtype": tensor.dtype}, (result,), -1))
        return tensor

    def host_slot(self, tensor: Tensor) -> Slot:
        """Returns the slot of a tensor that the host keeps; one that is new is a constant."""
        slot = self._host_slots.get(id(tensor))
        if slot is None:
            slot = self._add_host_tensor(tensor)
            self.residents.append(Resident(slot, -1, "constant", f"host_{slot}", "", tensor.clone()))
        return slot

    def needs_value(self, what: str) -> CaptureError:
        """Returns the error of a step that looks into a tensor."""
        return CaptureError(f"the step depends on data: {what} needs the value of a tensor{self._where()}")

    def _where(self) -> str:
        return f", in module {self.path!r}" if self.path else ""

    # --- ops ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = OpFacts(func)
        if not facts.recorded:
            return func(*args, **kwargs)
        tensors: list[Tensor] = []
        _collect(args, tensors)
        if kwargs:
            _collect(kwargs.values(), tensors)
        if tensors and all(not tensor.is_meta for tensor in tensors):
            return self._host_op(func, args, kwargs)
        if facts.name == "_local_scalar_dense":
            raise self.needs_value("a number or a condition")
        if any(not tensor.is_meta and tensor.dim() for tensor in tensors):
            args, kwargs = self._with_constants(args), {k: self._with_constants(v) for k, v in kwargs.items()}
            tensors = []
            _collect((args, kwargs.values()), tensors)
        return self._record(func, facts, args, kwargs, [tensor for tensor in tensors if tensor.is_meta])

    def _record(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        inputs = [] if facts.shape_only else [self._input(tensor) for tensor in tensors]
        try:
            out = self.kernels.run(func, facts, args, kwargs)
        except NotImplementedError as problem:
            raise CaptureError(
                f"{facts.kind} can't be recorded without data{self._where()}: {_first_line(problem)}"
            ) from None
        results: list[Tensor] = []
        _collect((out,), results)
        if not results and not facts.mutated:
            return out
        if results and not results[0].is_meta:
            return self._host_result(func, args, kwargs, out, results)
        fresh = [t for t in results if t.untyped_storage()._cdata not in self._storages]
        if fresh or facts.mutated:
            op = self._add_op(func, facts, args, kwargs, inputs, tensors, results, fresh, out)
        else:
            known = [self._views.get(_geometry(t)) for t in results]
            if all(known):
                return out  # a detach, or a view that was made before
            op = -1
        scalars = self.scalars()
        shape_only = facts.shape_only
        call_args = (_without_data(args[0]), *args[1:]) if shape_only else self._template(args, scalars)
        call_kwargs = {key: self._template(value, scalars) for key, value in kwargs.items()} if kwargs else {}
        if facts.creates:
            call_kwargs["device"] = HERE
        self.calls.append(Call(func, call_args, call_kwargs, tuple([self._view(t).slot for t in results]), op))
        return out

    def _add_op(
        self, func: Any, facts: OpFacts, args: Any, kwargs: Any, inputs: list[View], tensors: list[Tensor],
        results: list[Tensor], fresh: list[Tensor], out: Any,
    ) -> int:  # fmt: skip
        g, number = self.graph, len(self.graph.op_names)
        reads = list(dict.fromkeys([self._storages[view.storage] for view in inputs]))
        owner = next((g.tensor_owners[t] for t in reads if g.tensor_owners[t]), "") if self.phase == UPDATE else ""
        path = owner or self._module_path()
        name = self._unique(f"{path}.{facts.name}{SUFFIXES[self.phase]}" if path else facts.name + SUFFIXES[self.phase])
        after: list[int] = []
        writes: list[int] = []
        written = _mutated(facts, args, kwargs)
        for storage in dict.fromkeys(self._view(t).storage for t in written):
            old = self._storages[storage]
            after += [reader for reader in g.readers[old] if reader not in after]
            root_name = g.tensor_names[old].rstrip("'")
            new = g.add_tensor(root_name + "'", g.tensor_bytes[old], g.tensor_kinds[old], old, g.tensor_owners[old] or owner)
            self._storages[storage] = new
            writes.append(new)
        kind = "gradient" if self.phase == BACKWARD else "activation"
        for i, tensor in enumerate(fresh):
            if tensor.untyped_storage()._cdata not in self._storages:  # two outputs can share a storage
                writes.append(self._add_storage(tensor, name if i == 0 else f"{name}:{i}", kind, owner))
        for read in reads:
            g.readers[read].append(number)
        outputs = [self._view(t) for t in fresh] + [self._view(t) for t in written]
        g.op_names.append(name)
        g.op_kinds.append(facts.kind)
        g.phases.append(self.phase)
        g.micro_batches.append(self.micro_batch)
        g.reads.append(reads)
        g.writes.append(writes)
        g.after.append(after)
        g.flops.append(self._flops(func, facts, args, kwargs, inputs, outputs, out))
        g.bytes_moved.append(_bytes_moved(facts, inputs, outputs))
        g.devices.append(device_kinds(facts.name, tensors[0].dtype if tensors else None))
        g.owners.append(owner)
        return number

    def _flops(
        self, func: Any, facts: OpFacts, args: Any, kwargs: Any, inputs: list[View], outputs: list[View], out: Any
    ) -> float:
        if facts.flops_formula is not None:
            key = (func, signature(args))
            if key not in self._known_flops:
                self._known_flops[key] = float(facts.flops_formula(*args, **kwargs, out_val=out))
            return self._known_flops[key]
        if not facts.flops_per_element:
            return 0.0
        return float(facts.flops_per_element * max([view.elements for view in (*inputs, *outputs)], default=0))

    def _host_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs and records an op on tensors that the host keeps; they are numbers, not data."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return func(*args, **kwargs)  # HostScalar has recorded it
        tensors: list[Tensor] = []
        _collect((args, kwargs.values()), tensors)
        for tensor in tensors:
            self.host_slot(tensor)  # a constant keeps the value from before the call
        results: list[Tensor] = []
        out = func(*args, **kwargs)
        _collect((out,), results)
        return self._host_result(func, args, kwargs, out, results)

    def _host_result(self, func: Any, args: Any, kwargs: Any, out: Any, results: list[Tensor]) -> Any:
        scalars = self.scalars()
        template = self._template(args, scalars)
        slots = tuple(self._known_host_slot(tensor) for tensor in results)
        self.calls.append(Call(func, template, {k: self._template(v, scalars) for k, v in kwargs.items()}, slots, -1))
        return out

    def _known_host_slot(self, tensor: Tensor) -> Slot:
        slot = self._host_slots.get(id(tensor))
        return self._add_host_tensor(tensor) if slot is None else slot

    def _add_host_tensor(self, tensor: Tensor) -> Slot:
        slot = self._host_slots[id(tensor)] = self._new_slot()
        self._host_tensors.append(tensor)  # so that its id stays its own
        return slot

    # --- names ---

    def _module_path(self) -> str:
        """Returns the path of the module that runs; a backward op has that of the forward op it belongs to."""
        node = _current_node() if self.phase == BACKWARD else None
        if node is None:
            if self.phase == FORWARD:
                self._paths.setdefault(_sequence_number() - 1, self.path)
            return self.path
        if (variable := getattr(node, "variable", None)) is not None:  # AccumulateGrad
            view = self._views.get(_geometry(variable))
            name = self.graph.tensor_names[self._storages[view.storage]].rstrip("'") if view else ""
            return name.rpartition(".")[0]
        return self.path or self._paths.get(node._sequence_nr(), "")

    def _unique(self, name: str) -> str:
        count = self._name_counts[name] = self._name_counts.get(name, -1) + 1
        return f"{name}_{count}" if count else name

    # --- storages, windows and slots ---

    def _new_slot(self) -> Slot:
        self.num_slots += 1
        return Slot(self.num_slots - 1)

    def _add_storage(self, tensor: Tensor, name: str, kind: str, owner: str) -> int:
        storage = tensor.untyped_storage()
        number = self.graph.add_tensor(name, storage.nbytes(), kind, -1, owner)
        self._storages[storage._cdata] = number
        self._alive.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return number

    def _view(self, tensor: Tensor) -> View:
        """Returns the window that a tensor is."""
        geometry = _geometry(tensor)
        view = self._views.get(geometry)
        if view is None:
            view = self._views[geometry] = View(self._new_slot(), geometry[0], tensor)
            self._bases.setdefault(geometry[0], view.slot)
        return view

    def _input(self, tensor: Tensor) -> View:
        """Returns the window that an op reads; one that autograd made unseen gets a call that makes it."""
        view = self._views.get(_geometry(tensor))
        if view is None:
            base = self._bases.get(tensor.untyped_storage()._cdata)
            if base is None:
                raise CaptureError(
                    f"the step uses a tensor of shape {list(tensor.shape)} that it did not make{self._where()}"
                )
            view = self._view(tensor)
            window = (base, list(tensor.size()), list(tensor.stride()), tensor.storage_offset())
            self.calls.append(Call(torch.ops.aten.as_strided.default, window, {}, (view.slot,), -1))
        return view

    def _template(self, value: Any, scalars: dict[float, Slot]) -> Any:
        """Returns arguments with slots in the place of tensors and of the host's scalars."""
        if isinstance(value, Tensor):
            return self._view(value).slot if value.is_meta else self.host_slot(value)
        if type(value) in (list, tuple):
            return type(value)([self._template(entry, scalars) for entry in value])
        if scalars and type(value) is float and value in scalars:
            return scalars[value]
        return value

    def _with_constants(self, value: Any) -> Any:
        if isinstance(value, Tensor) and not value.is_meta and value.dim():
            return self.constant(value)
        if type(value) in (list, tuple):
            return type(value)([self._with_constants(entry) for entry in value])
        return value


def _without_data(tensor: Tensor) -> Tensor:
    """Returns a tensor that has the shape, strides and type of another, and nothing else."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _geometry(tensor: Tensor) -> Geometry:
    return (tensor.untyped_storage()._cdata, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())


def _collect(values: Any, into: list[Tensor]) -> None:
    """Appends every tensor in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            into.append(value)
        elif type(value) in (list, tuple):
            _collect(value, into)


def _mutated(facts: OpFacts, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the tensors that an op writes in place."""
    found: list[Tensor] = []
    for key in facts.mutated:
        if isinstance(key, int):
            _collect(args[key : key + 1], found)
        elif key in kwargs:
            _collect((kwargs[key],), found)
    return found


def _bytes_moved(facts: OpFacts, inputs: list[View], outputs: list[View]) -> float:
    if facts.allocates:
        return 0.0
    written = sum([view.nbytes for view in outputs])
    if facts.lookup:
        return float(2 * written + sum([view.nbytes for view in inputs[1:]]))
    return float(written + sum([view.nbytes for view in dict.fromkeys(inputs)]))


def _first_line(problem: BaseException) -> str:
    return str(problem).strip().split("\n")[0]


def user_frame(problem: BaseException) -> str:
    """Returns 'file.py:12' of the innermost frame outside of torch and placewise, or ''."""
    libraries = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
    for frame in reversed(traceback.extract_tb(problem.__traceback__)):
        if not frame.filename.startswith(libraries):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""
