"""What crosses the boundary between two stages.

A forward carries the tensors that later stages need (mostly one: what the last block gave), a backward their gradients.
Both sides know names, shapes and dtypes from a header, which the sender sends along whenever the micro-batch has shapes
that it did not have before.

Sends never wait: what is sent is kept until it is known to have arrived. A forward's has when its gradients come back,
a backward's when a forward comes that the other side made after it, and all else is waited for by `settle`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero3d.contracts import Axis, Pending
from zero3d.errors import UsageError
from zero3d.pipeline.action import Action, taken_before
from zero3d.pipeline.specs import Spec, values_of

Signature = tuple[Any, ...]


@dataclass(frozen=True)
class Carried:
    """A tensor that crosses."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """What came over a boundary: tensors by name, and what all modules of earlier stages gave."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    specs: Mapping[str, Spec] = field(default_factory=dict)


@dataclass(frozen=True)
class Header:
    specs: Mapping[str, Spec]
    carried: Sequence[Carried]


class Boundary:
    """Between stages `stage` and `stage` + 1, seen from one of them, or from both where one rank has them.

    peer: pp index of the other side; here: of this one. `names`: what is carried; None: everything there is.
    """

    def __init__(self, axis: Axis, stage: int, here: int, peer: int, device: torch.device) -> None:
        self.stage = stage
        self.names: Sequence[str] | None = None
        self.peer = peer
        self._axis = axis
        self._is_local = here == peer
        self._device = device
        self._headers: dict[Signature, Header] = {}
        self._here: dict[str, list[Tensor]] = {}
        self._sent: dict[str, list[tuple[Pending, Tensor]]] = {}
        self._taken: Mapping[int, Sequence[int]] = {}
        self._coming: dict[str, list[tuple[Pending, Tensor]]] = {}

    def carry(self, names: Sequence[str] | None) -> None:
        """From now on these; None: everything."""
        self.names = names
        self._headers.clear()

    def follow(self, actions: Sequence[Action]) -> None:
        """What the other side's rank does in a step, in order: a forward that comes from it tells that the gradients of
        its backwards before that one have arrived there."""
        self._taken = taken_before(actions, self.stage)

    def send(self, number: int, signature: Signature, given: Mapping[str, Tensor], specs: Mapping[str, Spec]) -> None:
        """`given`: all tensors that there are to be carried, by name."""
        names = list(given) if self.names is None else self.names
        tensors = [given[name] for name in names]
        carried = [Carried(name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in zip(names, tensors)]
        if signature not in self._headers:
            header = self._headers[signature] = Header(dict(specs), carried)
            if not self._is_local:
                self._send_text(_written(header))
        if repr(values_of(specs)) != repr(values_of(self._headers[signature].specs)):  # No NaN equals another.
            raise UsageError(
                f"a block of pipeline stage {self.stage} or before gives a number or text that is not what it was for "
                "other inputs of the same shapes",
                hint="Give it as a tensor, such as x.detach().mean() without float(...): tensors are sent every time.",
            )
        known = self._headers[signature].carried
        for one, other in zip(carried, known):
            if one != other:
                raise UsageError(
                    f"pipeline stage {self.stage}: {one.name.partition('#')[0]} gave {_told(one)}, and {_told(other)} "
                    "for other inputs of the same shapes",
                    hint="What crosses a stage's boundary may depend on the inputs' shapes, not on their values.",
                )
        self._send(self._label("F", number), [tensor.detach() for tensor in tensors])

    def expect(self, number: int, signature: Signature) -> None:
        """Tensors of a forward may come from now on: posts receives, if it is known what comes."""
        header = self._headers.get(signature)
        if header is not None:
            self._expect(self._label("F", number), header.carried)

    def receive(self, number: int, signature: Signature) -> Arrived:
        """What `send` sent, as leaves of this stage's graph."""
        if signature not in self._headers:
            self._headers[signature] = _read(self._receive_text())
        header = self._headers[signature]
        tensors = self._receive(self._label("F", number), header.carried)
        for earlier in self._taken.get(number, ()):
            self._has_arrived(self._label("B", earlier))
        leaves = {one.name: tensor.requires_grad_(one.needs_gradient) for one, tensor in zip(header.carried, tensors)}
        return Arrived(tensors=leaves, specs=header.specs)

    def differentiated(self, signature: Signature) -> list[Carried]:
        """What has gradients."""
        return [one for one in self._headers[signature].carried if one.needs_gradient]

    def send_gradients(self, number: int, signature: Signature, leaves: Mapping[str, Tensor]) -> None:
        """Of what `receive` gave."""
        gradients = []
        for one in self.differentiated(signature):
            leaf = leaves[one.name]
            gradients.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        self._send(self._label("B", number), gradients)

    def expect_gradients(self, number: int, signature: Signature) -> None:
        self._expect(self._label("B", number), self.differentiated(signature))

    def receive_gradients(self, number: int, signature: Signature) -> Mapping[str, Tensor]:
        """By the names of what `send` sent."""
        wanted = self.differentiated(signature)
        tensors = self._receive(self._label("B", number), wanted)
        if wanted:
            self._has_arrived(self._label("F", number))
        return {one.name: tensor for one, tensor in zip(wanted, tensors)}

    def settle(self) -> None:
        """All that was sent has arrived."""
        for label in list(self._sent):
            self._has_arrived(label)

    def _has_arrived(self, label: str) -> None:
        for pending, _ in self._sent.pop(label, ()):
            pending.wait()

    def _label(self, kind: str, number: int) -> str:
        return f"{kind}{number} of stage {self.stage if kind == 'F' else self.stage + 1}"

    def _send(self, label: str, tensors: Sequence[Tensor]) -> None:
        if self._is_local:
            self._here[label] = list(tensors)
            return
        kept = self._sent.setdefault(label, [])  # A step that ended with an error may have left some.
        for index, tensor in enumerate(tensors):
            if tensor.numel():
                flat = tensor.contiguous().view(-1)
                kept.append((self._axis.send(flat, self.peer, f"{label}, {index}"), flat))

    def _expect(self, label: str, wanted: Sequence[Carried]) -> None:
        if self._is_local or label in self._coming:
            return
        coming = self._coming[label] = []
        for index, one in enumerate(wanted):
            tensor = torch.empty(one.shape, dtype=one.dtype, device=self._device)
            if tensor.numel():
                coming.append((self._axis.recv(tensor.view(-1), self.peer, f"{label}, {index}"), tensor))
            else:
                coming.append((_Nothing(), tensor))

    def _receive(self, label: str, wanted: Sequence[Carried]) -> list[Tensor]:
        if self._is_local:
            return [tensor.detach() for tensor in self._here.pop(label)]
        self._expect(label, wanted)
        tensors = []
        for pending, tensor in self._coming.pop(label):
            pending.wait()
            tensors.append(tensor)
        return tensors

    def _send_text(self, text: str) -> None:
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self._device)
        size = torch.tensor([data.numel()], dtype=torch.int64, device=self._device)
        kept = self._sent.setdefault("header", [])  # Shapes may be new several times in a step.
        for what, tensor in (("size of header", size), ("header", data)):
            kept.append((self._axis.send(tensor, self.peer, f"{what} of stage {self.stage}"), tensor))

    def _receive_text(self) -> str:
        size = torch.empty(1, dtype=torch.int64, device=self._device)
        self._axis.recv(size, self.peer, f"size of header of stage {self.stage}").wait()
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        self._axis.recv(data, self.peer, f"header of stage {self.stage}").wait()
        return bytes(data.tolist()).decode()


class _Nothing:
    def wait(self) -> None:
        return None


def _told(one: Carried) -> str:
    without = "" if one.needs_gradient else " without gradient"
    return f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}{without}"


def _written(header: Header) -> str:
    carried = [
        [one.name, one.shape, str(one.dtype).removeprefix("torch."), one.needs_gradient] for one in header.carried
    ]
    return json.dumps({"specs": header.specs, "carried": carried})


def _read(text: str) -> Header:
    found = json.loads(text)
    carried = [
        Carried(name, tuple(shape), getattr(torch, dtype), needs) for name, shape, dtype, needs in found["carried"]
    ]
    return Header(found["specs"], carried)
