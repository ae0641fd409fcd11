"""What a run's folder holds, as one value: read as far as it can be, with what cannot be told in words. Pure."""

import importlib.util
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from zero3d.checkpoint.folders import NAME, candidates, whole
from zero3d.checkpoint.manifest import Manifest
from zero3d.checkpoint.place import URL
from zero3d.config import Config
from zero3d.errors import DataError, UsageError
from zero3d.layout import Layout
from zero3d.records import CHECKPOINTS, CONFIG, METRICS, PLAN, TRACE
from zero3d.report.lines import Metrics, parse
from zero3d.report.plan_file import PlanFile
from zero3d.report.traced import read_trace
from zero3d.trace.span import Trace

DRYRUN = "dryrun.json"
"""What `zero3d dryrun CONFIG --json` prints, where somebody has put it beside the run."""
LOCK = ".lock"
State = Literal["done", "running", "cut short"]
File = TypeVar("File", bound=BaseModel)


class RehearsedRank(BaseModel):
    """Bytes at the peak, by kind; those of the host; bytes sent in a step, by axis."""

    rank: int
    peak_bytes: int = 0
    peak_by_kind: dict[str, int]
    host_bytes: int = 0
    sent_bytes: dict[str, int] = {}


class Rehearsal(BaseModel):
    """Of some ranks of a world."""

    world: int
    ranks: list[RehearsedRank]
    bubble: float | None = None


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint; why: it is not whole; empty where it is."""

    name: str
    step: int | None
    size: int = 0
    what: str = ""
    layout: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """values: section -> key -> value, as config.toml has them. config: the same checked; None where that is not
    possible. checkpoint_place: where they go. problems: what is missing, broken or left out, in sentences."""

    folder: Path
    state: State
    values: Mapping[str, Mapping[str, Any]]
    config: Config | None
    plan: PlanFile | None
    metrics: Metrics
    rehearsal: Rehearsal | None
    trace: Trace | None
    checkpoints: Sequence[Saved]
    checkpoint_place: str
    problems: Sequence[str]

    @property
    def name(self) -> str:
        return str(self.values.get("run", {}).get("name") or self.folder.resolve().name)

    @property
    def steps(self) -> int | None:
        """That the run was to make; None: nobody knows."""
        return self.config.num_steps if self.config else self.plan.steps if self.plan else None

    @property
    def layout(self) -> Layout | None:
        if self.plan:
            return self.plan.layout
        parallel = self.config.parallel if self.config else None
        if parallel is not None and parallel.dp != "auto":
            return Layout(dp=parallel.dp, tp=parallel.tp, pp=parallel.pp)
        return self.trace.layout if self.trace else None


def read(folder: Path) -> Run:
    """The run of `folder`, which `places.find` has found to be one."""
    problems: list[str] = []
    values, config = _config(folder, problems)
    text = _text(folder / METRICS, problems, missing=f"There is no {METRICS}: no step is known.")
    metrics = parse(text)
    plan = _checked(folder / PLAN, PlanFile, problems, missing=f"There is no {PLAN}: what was planned is not known.")
    place = (config.checkpoint.folder if config else None) or str(folder / CHECKPOINTS)
    trace = None
    try:
        written = _text(folder / TRACE, problems)
        trace = read_trace(written) if written else None
    except DataError as error:
        problems.append(f"{error.message}; timeline and waits are left out.")
    state: State = "done" if metrics.done else "running" if is_locked(folder) else "cut short"
    return Run(
        folder=folder,
        state=state,
        values=values,
        config=config,
        plan=plan,
        metrics=metrics,
        rehearsal=_checked(folder / DRYRUN, Rehearsal, problems),
        trace=trace,
        checkpoints=_checkpoints(place, metrics, problems),
        checkpoint_place=place,
        problems=[*metrics.problems, *problems],
    )


def _text(path: Path, problems: list[str], *, missing: str = "") -> str:
    """Empty where there is none; bytes that are no text become marks."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        problems += [missing] if missing else []
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror or error}.")
    return ""


def _config(folder: Path, problems: list[str]) -> tuple[Mapping[str, Mapping[str, Any]], Config | None]:
    text = _text(folder / CONFIG, problems, missing=f"There is no {CONFIG}: the configuration is not known.")
    try:
        tree = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        problems.append(f"{CONFIG} is not TOML: {error}.")
        return {}, None
    values = {section: keys for section, keys in tree.items() if isinstance(keys, dict)}
    if not values:
        return {}, None
    try:
        return values, Config.load(tree)
    except UsageError as error:
        problems.append(f"{CONFIG} is not of this version: {error.message}. Its values are shown as they are.")
        return values, None


def _checked(path: Path, form: type[File], problems: list[str], *, missing: str = "") -> File | None:
    text = _text(path, problems, missing=missing)
    if not text:
        return None
    try:
        return form.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        problems.append(f"{path.name} cannot be used: {place + ': ' if place else ''}{first['msg']}.")
        return None


def is_locked(folder: Path) -> bool:
    """Whether a run of the command writes there now; False where nobody can tell."""
    if importlib.util.find_spec("fcntl") is None:
        return False
    import fcntl

    try:
        with (folder / LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _checkpoints(place: str, metrics: Metrics, problems: list[str]) -> list[Saved]:
    """Newest first. Those at a URL are not looked at: a report needs no network."""
    if URL.match(place):
        newest = metrics.done.get("checkpoint") if metrics.done else None
        problems.append(f"Checkpoints are at {place}, which is not looked at; the newest: {newest or 'not known'}.")
        return []
    if not Path(place).is_dir():
        return []
    found = []
    try:
        for path in candidates(Path(place)):
            match = NAME.fullmatch(path.name)
            try:
                manifest = whole(path)[1]
            except DataError as error:
                found.append(Saved(name=path.name, step=int(match[1]) if match else None, why=error.message))
            else:
                found.append(_saved(path, manifest))
    except (DataError, OSError) as error:
        problems.append(f"Checkpoints in {place} cannot be read: {error}.")
    return found


def _saved(path: Path, manifest: Manifest) -> Saved:
    sizes = manifest.layout
    return Saved(
        name=path.name,
        step=manifest.step,
        size=sum(one.size for one in manifest.files),
        what=manifest.what,
        layout=f"dp {sizes.dp} x tp {sizes.tp} x pp {sizes.pp}",
    )
