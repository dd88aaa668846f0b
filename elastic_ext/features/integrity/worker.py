"""Hashes what this worker holds as a replica: parameters, and the state of their optimizer, that other ranks hold too.

After equal steps all replicas are equal to the bit: they start equal, get the same gradient, and compute the same update. If one
differs later, its hardware has computed or kept a bit wrongly, and nothing else shows that.

Replicas are the parameters of a `DistributedDataParallel` of torch, and those of FSDP2 on a mesh of several dimensions that are
replicated along the first ones and sharded along the next (HSDP). A plain tensor outside of DDP may be a shard of FSDP1, or a
part of a pipeline. A DTensor that is replicated along all dimensions may be one of tensor parallelism, whose gradient each rank
computes itself. So neither is taken for a replica. The state of a ZeroRedundancyOptimizer is sharded: of it, parameters count.
Within `DistributedDataParallel.join`, ranks make unequal numbers of steps, and their optimizers' state differs from then on.

A set of replicas is what one optimizer has that the same ranks hold; several models in one optimizer, over the same ranks, are
one set. Each optimizer counts its own steps, which must be the same on these ranks. Of sets of the same ranks, the order of their
first steps gives the names, so it must be the same, too; optimizers of one rank alone, without replicas, do not count.

The worker writes a file for its agent, a `joint_evidence.WorkerHashes` as JSON. Agents look at any time, so what they compare
must stay for a while: see `kept`.

Loaded by path when torch is imported, so it uses only the standard library and what the script has imported. All of torch's names
here are public but `_join_config`: without it, jobs that use `join` must not set `integrity_every`.
"""

import hashlib
import json
import sys
import weakref

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import ModuleType

    import torch
    from torch import Tensor
    from torch.optim import Optimizer

    Labelled = list[tuple[str, Tensor]]
    Replicas = dict[tuple[int, ...], Labelled]

# Of torch, and of subclasses of tensors, whose code runs here, too.
FAULTS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
SPACINGS = tuple(4**power for power in range(1, 7))
PARAMETER = "parameter"
COLUMNS = 4096  # of a tensor, for `weighted_sum`
MAX_OPTIMIZERS = 8  # a script may have one for each parameter, in the backward pass
TOO_MANY = f"more than {MAX_OPTIMIZERS} optimizers: only the first {MAX_OPTIMIZERS} are compared"
UNEQUAL = "the optimizers make unequal numbers of steps: which checkpoints are refused goes by the one that makes the fewest"
NO_REPLICAS = (
    "{none} of {all} parameters of {optimizer} are no replicas, because they are neither under DistributedDataParallel nor in "
    "HSDP of FSDP2 (plain FSDP shards them): they are not compared"
)


def kept(steps: "Collection[int]", every: int) -> set[int]:
    """Return for which of these steps the hashes stay: the first, the last two, and the last of every 4th, 16th and so on.

    So nodes that look at different times come to have the same step, however quick the steps are.
    """
    ordered = sorted(steps)
    last = (max((step for step in ordered if step % (every * spacing) == 0), default=ordered[0]) for spacing in SPACINGS)
    return {ordered[0], *ordered[-2:], *last}


class _Stepped:
    def __init__(self, number: int, left_out: bool) -> None:
        self.number, self.steps = number, 0  # number: in the order of the first steps on this rank
        self.left_out = left_out  # nothing of it is compared
        self.names: dict[tuple[int, ...], str] = {}  # of its sets, by the ranks that hold them
        # by set and its number of replicas, then by step: what the step counts as, and the value
        self.hashes: dict[tuple[str, int], dict[int, tuple[int, str]]] = {}


