"""What `--model` of `zero3d plan` names: a public model, a folder with a config.json, a CONFIG, or a function."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from zero3d.cli import checks
from zero3d.config import Config, Model
from zero3d.errors import UsageError
from zero3d.planner.public_models import PublicModel, find_model
from zero3d.planner.workload import Workload

FEW = 3
"""Blocks of a preset that are built to count one: all are alike but the first and the last."""
LONGEST = 1 << 24
"""Tokens of a sample."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A model to be planned for. sequence, global_batch: that it says itself; sections: what of a configuration it is;
    workload: (dtype, tokens) -> (tp, sequence parallel) -> its workload; notes: what its CONFIG does not say"""

    name: str
    sequence: int
    workload: Callable[[str, int], Callable[[int, bool], Workload]]
    global_batch: int | None = None
    dtype: str | None = None
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    source: str = ""
    longest: int = LONGEST


def asked(model: str, sequence: int | None, *, allow_code: bool) -> Asked:
    """Raises `UsageError` or `ConfigError` for what cannot be read, and names the nearest public models."""
    path = Path(model).expanduser()
    if model.endswith(".toml"):
        return _config(path, allow_code=allow_code)
    if path.is_dir() or model.endswith(".json"):
        return _folder(path)
    if ":" in model:
        return _function(model, sequence or 1024, allow_code=allow_code)
    if path.parts[1:]:
        raise UsageError(f"there is no folder {model}", hint="Name one with the config.json of a Transformers model.")
    return _public(model, find_model(model))


def _public(name: str, model: PublicModel) -> Asked:
    return Asked(
        name=name,
        sequence=model.sequence,
        workload=lambda dtype, tokens: _of_preset(
            Model.model_validate(model.section()), model.vocabulary, dtype, tokens
        ),
        sections={"model": model.section()},
        notes=(
            f"[model] has no size of the vocabulary, which is the tokenizer's; planned with {model.vocabulary:,}.",
            "Set data.tokenizer to the model's own tokenizer.json and data.source to the text; rehearse it with zero3d "
            f"dryrun --vocabulary {model.vocabulary}.",
        ),
        source=model.source,
    )


def _config(path: Path, *, allow_code: bool) -> Asked:
    config = Config.load(path)
    checks.check_code(config, allow_code)
    vocabulary = checks.vocabulary_of(config)
    kept = config.model_dump(exclude_unset=True)
    for section in ("parallel", "zero", "offload", "recompute"):
        kept.pop(section, None)
    compute = config.precision.compute

    def workload(dtype: str, tokens: int) -> Callable[[int, bool], Workload]:
        if config.model.path is None:
            return _of_preset(config.model, vocabulary, dtype, tokens)
        return _of_function(config.model, vocabulary, dtype, tokens, config.model.blocks)

    return Asked(
        name=str(path),
        sequence=config.data.sequence_length,
        workload=workload,
        global_batch=config.data.global_batch,
        dtype={"model": "fp32", "auto": None}.get(compute, compute),
        sections=kept,
    )


def _folder(path: Path) -> Asked:
    from zero3d.models.described import described

    found = described(path)
    longest = found.longest or LONGEST

    def build() -> Any:
        model: Any = found.build()
        model.config.use_cache = False  # Training keeps no keys and values, and blocks may be computed again.
        return model

    def workload(dtype: str, tokens: int) -> Callable[[int, bool], Workload]:
        return _counted(build, found.vocabulary, dtype, tokens, call=found.call)

    return Asked(
        name=str(path),
        sequence=min(longest, 4096),
        workload=workload,
        notes=(
            f"[model] has no key for a Transformers folder: rehearse it with `zero3d dryrun PLAN --model {path}`,",
            'and train it with model.path = "package.module:function" that returns zero3d.pretrained(FOLDER).',
        ),
        longest=longest,
    )


def _function(name: str, sequence: int, *, allow_code: bool) -> Asked:
    model = Model(preset=None, path=name)
    checks.check_code(Config.load({"model": {"path": name}}), allow_code)
    return Asked(
        name=name,
        sequence=sequence,
        workload=lambda dtype, tokens: _of_function(model, 256, dtype, tokens, None),
        sections={"model": {"path": name}},
        notes=('planned with the vocabulary of data.tokenizer = "bytes", 256, where the function takes one.',),
    )


def _of_preset(model: Model, vocabulary: int, dtype: str, tokens: int) -> Callable[[int, bool], Workload]:
    from zero3d.models.presets import build_function

    few = min(FEW, model.layers)
    small = model.model_copy(update={"layers": few})
    counted = _counted(build_function(small, vocabulary, tokens), vocabulary, dtype, tokens)

    def workload(tp: int, sequence_parallel: bool) -> Workload:
        found = counted(tp, sequence_parallel)
        return replace(found, order=[found.order[0]] * model.layers) if model.layers > few else found

    return cache(workload)


def _of_function(
    model: Model, vocabulary: int, dtype: str, tokens: int, blocks: str | None
) -> Callable[[int, bool], Workload]:
    from zero3d.models.presets import build_function

    build = build_function(model, vocabulary, tokens, allow_code=True)
    return _counted(build, vocabulary, dtype, tokens, blocks=blocks)


def _counted(
    build: Callable[[], Any],
    vocabulary: int,
    dtype: str,
    tokens: int,
    *,
    call: Callable[[Any, Any], Any] | None = None,
    blocks: str | None = None,
) -> Callable[[int, bool], Workload]:
    import torch

    from zero3d.dryrun.count import Subject, count

    def batch(samples: int) -> dict[str, Any]:
        ids = torch.zeros(samples, tokens, dtype=torch.long)
        return {"tokens": ids, "targets": ids}

    subject = Subject(build=build, batch=batch, tokens=tokens, blocks=blocks, call=call)

    @cache
    def workload(tp: int, sequence_parallel: bool) -> Workload:
        return count(subject, dtype=dtype, tp=tp, sequence_parallel=sequence_parallel)

    return workload
