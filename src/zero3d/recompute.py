"""Activation checkpointing of blocks, by hooks: the model's modules and names stay as they are.

A block's forward runs under torch's non-reentrant checkpointing, which keeps the block's inputs instead of its
activations and runs the block again when backward first needs one.
"""

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator

from zero3d.errors import UsageError


class Recomputed:
    """Recomputes one block."""

    def __init__(self, block: nn.Module, untraced: Callable[[Any], Any]) -> None:
        self._block = block
        self._again = False
        self._running: list[Generator[None, None, None] | None] = []
        self._hooks = [
            block.register_forward_pre_hook(untraced(self._before), with_kwargs=True),
            block.register_forward_hook(untraced(self._after), always_call=True, prepend=True),
        ]

    def close(self) -> None:
        """The block keeps its activations again."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if self._again or not torch.is_grad_enabled():
            self._running.append(None)
            return
        running = _checkpointing(block, self._contexts, *args, **kwargs)
        self._running.append(running)
        next(running)

    def _after(self, block: nn.Module, args: Any, output: Any) -> None:
        running = self._running.pop() if self._running else None
        if running is not None:
            next(running, None)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), self

    def __enter__(self) -> None:
        """Round each recomputation, of which there may be several: the block runs as it is."""
        self._again = True

    def __exit__(self, *_: object) -> None:
        self._again = False


def recompute(model: nn.Module, blocks: Sequence[nn.Module], mode: str = "block") -> list[Recomputed]:
    """With `mode` "block" the activations of `blocks` are computed again in backward, until what is returned is closed.

    Raises `UsageError` for a model in which running a block again is not what it was the first time.
    """
    if mode == "none":
        return []
    if not blocks:
        raise UsageError(
            'recompute.mode = "block", and no list of repeated blocks was found in the model',
            hint='Name it with model.blocks = "path.of.the.list", or set recompute.mode = "none".',
        )
    if blocks and getattr(getattr(model, "config", None), "use_cache", False):
        raise UsageError(
            "the model keeps keys and values of each block (config.use_cache), and a block that is run again would "
            "add to them once more",
            hint='Set model.config.use_cache = False, or recompute.mode = "none".',
        )
    if blocks and (hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None):
        raise UsageError(
            "the model is compiled as a whole, and recomputation runs single blocks, which are not",
            hint='Compile each block instead (block.compile()), or set recompute.mode = "none".',
        )
    return [Recomputed(block, untraced(model)) for block in blocks]


def in_backward() -> bool:
    """Whether this code runs inside a backward: a forward seen here is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def untraced(model: nn.Module) -> Callable[[Any], Any]:
    """What makes a hook of one of `model`'s modules what torch.compile shall see, where the user compiles modules with
    their hooks: a call to be made as it is, between two graphs. Without such modules hooks stay what they are, as each
    call of another costs microseconds."""
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
        return torch.compiler.disable
    return _shared


def _shared(hook: Any) -> Any:
    """`hook` as a function, which copies of the model share: of a method they would have a copy, and of all that it
    belongs to."""
    return hook if isinstance(hook, FunctionType) else lambda *args, **kwargs: hook(*args, **kwargs)


def _checkpointing(block: nn.Module, contexts: Any, *args: Any, **kwargs: Any) -> Generator[None, None, None]:
    """torch's checkpointing in two halves: up to the forward, and after it."""
    options = {"preserve_rng_state": True, "context_fn": contexts, "determinism_check": "default", "debug": False}
    if "early_stop" in inspect.signature(_checkpoint_without_reentrant_generator).parameters:
        options["early_stop"] = True
    generator: Generator[None, None, None] = _checkpoint_without_reentrant_generator(
        block, *options.values(), *args, **kwargs
    )
    return generator