class ReplicaHashes:
    """Hashes the replicas of each optimizer after its first step, and then every `every` steps."""

    def __init__(self, every: int, publish: "Callable[[str], None]", warn: "Callable[[str], None]") -> None:
        """Begin to follow which modules are replicated. Call this before the script makes any.

        publish: gets the content of the file. warn: gets one line if that has failed.

        Raises AttributeError or KeyError: torch has no such hook.
        """
        self.sums = False  # whether to add up bits by `weighted_sum` although torch has `hash_tensor`
        self._every, self._publish, self._warn = every, publish, warn
        self._wrappers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, _Stepped] = weakref.WeakKeyDictionary()
        self._steppers = 0
        self._sets: dict[tuple[int, ...], int] = {}  # how many there have been, by the ranks that hold them
        self._off = self._note = ""
        self._weights: dict[object, Tensor] = {}  # by device
        sys.modules["torch.nn.modules.module"].register_module_module_registration_hook(self._registered)

    def _registered(self, module: object, name: str, submodule: object) -> None:
        """Note each DistributedDataParallel as it gets its `module`."""
        wrapper = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
        if name == "module" and wrapper is not None and isinstance(module, wrapper):
            self._wrappers.add(module)

    def stepped(self, optimizer: "Optimizer") -> None:
        """Count a step of this optimizer; hash its replicas if that is due. An error ends that, and the file says why."""
        if self._off:
            return
        try:
            own = self._optimizers.get(optimizer)
            if own is None:
                own = self._optimizers[optimizer] = _Stepped(self._steppers, _is_inside_sharded(optimizer))
                self._steppers += 1
            own.steps += 1
            if (own.steps == 1 or own.steps % self._every == 0) and not own.left_out:
                self._hash(optimizer, own)
        except FAULTS as error:
            self._off = f"replicas are no longer hashed in this round: {error!r}"
            try:
                self._share()
            except OSError as away:
                self._warn(f"integrity_every: {self._off}; the agent does not know of it: {away}")

    def _hash(self, optimizer: "Optimizer", own: _Stepped) -> None:
        cuda = sys.modules["torch"].cuda
        if cuda.is_initialized() and cuda.is_current_stream_capturing():
            return  # into a CUDA graph, which may not wait for the device
        found = self._replicas(optimizer)
        if not own.hashes:
            self._begin(optimizer, own, found)
        counted = self._counted(own)
        if counted < own.steps:
            self._note = self._note or UNEQUAL
        compared = {} if own.left_out else found
        for ranks, tensors in compared.items():
            values = own.hashes.setdefault((self._name(own, ranks), len(ranks)), {})
            values[own.steps] = counted, self._value(tensors)
            for step in values.keys() - kept(values, self._every):
                del values[step]
        self._share()

    def _begin(self, optimizer: "Optimizer", own: _Stepped, found: "Replicas") -> None:
        """Decide whether this optimizer is compared, and note what is not."""
        parameters = sum(len(group["params"]) for group in optimizer.param_groups)
        none = parameters - sum(label == PARAMETER for tensors in found.values() for label, _ in tensors)
        others = sum(bool(each.hashes) for each in self._optimizers.values())
        if none and not self._note:
            self._note = NO_REPLICAS.format(none=none, all=parameters, optimizer=type(optimizer).__name__)
        if found and others >= MAX_OPTIMIZERS:
            self._note = TOO_MANY
        own.left_out = not found or others >= MAX_OPTIMIZERS

    def _name(self, own: _Stepped, ranks: tuple[int, ...]) -> str:
        if ranks not in own.names:
            number = self._sets[ranks] = self._sets.get(ranks, 0) + 1
            own.names[ranks] = f"{number}.{hashlib.blake2b(repr(ranks).encode(), digest_size=6).hexdigest()}"
        return own.names[ranks]

    def _counted(self, own: _Stepped) -> int:
        """Return the steps of the optimizer that has made the fewest, once those that come after this one have made theirs."""
        compared = [own, *(each for each in self._optimizers.values() if not each.left_out)]
        return min(each.steps + (each.number > own.number and each.steps == own.steps - 1) for each in compared)

    def _share(self) -> None:
        """Write the file. Raises OSError."""
        hashed = [
            {"of": of, "replicas": replicas, "step": step, "counted": counted, "value": value}
            for own in self._optimizers.values()
            for (of, replicas), values in own.hashes.items()
            for step, (counted, value) in values.items()
        ]
        self._publish(json.dumps({"schema": 1, "hashed": hashed, "off": self._off, "note": self._note}))

    def _replicas(self, optimizer: "Optimizer") -> "Replicas":
        """Return the tensors that are replicas, with a label each, by the ranks that hold the same."""
        of_wrappers = dict(sorted(self._of_wrappers(), key=lambda item: (len(item[1]), item[1])))  # of two, the larger group
        sharded = isinstance(optimizer, _sharded_class())
        found: Replicas = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                ranks = of_wrappers.get(id(parameter)) or _ranks_of_mesh(parameter)
                if len(ranks) > 1:
                    state = {} if sharded else optimizer.state.get(parameter) or {}
                    named = sorted(state.items(), key=lambda item: str(item[0]))
                    found.setdefault(ranks, []).extend([(PARAMETER, parameter), *((str(name), value) for name, value in named)])
        return found

    def _of_wrappers(self) -> "Iterator[tuple[int, tuple[int, ...]]]":
        """Yield the id of each parameter under DistributedDataParallel, and the ranks that hold it.

        Raises RuntimeError within `join`.
        """
        for wrapper in list(self._wrappers):
            if getattr(getattr(wrapper, "_join_config", None), "enable", False):
                raise RuntimeError("in DistributedDataParallel.join, ranks make unequal numbers of steps")
            ranks = tuple(sys.modules["torch.distributed"].get_process_group_ranks(wrapper.process_group))
            for name, parameter in wrapper.module.named_parameters():
                if name not in wrapper.parameters_to_ignore:
                    yield id(parameter), ranks

    def _value(self, tensors: "Labelled") -> str:
        """Return one hash of these tensors and numbers, in their order. It waits for each device once."""
        torch = sys.modules["torch"]
        value = hashlib.blake2b(digest_size=8)
        by_device: dict[object, list[Tensor]] = {}
        with torch.no_grad():
            for label, each in tensors:
                if isinstance(each, torch.Tensor):
                    local = each.to_local() if hasattr(each, "to_local") else each
                    value.update(f"{label} {local.dtype} {tuple(local.shape)};".encode())
                    by_device.setdefault(local.device, []).append(self._checksum(torch, local))
                elif isinstance(each, (int, float)):
                    value.update(f"{label} {each!r};".encode())
            for device in sorted(by_device, key=str):
                value.update(repr(torch.stack(by_device[device]).tolist()).encode())
        return value.hexdigest()

    def _checksum(self, torch: "ModuleType", tensor: "Tensor") -> "Tensor":
        """Return a checksum of 64 bits of the tensor's bits, as a tensor on its device. It changes with each single bit."""
        data = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        data = data.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()])
        if hasattr(torch, "hash_tensor") and not self.sums:  # older torch has none
            return torch.hash_tensor(data).view(torch.int64)
        if tensor.device not in self._weights:
            self._weights[tensor.device] = torch.arange(1, 2 * COLUMNS, 2, device=tensor.device)
        return weighted_sum(data.reshape(-1), self._weights[tensor.device])


