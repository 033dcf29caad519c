"""Identifies a tensor on the meta device: its slot in the program, and its tensor in the graph."""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from placewise.core.errors import CaptureError
from placewise.core.graph import Shape
from placewise.graph_capture.graph_builder import GraphBuilder
from placewise.graph_capture.program import Layout, Slot
from placewise.graph_capture.program_builder import ProgramBuilder

Geometry = tuple[int, torch.dtype, int | torch.SymInt, torch.Size, tuple[int, ...], bool]


class View:
    """A view of a storage: its slot, its number of elements and its bytes."""

    __slots__ = ("elements", "nbytes", "slot", "storage")

    def __init__(self, slot: Slot, storage: int, tensor: Tensor) -> None:
        self.slot, self.storage = slot, storage
        self.elements = 1
        for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
            if stride or not size:
                self.elements *= size  # an expanded dimension is one element in memory
        self.nbytes = self.elements * tensor.itemsize


class Views:
    """The views of every storage with their slots, and the newest tensor in the graph of every storage.

    Tensors are identified by storage and geometry, never by object: keeping a reference to a tensor would change what
    autograd does (it adds in place into a gradient that nothing else references).
    """

    def __init__(self, graph: GraphBuilder, program: ProgramBuilder) -> None:
        self.newest: dict[int, int] = {}  # storage -> the graph's tensor that has its present value
        self._graph, self._program = graph, program
        self.storages: dict[Slot, int] = {}  # of the slots that are views
        self._views: dict[Geometry, View] = {}
        self._bases: dict[int, tuple[Slot, torch.dtype]] = {}  # storage -> the first view of it
        self._shapes: dict[tuple[torch.dtype, torch.Size], int] = {}  # -> index into the graph's shapes
        self._alive: list[StorageWeakRef] = []  # keeps the address of a freed storage from being reused

    def add_storage(self, tensor: Tensor, name: str, kind: str, owner: str = "") -> int:
        """Adds a tensor to the graph for the whole storage of this one; returns its number."""
        storage = tensor.untyped_storage()
        number = self._graph.add_tensor(name, storage.nbytes(), kind, -1, owner, self._shape(tensor))
        self.newest[storage._cdata] = number
        self._alive.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return number

    def _shape(self, tensor: Tensor) -> int:
        """Returns the index of a tensor's shape among the graph's shapes."""
        key = tensor.dtype, tensor.size()
        number = self._shapes.get(key)
        if number is None:
            number = self._shapes[key] = len(self._graph.shapes)
            self._graph.shapes.append(Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.size())))
        return number

    def has_storage(self, tensor: Tensor) -> bool:
        """Returns whether the graph has a tensor for this one's storage."""
        return tensor.untyped_storage()._cdata in self.newest

    def find(self, tensor: Tensor) -> View | None:
        """Returns a tensor's view, or None if there is none yet."""
        return self._views.get(_geometry(tensor))

    def find_or_add(self, tensor: Tensor) -> View:
        """Returns a tensor's view; a new one gets a slot, which a call of the program must fill."""
        geometry = _geometry(tensor)
        view = self._views.get(geometry)
        if view is None:
            view = self._views[geometry] = View(self._program.new_slot(Layout(*geometry[3:5])), geometry[0], tensor)
            self.storages[view.slot] = geometry[0]
            self._bases.setdefault(geometry[0], (view.slot, tensor.dtype))
        return view

    def find_or_record(self, tensor: Tensor) -> View:
        """Returns the view of a tensor whose storage is in the graph; a new one gets an as_strided call that makes it."""
        view = self.find(tensor)
        if view is None:
            base, dtype = self._bases[tensor.untyped_storage()._cdata]
            if dtype != tensor.dtype:
                raise CaptureError(f"a tensor of type {dtype} is read as {tensor.dtype} in a way that can't be recorded")
            view = self.find_or_add(tensor)
            arguments = (base, list(tensor.size()), list(tensor.stride()), tensor.storage_offset())
            self._program.call(torch.ops.aten.as_strided.default, arguments, {}, (view.slot,))
        return view


def _geometry(tensor: Tensor) -> Geometry:
    """Returns what tells a view of a storage from another; a conjugate or negative view differs in nothing but that."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return (tensor.untyped_storage()._cdata, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride(), is_lazy)
