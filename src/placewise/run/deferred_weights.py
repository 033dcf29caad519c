"""A model whose weights are made later, and only those that are needed: with eager PyTorch's values."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

MIN_BYTES = 2**16  # smaller tensors are made at once: all of them together are small, and constructors look at their values


CPU = torch.device("cpu")

IS_META, DEVICE = Tensor.is_meta.__get__, Tensor.device.__get__  # type: ignore[attr-defined]


class _Call(NamedTuple):
    """What was called while the model was built."""

    function: Any
    leaves: list[Any]  # of its arguments; what is deferred is a tensor on the meta device
    structure: Any
    results: list[Any]  # meta tensors that it returned, or None
    reads: tuple[int, ...]  # deferred storages that it reads or writes
    random_state: Tensor | None  # of the generator before it, if it draws random numbers


class _Answers(TorchFunctionMode):
    """Lets a deferred tensor say that it is on the CPU: PyTorch's initializers skip tensors on the meta device."""

    def __init__(self, weights: "DeferredWeights") -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == IS_META and self._weights.replaces(args[0]):
            return False
        if func == DEVICE and self._weights.replaces(args[0]):
            return CPU
        return func(*args, **(kwargs or {}))


class DeferredWeights(TorchDispatchMode):
    """While it is entered, large tensors get no memory: `with pw.DeferredWeights() as weights: model = Model()`.

    They are on the meta device, and what would give them their values is recorded. Random numbers are drawn as always, and
    thrown away, so the generator moves on as without it, and values that are made later are those of `Model()`.
    """

    def __init__(self, min_bytes: int = MIN_BYTES) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._min_bytes = min_bytes
        self._answers = _Answers(self)
        self._calls: list[_Call] = []
        self._writers: dict[int, list[int]] = {}  # deferred storage -> the calls that make it or write it
        self._meta: set[int] = set()  # of these, what is on the meta device without us: nothing is drawn for it
        self._kept: list[Tensor] = []  # one tensor on each deferred storage, so that its address stays its own

    def __enter__(self) -> "DeferredWeights":
        self._answers.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)  # type: ignore[no-untyped-call]
        self._answers.__exit__(*problem)  # type: ignore[no-untyped-call]

    def has(self, tensor: Tensor) -> bool:
        """Returns whether a tensor on the meta device is one of those that can be made."""
        return _storage(tensor) in self._writers

    def replaces(self, tensor: Tensor) -> bool:
        """Returns whether a tensor on the meta device would be on the CPU without this."""
        return self.has(tensor) and _storage(tensor) not in self._meta

    def make(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the values of tensors on the meta device; those that share memory there share it here.

        It draws the same random numbers again, from a generator of its own.
        """
        before = torch.get_rng_state()
        try:
            made: dict[int, torch.UntypedStorage] = {}
            for tensor in tensors:
                if _storage(tensor) not in made:
                    made[_storage(tensor)] = self._replay(_storage(tensor))
            with torch.no_grad():
                return [_view_of(tensor, made[_storage(tensor)]) for tensor in tensors]
        finally:
            torch.set_rng_state(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, structure = tree_flatten((args, kwargs or {}))
        deferred = [leaf for leaf in leaves if isinstance(leaf, Tensor) and self.has(leaf)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        state = torch.get_rng_state() if is_random else None
        if not deferred:
            results = func(*args, **(kwargs or {}))
            if any(isinstance(leaf, torch.device) and leaf.type == "meta" for leaf in leaves):
                on_cpu = [CPU if isinstance(leaf, torch.device) else leaf for leaf in leaves]
                self._record(func, on_cpu, structure, state, results)  # `w[0] = 3` makes such a tensor
                self._meta |= {_storage(made) for made in tree_flatten(results)[0] if isinstance(made, Tensor)}
                return results
            given = {_storage(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
            return self._defer_new(results, given, (func, leaves, structure, state))
        if is_random and any(map(self.replaces, deferred)):
            _draw(func, leaves, structure)
        if _reads_values(func) or _writes_real(func, args, kwargs or {}, self):
            given_args, given_kwargs = tree_unflatten(self._with_values(leaves), structure)
            return func(*given_args, **given_kwargs)
        on_meta, meta_kwargs = tree_unflatten(list(map(_on_meta, leaves)), structure)
        results = func(*on_meta, **meta_kwargs)
        self._record(func, leaves, structure, state, results)
        if not any(map(self.replaces, deferred)):
            self._meta |= {_storage(made) for made in tree_flatten(results)[0] if isinstance(made, Tensor)}
        return results

    def _with_values(self, leaves: list[Any]) -> list[Any]:
        return [self.make([leaf])[0] if isinstance(leaf, Tensor) and self.has(leaf) else leaf for leaf in leaves]

    def _defer_new(self, results: Any, given: set[int], call: tuple[Any, ...]) -> Any:
        """Returns results with those in place of which there is new large memory on the meta device."""
        func, leaves, structure, state = call
        found, shape = tree_flatten(results)
        is_large = [
            isinstance(result, Tensor)
            and result.device.type == "cpu"
            and result.layout == torch.strided
            and result.untyped_storage().nbytes() >= self._min_bytes
            and _storage(result) not in given
            for result in found
        ]
        if not any(is_large):
            return results
        metas: dict[int, Tensor] = {}
        for result, large in zip(found, is_large, strict=True):
            if large and _storage(result) not in metas:
                metas[_storage(result)] = torch.empty(result.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
        found = [
            _view_of(result, metas[_storage(result)].untyped_storage()) if large else result
            for result, large in zip(found, is_large, strict=True)
        ]
        self._record(func, leaves, structure, state, found, is_large)
        return tree_unflatten(found, shape)

    def _record(
        self, func: Any, leaves: list[Any], structure: Any, state: Tensor | None, results: Any,
        is_deferred: Sequence[bool] | None = None,
    ) -> None:  # fmt: skip
        found = tree_flatten(results)[0]
        reads = tuple(dict.fromkeys(_storage(leaf) for leaf in leaves if isinstance(leaf, Tensor) and self.has(leaf)))
        kept = [
            result.detach() if isinstance(result, Tensor) and (is_deferred is None or is_deferred[i]) else None
            for i, result in enumerate(found)
        ]
        made = [result for result in kept if result is not None and _storage(result) not in reads]
        written = [_storage(leaf) for leaf in _written(func, leaves, structure) if self.has(leaf)]
        if not made and not written:
            return  # a view
        number = len(self._calls)
        self._calls.append(_Call(func, list(map(self._snapshot, leaves)), structure, kept, reads, state))
        for storage in dict.fromkeys([*map(_storage, made), *written]):
            self._writers.setdefault(storage, []).append(number)
        self._kept += made

    def _snapshot(self, leaf: Any) -> Any:
        """Returns an argument as it is now; what is deferred is read again when it is made."""
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach() if leaf.is_meta else leaf.detach().clone()

    def _replay(self, storage: int) -> torch.UntypedStorage:
        """Returns the memory of a deferred storage with its values."""
        made: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad():
            for number in self._needed(storage):
                call = self._calls[number]
                leaves = [
                    _view_of(leaf, made[_storage(leaf)]) if isinstance(leaf, Tensor) and _storage(leaf) in made else leaf
                    for leaf in call.leaves
                ]
                if call.random_state is not None:
                    torch.set_rng_state(call.random_state)
                args, kwargs = tree_unflatten(leaves, call.structure)
                results = tree_flatten(call.function(*args, **kwargs))[0]
                for meta, result in zip(call.results, results, strict=True):
                    if meta is not None and _storage(meta) not in made:
                        made[_storage(meta)] = result.untyped_storage()
        return made[storage]

    def _needed(self, storage: int) -> list[int]:
        """Returns the calls that a storage's values come from, in their order."""
        found: set[int] = set()
        waiting = [(storage, len(self._calls))]
        while waiting:
            wanted, before = waiting.pop()
            for number in self._writers[wanted]:
                if number < before and number not in found:
                    found.add(number)
                    waiting += [(read, number) for read in self._calls[number].reads]
        return sorted(found)


def _storage(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else 0


def _view_of(like: Tensor, storage: torch.UntypedStorage) -> Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and not leaf.is_meta:
        return leaf.to("meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _draw(func: Any, leaves: list[Any], structure: Any) -> None:
    """Draws the random numbers of a call, into memory that is then given back."""
    real = [
        torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype)
        if isinstance(leaf, Tensor) and leaf.is_meta
        else leaf
        for leaf in leaves
    ]
    args, kwargs = tree_unflatten(real, structure)
    func(*args, **kwargs)


def _written(func: Any, leaves: list[Any], structure: Any) -> Iterator[Tensor]:
    """Yields the tensors that a call writes."""
    args, kwargs = tree_unflatten(leaves, structure)
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (value if isinstance(value, (list, tuple)) else [value] if isinstance(value, Tensor) else [])


def _reads_values(func: Any) -> bool:
    """Returns whether values decide what a function returns besides values: a number, a bool, a shape."""
    is_shaped = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
    return is_shaped or any("Tensor" not in str(returned.type) for returned in func._schema.returns)


def _writes_real(func: Any, args: Any, kwargs: Any, weights: DeferredWeights) -> bool:
    leaves, structure = tree_flatten((args, kwargs))
    return any(not weights.has(tensor) for tensor in _written(func, leaves, structure))
