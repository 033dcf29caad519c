"""Which value of the program, and which tensor of the graph, a tensor on the meta device is."""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from placewise.core.errors import CaptureError
from placewise.core.graph import Shape
from placewise.graph_capture.graph_builder import GraphBuilder
from placewise.graph_capture.program import Slot
from placewise.graph_capture.program_builder import ProgramBuilder

Geometry = tuple[int, torch.dtype, int | torch.SymInt, torch.Size, tuple[int, ...]]


class View:
    """What is known of one window on a storage."""

    __slots__ = ("elements", "nbytes", "slot", "storage")

    def __init__(self, slot: Slot, storage: int, tensor: Tensor) -> None:
        self.slot, self.storage = slot, storage
        self.elements = 1
        for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
            if stride or not size:
                self.elements *= size  # an expanded dimension is one element in memory
        self.nbytes = self.elements * tensor.itemsize


class Views:
    """Every storage with its newest tensor, and every window on it with its slot.

    Tensors are told apart by their storage and their window on it, never by identity: holding on to a tensor would
    change what autograd does (it adds in place into a gradient that nobody else holds).
    """

    def __init__(self, columns: GraphBuilder, tape: ProgramBuilder) -> None:
        self.newest: dict[int, int] = {}  # storage -> the graph's tensor that holds its present value
        self._columns, self._tape = columns, tape
        self._views: dict[Geometry, View] = {}
        self._bases: dict[int, tuple[Slot, torch.dtype]] = {}  # storage -> the first window on it
        self._shapes: dict[tuple[torch.dtype, torch.Size], int] = {}  # the graph's number of each
        self._alive: list[StorageWeakRef] = []  # keeps the address of a storage that is gone from being used again

    def add_storage(self, tensor: Tensor, name: str, kind: str, owner: str = "") -> int:
        """Returns the number of the new graph's tensor that is this one's whole storage."""
        if tensor.is_complex():
            raise CaptureError(f"{name} has complex numbers, which can't be recorded")
        storage = tensor.untyped_storage()
        number = self._columns.add_tensor(name, storage.nbytes(), kind, -1, owner, self._shape(tensor))
        self.newest[storage._cdata] = number
        self._alive.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return number

    def _shape(self, tensor: Tensor) -> int:
        """Returns the number of a tensor's shape among the graph's."""
        key = tensor.dtype, tensor.size()
        number = self._shapes.get(key)
        if number is None:
            number = self._shapes[key] = len(self._columns.shapes)
            self._columns.shapes.append(Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.size())))
        return number

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage is known."""
        return tensor.untyped_storage()._cdata in self.newest

    def find(self, tensor: Tensor) -> View | None:
        """Returns the window that a tensor is, or None."""
        return self._views.get(_geometry(tensor))

    def view(self, tensor: Tensor) -> View:
        """Returns the window that a tensor is; a new one gets a slot."""
        geometry = _geometry(tensor)
        view = self._views.get(geometry)
        if view is None:
            view = self._views[geometry] = View(self._tape.new_slot(), geometry[0], tensor)
            self._bases.setdefault(geometry[0], (view.slot, tensor.dtype))
        return view

    def reach(self, tensor: Tensor) -> View:
        """Returns the window that a tensor on a known storage is; one that was made unseen gets a call that makes it."""
        view = self.find(tensor)
        if view is None:
            base, dtype = self._bases[tensor.untyped_storage()._cdata]
            if dtype != tensor.dtype:
                raise CaptureError(f"a tensor of type {dtype} is read as {tensor.dtype} in a way that can't be recorded")
            view = self.view(tensor)
            window = (base, list(tensor.size()), list(tensor.stride()), tensor.storage_offset())
            self._tape.call(torch.ops.aten.as_strided.default, window, {}, (view.slot,))
        return view


def _geometry(tensor: Tensor) -> Geometry:
    return (tensor.untyped_storage()._cdata, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())