def weighted_sum(words: "Tensor", weights: "Tensor") -> "Tensor":
    """Return the sum of integers times odd weights, modulo 2**64: it needs no copy of them. weights: of COLUMNS neighbors."""
    whole = words.numel() // COLUMNS * COLUMNS
    int64 = weights.dtype
    columns = words[:whole].view(-1, COLUMNS).sum(0, dtype=int64)
    rest = words[whole:].to(int64)
    return (columns * weights).sum() + (rest * weights[: rest.numel()]).sum()


def _sharded_class() -> "type | tuple[()]":
    """Return the class of optimizers whose state is sharded; an empty tuple if the script has none."""
    return getattr(sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer"), "ZeroRedundancyOptimizer", ())


def _is_inside_sharded(optimizer: object) -> bool:
    """Return whether this step is that of an optimizer with one rank's shard, within the step of the one that has all."""
    sharded, frame = _sharded_class(), sys._getframe(1) if _sharded_class() else None
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if owner is not None and owner is not optimizer and isinstance(owner, sharded):
            return True
        frame = frame.f_back
    return False


def _ranks_of_mesh(parameter: "Tensor") -> tuple[int, ...]:
    """Return the ranks that hold the same shard of a DTensor; () for any other tensor, or if no other rank surely does."""
    placements = getattr(parameter, "placements", None)
    mesh = getattr(parameter, "device_mesh", None)
    if placements is None or mesh is None:
        return ()
    first = next((at for at, each in enumerate(placements) if not each.is_replicate()), None)
    if not first or "Shard" not in type(placements[first]).__name__:  # FSDP2 may have another class for a shard of a shard
        return ()
    own = mesh.get_coordinate()
    if own is None:
        return ()
    others = (..., *own[first:])
    return tuple(mesh.mesh[others].reshape(-1).tolist())
