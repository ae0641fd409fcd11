"""A torch optimizer on shards: each shard has one of its own, over the pieces of parameters that lie in it.

Pieces start and end at multiples of 64 elements, so an elementwise update gives the same bits wherever shards are
cut. A parameter that no backward reached has no gradient, as in plain torch: its state and weight stay.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from zero3d.optim.rule import Rule
from zero3d.zero.shard import Shard


class ShardedOptimizer:
    """The `Optimizer` whose state lives beside the master weights."""

    def __init__(self, rule: Rule, shards: Sequence[Shard]) -> None:
        self._inner: dict[Shard, torch.optim.Optimizer] = {}
        self._parts: dict[Shard, list[Tensor]] = {}
        self._scratch = torch.empty(0)
        self._unused: frozenset[str] = frozenset()
        for shard in shards:
            parts = [shard.master[piece.start : piece.stop] for piece in shard.pieces]
            groups: dict[tuple[tuple[str, object], ...], list[Tensor]] = {}
            for piece, part in zip(shard.pieces, parts):
                groups.setdefault(tuple(rule.settings_of(piece.name).items()), []).append(part)
            plain = list(groups) == [()]
            self._parts[shard] = parts
            self._inner[shard] = rule.build(
                parts if plain else [{"params": part, **dict(key)} for key, part in groups.items()]
            )
        for optimizer in self._inner.values():
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group.get("lr"))

    def leave(self, unused: frozenset[str]) -> None:
        """The next step has no gradient for these parameters."""
        self._unused = unused

    def step(self, shards: Iterable[Shard], lr: float, scale: float) -> Iterable[Shard]:
        """`lr` is a factor of each group's own learning rate."""
        for shard in shards:
            self._update(shard, lr, scale)
            yield shard

    def state_of(self, shard: Shard) -> Mapping[str, Mapping[str, Tensor]]:
        state = self._inner[shard].state
        return {piece.name: state[part] for piece, part in zip(shard.pieces, self._parts[shard])}

    @property
    def learning_rate(self) -> float:
        """Of the first group, as last used."""
        for optimizer in self._inner.values():
            return float(optimizer.param_groups[0].get("lr", 0.0))
        return 0.0

    def held(self) -> Iterable[tuple[str, Tensor]]:
        yield "buffers", self._scratch
        for optimizer in self._inner.values():
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        # Step counters are per piece, not per element: bookkeeping, no model state.
                        yield ("optimizer" if value.dim() else "buffers"), value

    def _update(self, shard: Shard, lr: float, scale: float) -> None:
        optimizer = self._inner[shard]
        shard.coming.wait()
        # Fused optimizers offer to scale as they read: torch's own protocol with its GradScaler.
        scales = getattr(optimizer, "_step_supports_amp_scaling", False) and shard.gradient.dtype == torch.float32
        gradient = shard.gradient if scales else self._scaled(shard, scale)
        shard.scaled *= scale if gradient is shard.gradient else 1.0
        for piece, part in zip(shard.pieces, self._parts[shard]):
            part.grad = None if piece.name in self._unused else gradient[piece.start : piece.stop]
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["initial_lr"] * lr
        if scales:
            optimizer.grad_scale = torch.tensor(1.0 / scale, device=gradient.device)  # type: ignore[attr-defined]
        optimizer.step()
        for part in self._parts[shard]:
            part.grad = None

    def _scaled(self, shard: Shard, scale: float) -> Tensor:
        """The gradient in fp32 times `scale`: in place, or beside one that is held in 16 bits."""
        if shard.gradient.dtype == shard.master.dtype:
            return shard.gradient.mul_(scale)
        if self._scratch.numel() < shard.gradient.numel():
            self._scratch = torch.empty_like(shard.master)
        return self._scratch[: shard.gradient.numel()].copy_(shard.gradient).mul_(scale)
