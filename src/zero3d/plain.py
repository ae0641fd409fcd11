"""The same training in one plain process: a loop without shards or ranks, for `verify` to compare with."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from zero3d import params
from zero3d.config import Config
from zero3d.contracts import Batch, Loss, ModelSource, OptimizerChoice
from zero3d.errors import UsageError
from zero3d.optim.assignment import assign
from zero3d.optim.learning_rate import factor
from zero3d.optim.rule import Rule
from zero3d.pipeline.calling import Call, caller
from zero3d.randomness import Randomness
from zero3d.zero.units import find_blocks


@dataclass(frozen=True, kw_only=True)
class PlainStep:
    """One step: the mean loss over all counted targets, its gradients (zeros where no backward came) and their norm,
    both before clipping."""

    loss: float
    norm: float
    gradients: Mapping[str, Tensor]


def copy_of(source: ModelSource, seed: int) -> nn.Module:
    """A module of the same structure that shares nothing with `source`; the user's generator is as before after it."""
    if isinstance(source, nn.Module):
        return copy.deepcopy(source)
    if not callable(source):
        raise UsageError(
            f"the model is a {type(source).__name__}; it must be an nn.Module or a function building one",
            hint="Pass the module itself, or a function without arguments that returns it.",
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return copy.deepcopy(source())  # the function may give the same module each time


def fill(model: nn.Module, weights: Mapping[str, Tensor], buffers: Iterable[tuple[str, Tensor]]) -> None:
    """Copies of `weights` and `buffers` become those of `model`, which may be on meta; 16-bit ones become fp32."""
    for info in params.collect(model):
        whole = _widened(weights[info.name]).detach().clone()
        params.replace(model, info, nn.Parameter(whole, requires_grad=info.trainable))
    for name, buffer in buffers:
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, _widened(buffer).detach().clone())


class Plain:
    """Trains `model` in fp32 on all ranks' micro-batches, in rank order, as the resolved `config` says.

    Random numbers are drawn as each dp rank would draw them, so dropout leaves out the same.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: OptimizerChoice,
        config: Config,
        device: torch.device,
        call: Call | None,
    ) -> None:
        assert config.parallel.dp != "auto", "resolved"
        self._model, self._loss, self._config = model, loss, config
        self._call = call or caller(model, torch.float32)
        self._trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._optimizers = list(self._made(optimizer))
        self._peaks = [[group.get("lr", 0.0) for group in one.param_groups] for one in self._optimizers]
        self._randomness = [Randomness(config.run.seed, index, device) for index in range(config.parallel.dp)]
        _, blocks = find_blocks(model, config.model.blocks)
        for one in self._randomness:
            one.watch(model, blocks)
        self._updates = 0

    def _made(self, optimizer: OptimizerChoice) -> Iterator[torch.optim.Optimizer]:
        """One torch optimizer for each rule, and for each parameter that the engine updates whole."""
        options, patterns = self._config.optimizer, self._config.zero.whole_parameters
        assignment = assign(optimizer, options, patterns, params.collect(self._model))
        groups: dict[tuple[Rule, str], dict[tuple[tuple[str, object], ...], list[nn.Parameter]]] = {}
        for name, rule in assignment.rule_of.items():
            alike = groups.setdefault((rule, name if name in assignment.whole else ""), {})
            alike.setdefault(tuple(rule.settings_of(name).items()), []).append(self._trained[name])
        for (rule, _), own in groups.items():
            # A function of the user's own is given what the engine gives it: parameters, no groups.
            plain = own.get((), []) if len(own) == 1 else []
            yield rule.build(plain or [{"params": members, **dict(settings)} for settings, members in own.items()])

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Of all parameters, each once."""
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def step(self, parts: Sequence[Sequence[Batch]], number: int, *, update: bool) -> PlainStep:
        """Step `number` (0 is the first) on each dp rank's micro-batches. Without `update` weights stay."""
        self._model.train()
        for parameter in self._trained.values():
            parameter.grad = None
        loss, count = self._backward(parts, number)
        gradients = {}
        for name, parameter in self._trained.items():
            if parameter.grad is not None:
                parameter.grad.div_(max(count, 1))
            gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        norm = sqrt(sum(float(one.double().square().sum()) for one in gradients.values()))
        if update:
            self._update(norm)
        return PlainStep(loss=loss / max(count, 1), norm=norm, gradients=gradients)

    def _backward(self, parts: Sequence[Sequence[Batch]], number: int) -> tuple[float, int]:
        """The sum of the losses, and of their counted targets."""
        total, count = 0.0, 0
        for randomness, micro_batches in zip(self._randomness, parts, strict=True):
            with randomness.step(number):
                for index, batch in enumerate(micro_batches):
                    randomness.enter(index)
                    result = self._loss(self._call(self._model, batch), batch)
                    loss, targets = result if isinstance(result, tuple) else (result, 1)
                    if loss.requires_grad:
                        loss.backward()
                    total, count = total + float(loss.detach()), count + int(targets)
        return total, count

    def _update(self, norm: float) -> None:
        limit = self._config.optimizer.clip_norm
        for parameter in self._trained.values():
            if limit and parameter.grad is not None:
                parameter.grad.mul_(min(1.0, limit / (norm + 1e-6)))
        rate = factor(self._updates, self._config.run.steps, self._config.optimizer)
        for optimizer, peaks in zip(self._optimizers, self._peaks):
            for group, peak in zip(optimizer.param_groups, peaks):
                if "lr" in group:
                    group["lr"] = peak * rate
            optimizer.step()
        self._updates += 1


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
