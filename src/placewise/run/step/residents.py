"""What exists before a step starts: the model's own tensors on their home devices, the optimizer's state, and the batch."""

from collections.abc import Callable, Collection
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from placewise.core.errors import ExecutionError, StepChanged
from placewise.graph_capture.program import Resident, Slot
from placewise.graph_capture.training_step import StepModules, TrainingStep
from placewise.run.backends.protocol import Streams
from placewise.run.lower.placed_step import PlacedStep
from placewise.run.step.batches import batch_tensors, cut_part, real_batch, to_layout
from placewise.run.step.optimizer_state import make_state
from placewise.run.storage_copies import fills_storage

Batch = dict[str, Tensor]  # path of an entry -> tensor

Getter = Callable[[Batch], Any]

Owner = tuple[dict[str, Any], str]  # a module's own dict of parameters or buffers, and the key in it

_type_and_device, _device = attrgetter("dtype", "device"), attrgetter("device")


class _Entries(NamedTuple):
    """Some entries of one parameter's state, as a function that returns them all."""

    parameter: Tensor
    find: Callable[[dict[Any, Any]], tuple[Any, ...]]
    residents: list[int]  # positions


class Residents:
    """The values of a program's residents; every step looks them up again, so that they may be changed between steps.

    A parameter or buffer is the model's own tensor, moved to its home device. One that has been moved away (by
    `model.cpu()`, or a `load_state_dict` of the optimizer) is brought back by the next step.
    """

    def __init__(self, placed: PlacedStep, step: TrainingStep, streams: Streams | None = None) -> None:
        self._resolved, self._step, self._program = placed.resolved, step, placed.resolved.program
        self._torch_devices = [torch.device(placed.devices[home].torch_device) for home in placed.tensor_devices.tolist()]
        self._streams, self._pinned = streams, placed.pinned
        self._owners = _owners(step.modules)
        self._far = placed.far
        self._check_model()
        self._make_state()
        self._parameters = dict(step.modules.named_parameters())
        self._examples = dict(batch_tensors(step.batch, step.batch))
        self._getters = [self._getter(resident) for resident in self._program.residents]
        self._group()
        self.positions: dict[Slot, int] = {resident.slot: i for i, resident in enumerate(self._program.residents)}

    def gather(self, batch: Any) -> list[Any]:
        """Returns the values of the residents, in the program's order; the batch must be like the example."""
        given = real_batch(self._step.batch, batch)
        try:
            return self._gather(given)
        except (AttributeError, KeyError):  # the model has lost a tensor, or the optimizer its state
            self._check_model()
            self._make_state()
        return self._gather(given)

    def _group(self) -> None:
        """Sorts the residents by how they are found: the host does that before it can launch anything."""
        residents = self._program.residents
        kept = [i for i, r in enumerate(residents) if r.kind in ("parameter", "buffer", "state") and not self._is_special(r)]
        self._of_model = [i for i in kept if residents[i].kind != "state"]
        self._places = [self._owners[residents[i].name] for i in self._of_model]
        self._facts = [self._facts_of(residents[i]) for i in self._of_model]
        looks = [(place, residents[i].like) for place, i in enumerate(self._of_model)]
        self._images = [(place, like.stride()) for place, like in looks if like is not None and like.dim() in (4, 5)]
        states = [i for i in kept if residents[i].kind == "state"]
        self._states = self._entries([i for i in states if residents[i].tensor >= 0])
        self._state_homes = [self._torch_devices[residents[i].tensor] for entry in self._states for i in entry.residents]
        self._counters = self._entries([i for i in states if residents[i].tensor < 0])
        grouped = [self._of_model, *(entry.residents for entry in (*self._states, *self._counters))]
        self._others = sorted(set(range(len(residents))) - set(chain.from_iterable(grouped)))
        found_at = {i: place for place, i in enumerate(chain(*grouped, self._others))}
        self._in_order = [found_at[i] for i in range(len(residents))]

    def _is_special(self, resident: Resident) -> bool:
        """Whether a resident is with another rank, or in pinned memory."""
        key = resident.key if resident.kind == "state" else ""
        return (resident.name, key) in self._far or (resident.tensor >= 0 and resident.tensor in self._pinned)

    def _facts_of(self, resident: Resident) -> tuple[torch.dtype, torch.device]:
        assert resident.like is not None
        return resident.like.dtype, self._torch_devices[resident.tensor]

    def _entries(self, chosen: list[int]) -> list[_Entries]:
        by_name: dict[str, list[int]] = {}
        for i in chosen:
            by_name.setdefault(self._program.residents[i].name, []).append(i)
        return [
            _Entries(self._parameters[name], _finder([self._program.residents[i].key for i in found]), found)
            for name, found in by_name.items()
        ]

    def _gather(self, given: Batch) -> list[Any]:
        """Returns the values of all residents; those that are not at home are looked up one by one, and moved."""
        found = [owner[key] for owner, key in self._places]
        if list(map(_type_and_device, found)) != self._facts:
            found = [self._getters[i](given) for i in self._of_model]
        for place, strides in self._images:
            if found[place].stride() != strides:
                self._refuse_layout(self._program.residents[self._of_model[place]], found[place])
        if self._states or self._counters:
            assert self._step.optimizer is not None
            state = self._step.optimizer.state
            at_home = list(chain.from_iterable([entry.find(state[entry.parameter]) for entry in self._states]))
            if list(map(_device, at_home)) != self._state_homes:
                at_home = [self._getters[i](given) for entry in self._states for i in entry.residents]
            found += at_home
            found += chain.from_iterable([entry.find(state[entry.parameter]) for entry in self._counters])
        found += [self._getters[i](given) for i in self._others]
        return [found[place] for place in self._in_order]

    def _refuse_layout(self, resident: Resident, tensor: Tensor) -> None:
        """Raises StepChanged if a tensor is laid out otherwise in memory: `model.to(memory_format=...)`."""
        assert resident.like is not None
        if any(n > 1 and a != b for n, a, b in zip(tensor.size(), tensor.stride(), resident.like.stride(), strict=False)):
            raise StepChanged(
                f"{resident.name} has strides {tuple(tensor.stride())} now, the step was captured with "
                f"{tuple(resident.like.stride())} (memory_format): capture and compile the step again"
            )

    def own_tensors(self) -> list[tuple[int, Tensor]]:
        """Returns the model's parameters and buffers and the optimizer's state, each with its number in the graph."""
        own = [
            (resident.tensor, getter({}))
            for resident, getter in zip(self._program.residents, self._getters, strict=True)
            if resident.kind in ("parameter", "buffer", "state") and resident.tensor >= 0
        ]
        return [(number, value) for number, value in own if isinstance(value, Tensor)]

    def bring_home(self, batch: Any) -> Any:
        """Returns the batch with each tensor on its home device, unless its micro-batches have different ones.

        Moves the model's tensors and the optimizer's to theirs too, as a step does.
        """
        homes: dict[str, dict[torch.device, None]] = {}
        for resident in self._program.residents:
            if resident.kind == "input":
                homes.setdefault(resident.name, {})[self._torch_devices[resident.tensor]] = None
        moved = {
            id(tensor): tensor.to(next(iter(homes[path])))
            for path, tensor in real_batch(self._step.batch, batch).items()
            if len(homes.get(path, ())) == 1
        }
        home = tree_map(lambda value: moved.get(id(value), value), batch)
        self.gather(home)  # moves the others
        return home

    def update_scale(self, found_inf: Tensor) -> None:
        """Lets the GradScaler change its scale; `found_inf` is above 0 if a gradient was not finite."""
        scaler, optimizer = self._step.grad_scaler, self._step.optimizer
        assert scaler is not None
        if scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(found_inf.device)
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {found_inf.device: found_inf}
        scaler.update()

    def keep(self, updates: list[Any] | None, updated: Collection[str] | None = None) -> None:
        """Puts the scalars that the host has computed into the optimizer's state; after a failure, of what was updated."""
        optimizer = self._step.optimizer
        if optimizer is None or updates is None or (updated is not None and not updated):
            return
        for (resident, _), value in zip(self._program.updates, updates, strict=True):
            if resident.kind == "hyper-parameter":
                optimizer.param_groups[int(resident.key)][resident.name] = value
            elif updated is None or resident.name in updated:
                optimizer.state[self._parameters[resident.name]][resident.key] = value
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedules look at, to warn if there was no step

    def _check_model(self) -> None:
        for resident in self._program.residents:
            if resident.kind == "constant" and resident.value is None:
                raise ExecutionError(
                    "the step reads a tensor that has no value, because the model was built on the meta device: build it "
                    "on a real one"
                )
        for name, tensor in (*self._step.modules.named_parameters(), *self._step.modules.named_buffers()):
            if (name, "") not in self._far:
                _check_values(name, tensor)
        for resident in self._program.residents:
            if resident.kind in ("parameter", "buffer"):
                owner, key = self._owners.get(resident.name, ({}, ""))
                if owner.get(key) is None:
                    raise StepChanged(f"the model has no {resident.name} any more: capture and compile the step again")
                _check_type(resident, owner[key])

    def _make_state(self) -> None:
        if self._step.optimizer is not None:
            make_state(self._program, self._step.modules, self._step.optimizer)

    def _getter(self, resident: Resident) -> Getter:
        """Returns the function that finds the value of a resident in a step."""
        match resident.kind:
            case "parameter" | "buffer":
                return self._model_getter(resident)
            case "state":
                return self._state_getter(resident)
            case "input":
                return self._input_getter(resident)
            case "hyper-parameter":
                assert self._step.optimizer is not None
                return _hyper_parameter_getter(self._step.optimizer, resident)
            case "loss-scale":
                scaler = self._step.grad_scaler
                assert scaler is not None
                return lambda batch: torch.tensor(scaler.get_scale())
        return self._constant_getter(resident)

    def _model_getter(self, resident: Resident) -> Getter:
        assert resident.like is not None
        owner, key = self._owners[resident.name]
        if (resident.name, "") in self._far:
            return lambda batch: owner[key]
        sharing, dtype = _sharing(self._owners, owner[key]), resident.like.dtype
        home, streams = self._torch_devices[resident.tensor], self._streams if resident.tensor in self._pinned else None
        pinned = 0  # its address in pinned memory

        def get(batch: Batch) -> Any:
            nonlocal pinned
            tensor = owner[key]
            if tensor.dtype != dtype:
                _check_type(resident, tensor)
            if tensor.device != home or (streams is not None and tensor.data_ptr() != pinned):
                _check_values(resident.name, tensor)
                moved = _moved_home(tensor, home, streams)
                pinned = moved.data_ptr()
                for other, name in sharing:
                    other[name].data = moved
            return tensor

        return get

    def _state_getter(self, resident: Resident) -> Getter:
        assert self._step.optimizer is not None
        optimizer, parameter, key = self._step.optimizer, self._parameters[resident.name], resident.key
        if resident.tensor < 0 or (resident.name, resident.key) in self._far:
            return lambda batch: optimizer.state[parameter][key]
        home = self._torch_devices[resident.tensor]

        def get(batch: Batch) -> Any:
            state = optimizer.state[parameter]
            if state[key].device != home:
                state[key] = to_layout(state[key], state[key].stride(), home, -1)
            return state[key]

        return get

    def _input_getter(self, resident: Resident) -> Getter:
        name, number, count = resident.name, max(int(resident.key), 0), self._step.micro_batches
        home, nbytes = self._torch_devices[resident.tensor], int(self._resolved.graph.tensors.nbytes[resident.tensor])
        strides = self._examples[name].stride()
        return lambda batch: to_layout(cut_part(batch[name], number, count), strides, home, nbytes)

    def _constant_getter(self, resident: Resident) -> Getter:
        assert resident.value is not None
        if resident.tensor < 0:
            value = resident.value.clone()
            return lambda batch: value.clone()
        given, home = resident.value, self._torch_devices[resident.tensor]
        nbytes = int(self._resolved.graph.tensors.nbytes[resident.tensor])
        is_written = resident.tensor in self._resolved.written_storages
        value, version = to_layout(given, given.stride(), home, nbytes), _version(given)

        def get(batch: Batch) -> Any:
            nonlocal value, version
            if (now := _version(given)) != version:  # the user has changed it in place
                value, version = to_layout(given, given.stride(), home, nbytes), now
            return value.clone() if is_written else value

        return get


