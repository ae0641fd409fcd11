"""Sees every operation of a step: what memory it makes, how long that lives, how many FLOPs it takes, whose it is.

Works on tensors with data as on tensors without. What is lent and given back by swapping two storages' memory (see
`comm.flat`) counts as it should: both live over steps.
"""

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from zero3d.comm.recorded_axis import RecordedAxis
from zero3d.contracts import Watched
from zero3d.dryrun.ledger import Life, micro_batch_of
from zero3d.dryrun.rehearsal import Traffic
from zero3d.pipeline.action import Action
from zero3d.unwatched import UNWATCHED

DEVICE = torch.ops.prim.device.default
GROUPED = "_grouped_mm"
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Tracker(TorchDispatchMode):
    """Round a step, whose `Watcher` it is too.

    lives: of all storages made inside; flops: by action
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lives: list[Life] = []
        self.flops: Counter[str] = Counter()
        self._issued: dict[str, list[str]] = {}
        self._moment = 0
        self._action = ""
        self._known: dict[int, tuple[weakref.ref[Any], Life]] = {}
        self._paths: list[str] = []
        self._marks: list[tuple[int, str]] = [(-1, "")]
        self._hooks = ExitStack()
        self._model = model

    def __enter__(self) -> "Tracker":
        for path, module in self._model.named_modules():
            enter, leave = partial(self._entered, path), self._left
            self._hooks.callback(module.register_forward_pre_hook(enter).remove)
            self._hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:  # Asked for at every turn, and known.
            return getattr(args[0], "fake_device", None) or func(*args)
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._known:
                self._see(leaf, func, (args, kwargs))
        self._count(func, args, kwargs, result)
        return result

    def lasting(self, held: Iterable[tuple[str, Tensor]], lent: Iterable[tuple[str, Tensor]] = ()) -> dict[str, int]:
        """kind -> bytes of `held`, (kind, tensor) of what lives over steps, which counts no longer as made in it. lent:
        what was made in the step and has given its memory to one of them, which had none."""
        for kind, tensor in lent:
            self._known[tensor.untyped_storage()._cdata][1].passes_as = kind
        found: Counter[str] = Counter()
        seen: set[int] = set()
        for kind, tensor in held:
            storage = tensor.untyped_storage()
            if storage._cdata in seen:
                continue
            seen.add(storage._cdata)
            found[kind] += storage.nbytes()
            known = self._known.get(storage._cdata)
            if known is not None and known[0]() is not None:
                known[1].kind = kind
        return dict(found)

    def acting(self, action: Action) -> AbstractContextManager[None]:
        return self._in(action.full)

    def doing(self, what: str) -> AbstractContextManager[None]:
        return self._in("")

    def traffic(self, axes: Iterable[RecordedAxis], middle: int, more: int) -> dict[str, Traffic]:
        """Of a step with `more` micro-batches that each do what number `middle` does."""
        found = {}
        for axis in axes:
            if axis.size > 1:
                repeated = [
                    call
                    for call, action in zip(axis.calls, self._issued[axis.name])
                    if micro_batch_of(action) == middle
                ]
                calls = Counter(call.verb for call in axis.calls)
                for call in repeated:
                    calls[call.verb] += more
                sent = axis.sent_bytes + more * sum(call.sent_bytes for call in repeated)
                found[axis.name] = Traffic(sent=sent, calls=dict(calls))
        return found

    def calling(self, axis: str, verb: str, label: str, nbytes: int) -> Watched:
        # What an action receives is asked for before it.
        self._issued.setdefault(axis, []).append(self._action or label)
        return UNWATCHED.calling(axis, verb, label, nbytes)

    def queueing(self, queue: str, what: str) -> AbstractContextManager[None]:
        return UNWATCHED.queueing(queue, what)

    @contextmanager
    def _in(self, action: str) -> Iterator[None]:
        before, self._action = self._action, action
        try:
            yield
        finally:
            self._action = before

    def _see(self, tensor: Tensor, func: Any, arguments: Any) -> None:
        """The first time that an operation gives this storage: it made it, or was given it. (What it was given to write
        to may be a tensor with data, and what it gives back one without for it.)"""
        storage: Any = tensor.untyped_storage()
        key = storage._cdata
        given = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))
        written = any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.returns)
        is_new = not written and all(one.untyped_storage()._cdata != key for one in given)
        self._moment += 1
        life = Life(storage.nbytes() if is_new else 0, self._moment, self._where(), self._action)
        self.lives.append(life)
        self._known[key] = weakref.ref(storage, partial(self._gone, key)), life

    def _gone(self, key: int, _: object) -> None:
        self._moment += 1
        self._known.pop(key)[1].death = self._moment

    def _where(self) -> str:
        """The module that is running, or whose backward is."""
        node: Any = torch._C._current_autograd_node()
        if node is None or self._paths:
            return self._paths[-1] if self._paths else ""
        return self._marks[bisect_right(self._marks, (node._sequence_nr(), "\x7f")) - 1][1]

    def _entered(self, path: str, *_: Any) -> None:
        self._paths.append(path)
        self._mark()

    def _left(self, *_: Any) -> None:
        if self._paths:
            self._paths.pop()
        self._mark()

    def _mark(self) -> None:
        """Nodes of autograd from here on are of this module."""
        self._marks.append((torch._C._autograd._get_sequence_nr(), self._paths[-1] if self._paths else ""))

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = func._overloadpacket
        formula: Any = flop_registry.get(packet)
        if formula is not None:
            self.flops[self._action] += formula(*args, **kwargs, out_val=result)
        elif packet.__name__ == ATTENTION:
            self.flops[self._action] += sdpa_flop_count(*(one.shape for one in args[:3]))
        elif packet.__name__ == f"{ATTENTION}_backward":
            self.flops[self._action] += sdpa_backward_flop_count(*(one.shape for one in args[:4]))
        elif packet.__name__ == GROUPED:  # Each row with one of the matrices.
            self.flops[self._action] += 2 * args[0].numel() * args[1].size(-1)
