"""The host's AdamW: torch's own fused CPU kernel, chunk by chunk, so that memory is passed over once.

A chunk's gradient is widened into scratch memory, the kernel updates weights and moments from there, and the new
weights are narrowed, all while the chunk is in a core's cache. Of each element with 16-bit gradients and weights 28
bytes move: gradient 2 in, weight and moments 12 in and 12 out, weight 2 out.

The bits are those of torch's fused step: chunks start at multiples of 64 elements, more than any vector has, and the
kernel treats vectors one by one.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zero3d.computed import is_fake
from zero3d.mapped import fresh

CHUNK = 1 << 16
"""Elements that a thread updates at a time: their weights, moments and gradient take 1 MiB. Of smaller ones the calls
cost more than the cache saves."""

TASK = 8 * CHUNK
"""Elements that a thread takes at a time."""

ASIDE = 512
"""Elements by which scratch memory starts aside from a page's start, where large buffers do: loads and stores at equal
places of a page wait for each other. Worth some 4 % of a step."""


Make = Callable[[Tensor, str], Tensor]


@dataclass(frozen=True, eq=False)
class _Task:
    """Part of one tensor. All tensors but `step`: [n], of the same elements."""

    update: Callable[..., object]
    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    gradient: Tensor
    out: Tensor | None


class Workers:
    """Threads, and their scratch memory, for as many optimizers as there are: one of them steps at a time.

    `threads` work at once, the calling one included. Where torch's own kernels use several threads each, those count:
    then there are fewer threads of ours, but at least one.
    """

    def __init__(self, threads: int) -> None:
        assert threads > 0
        self.num_inner = torch.get_num_threads()
        self._num = max(1, threads // self.num_inner)
        self._scratch: list[Tensor] = []
        self._pool = ThreadPoolExecutor(self._num, thread_name_prefix="zero3d update")

    def run(self, work: Callable[[Tensor], None], num_tasks: int) -> None:
        """`work(scratch)` on as many threads as there are tasks for. Raises what it raised, once all have stopped."""
        num = max(1, min(self._num, num_tasks))
        while len(self._scratch) < num:
            self._scratch.append(torch.zeros(CHUNK * self.num_inner + ASIDE)[ASIDE:])
        others = [self._pool.submit(work, scratch) for scratch in self._scratch[1:num]]
        try:
            work(self._scratch[0])
        finally:
            wait(others)
        for other in others:
            other.result()

    def held(self) -> Iterator[tuple[str, Tensor]]:
        for scratch in self._scratch:
            yield "buffers", scratch

    def close(self) -> None:
        """The threads end."""
        self._pool.shutdown()


class HostAdamW:
    """torch.optim.Adam or AdamW on tensors in host memory, in cache-sized chunks, by several threads.

    The optimizer keeps what is its own: settings are read from its groups, and state is where its own step would put
    it. `tensors`: the order in which `step` gets gradients, where it is not that of the optimizer's groups. `make`:
    gives the zeros that the moment of that key of a tensor begins with, in its shape.
    """

    @staticmethod
    def takes(optimizer: torch.optim.Optimizer) -> bool:
        """Whether this does what the optimizer's own step would: a plain fused Adam or AdamW of fp32 on the CPU."""
        hooked = (
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or "step" in vars(optimizer)
        )
        known = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        return known and not hooked and all(_is_plain(group) for group in optimizer.param_groups)

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        workers: Workers,
        tensors: Sequence[Tensor] | None = None,
        make: Make | None = None,
    ) -> None:
        assert self.takes(optimizer)
        self._optimizer = optimizer
        groups = enumerate(optimizer.param_groups)
        group_of = {id(tensor): number for number, group in groups for tensor in group["params"]}
        self._tensors = list(_of_groups(optimizer) if tensors is None else tensors)
        self._group_of = [group_of[id(tensor)] for tensor in self._tensors]
        self._workers = workers
        self._make = make or _zeros

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], scale: float, out: Sequence[Tensor | None]) -> None:
        """One update, in place, with `gradients` times `scale`.

        `gradients`, `out`: for each tensor its gradient [n], fp32 or 16-bit, which is left as it is, and where its new
        weights [n] go, rounded to their dtype. A tensor without a gradient stays as it is, and so does its `out`.
        A gradient of fp32 is divided by 1 / `scale` as the kernel itself does it, one of 16 bits is widened and then
        multiplied. What fails in a thread is raised here, once all of them have stopped.
        """
        tasks = deque(self._tasks(gradients, out))
        divisor = torch.tensor(1.0 / scale)
        number = len(tasks)
        if tasks and is_fake(tasks[0].weight):
            tasks.clear()  # State and scratch memory are made; there is nothing to compute.

        def work(scratch: Tensor) -> None:
            with torch.no_grad():  # Threads do not inherit it.
                while tasks:
                    try:
                        task = tasks.popleft()
                    except IndexError:  # Another thread took the last one.
                        return
                    try:
                        _run(task, scale, divisor, scratch)
                    except BaseException:
                        tasks.clear()
                        raise

        self._workers.run(work, number)

    def _tasks(self, gradients: Sequence[Tensor | None], out: Sequence[Tensor | None]) -> Iterator[_Task]:
        """Parts of all tensors that have a gradient. Their step counters advance."""
        updates = [_update_of(group) for group in self._optimizer.param_groups]
        size = TASK * self._workers.num_inner
        for tensor, number, gradient, target in zip(self._tensors, self._group_of, gradients, out, strict=True):
            if gradient is None:
                continue
            state = self._state_of(tensor)
            state["step"] += 1
            flats = [whole.view(-1).split(size) for whole in (tensor, state["exp_avg"], state["exp_avg_sq"], gradient)]
            targets = [None] * len(flats[0]) if target is None else target.view(-1).split(size)
            for weight, exp_avg, exp_avg_sq, part, goal in zip(*flats, targets, strict=True):
                yield _Task(updates[number], weight, exp_avg, exp_avg_sq, state["step"], part, goal)

    def _state_of(self, tensor: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._optimizer.state[tensor]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = self._make(tensor, name)
        return state


def _run(task: _Task, scale: float, divisor: Tensor, scratch: Tensor) -> None:
    size = scratch.numel()
    parts = [whole.split(size) for whole in (task.weight, task.exp_avg, task.exp_avg_sq, task.gradient)]
    outs = [None] * len(parts[0]) if task.out is None else task.out.split(size)
    for weight, exp_avg, exp_avg_sq, gradient, out in zip(*parts, outs, strict=True):
        wide = scratch if gradient.numel() == size else scratch[: gradient.numel()]
        if gradient.dtype != torch.float32:
            wide.copy_(gradient)
            if scale != 1.0:
                wide.mul_(scale)
        elif scale != 1.0:
            # The kernel would write the quotient back into the gradient.
            torch.div(gradient, divisor, out=wide)
        else:
            wide = gradient
        task.update([weight], [wide], [exp_avg], [exp_avg_sq], [], [task.step])
        if out is not None:
            out.copy_(weight)


def _update_of(group: Mapping[str, Any]) -> Callable[..., object]:
    """torch's kernel with the group's settings of now."""
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    settings = {
        "lr": group["lr"],
        "beta1": group["betas"][0],
        "beta2": group["betas"][1],
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "amsgrad": False,
        "maximize": False,
    }
    return lambda *tensors: kernel(*tensors, **settings)


def _is_plain(group: Mapping[str, Any]) -> bool:
    numbers = (group["lr"], *group["betas"])
    return (
        bool(group["fused"])
        and not any(group[name] for name in ("amsgrad", "maximize", "capturable", "differentiable"))
        and not any(isinstance(number, Tensor) for number in numbers)
        and all(
            tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
            for tensor in group["params"]
        )
    )


def _of_groups(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (tensor for group in optimizer.param_groups for tensor in group["params"])


def _zeros(tensor: Tensor, key: str) -> Tensor:
    return fresh(tensor.numel(), tensor.dtype, tensor.device).view_as(tensor)