def _finder(keys: list[Any]) -> Callable[[dict[Any, Any]], tuple[Any, ...]]:
    """Returns the function that looks up these keys."""
    if len(keys) > 1:
        return itemgetter(*keys)
    (key,) = keys
    return lambda entries: (entries[key],)


def _version(tensor: Tensor) -> int:
    """Returns how often a tensor was changed in place; inference tensors do not count that."""
    return 0 if tensor.is_inference() else tensor._version


def _moved_home(tensor: Tensor, home: torch.device, streams: Streams | None) -> Tensor:
    """Returns a tensor on its home device; in pinned memory, if streams are given."""
    is_there = streams is not None and tensor.device == home and fills_storage(tensor)
    moved = tensor.detach() if is_there else to_layout(tensor, tensor.stride(), home, -1)
    return moved if streams is None or streams.is_pinned(moved) else streams.pin(moved)


def _hyper_parameter_getter(optimizer: torch.optim.Optimizer, resident: Resident) -> Getter:
    name, _, index = resident.name.partition("[")
    group = int(resident.key)
    if not index:
        return lambda batch: optimizer.param_groups[group][name]  # load_state_dict makes new groups
    entry = int(index.removesuffix("]"))
    return lambda batch: optimizer.param_groups[group][name][entry]


def _check_values(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise ExecutionError(
            f"{name} is on the meta device and has no values: build the model on a real device, give it values with "
            "model.to_empty(device='cpu'), or build it in placewise.DeferredWeights()"
        )


def _check_type(resident: Resident, tensor: Tensor) -> None:
    assert resident.like is not None
    if tensor.dtype != resident.like.dtype:
        now, captured = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, resident.like.dtype))
        raise StepChanged(
            f"{resident.name} is {now} now, the step was captured with {captured}: make it {captured} again, or capture and "
            "compile the step again"
        )


def _owners(modules: StepModules) -> dict[str, Owner]:
    """Returns where the modules keep each parameter and buffer, by full name."""
    owners: dict[str, Owner] = {}
    for prefix, module in modules.named_modules(remove_duplicate=False):
        for tensors in (module._parameters, module._buffers):
            for key in tensors:
                if tensors[key] is not None:
                    owners[f"{prefix}{key}" if not prefix or prefix.endswith(":") else f"{prefix}.{key}"] = (tensors, key)
    return owners


def _sharing(owners: dict[str, Owner], tensor: Tensor) -> list[Owner]:
    """Returns where the model keeps tensors that share this one's memory."""
    found = []
    for owner, key in owners.values():
        other = owner[key]
        if other.data_ptr() == tensor.data_ptr() and other.shape == tensor.shape and other.stride() == tensor.stride():
            found.append((owner, key))
    return found
