"""metrics.jsonl read back, whatever state its run left it in. Pure.

What cannot be read is told in `problems` and left out; nothing here raises.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GOES_ON = re.compile(r"goes on from .*?\(step ([\d,]+)[:)]")
"""The note of a run that was resumed, and at which step."""
OTHERS = ("notice", "ranks", "stopped")
"""Events that are kept as they are."""
MOST = 1 << 80
"""A whole number above it is no count of anything."""
MOST_TOLD = 5
"""Broken lines that are told by their number."""

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Step:
    """As `records.step_event` writes it; NaN for what was not finite. offload: seconds by what they went into; empty
    without offload."""

    number: int
    loss: float
    tokens: float
    grad_norm: float
    lr: float
    skipped: bool
    seconds: float
    offload: Mapping[str, float] = field(default_factory=dict)
    mfu: float = math.nan

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else math.nan


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """steps: each once, in order; done: the last line of a run that came to its end, else None; stopped: of one that
    was asked to end, the same; resumed: after which steps the run went on from a checkpoint; ranks: the newest of such
    lines."""

    steps: Sequence[Step] = ()
    notes: Sequence[str] = ()
    done: Event | None = None
    stopped: Event | None = None
    notices: Sequence[Event] = ()
    ranks: Event | None = None
    resumed: Sequence[int] = ()
    problems: Sequence[str] = ()

    @property
    def last_step(self) -> int:
        """The newest that is known to be made; 0: none is."""
        done = self.done.get("steps") if self.done else None
        return max(self.steps[-1].number if self.steps else 0, done if isinstance(done, int) else 0)


def parse(text: str) -> Metrics:
    """What the lines of `text` say; of a step that is there twice the later line counts."""
    steps: dict[int, Step] = {}
    notes: list[str] = []
    resumed: list[int] = []
    broken: list[int] = []
    done: Event | None = None
    newest: dict[str, Event] = {}
    notices: list[Event] = []
    for number, event in _events(text):
        kind = event.get("event") if event is not None else None
        if kind == "step" and event is not None and (step := _step(event)) is not None:
            steps[step.number] = step
            done = None  # What follows the end of a run was made by one that went on.
            newest.pop("stopped", None)
        elif kind == "note" and event is not None:
            message = str(event.get("message", ""))
            notes.append(message)
            if match := GOES_ON.match(message):
                resumed.append(int(match[1].replace(",", "")))
        elif kind == "done":
            done = event
        elif kind in OTHERS and event is not None:
            newest[kind] = event
            notices += [event] if kind == "notice" else []
        else:
            broken.append(number)
    problems = _told(broken, len(text.splitlines()), ends=text.endswith("\n"))
    ordered = [steps[number] for number in sorted(steps)]
    return Metrics(
        steps=ordered,
        notes=notes,
        done=done,
        stopped=newest.get("stopped"),
        notices=notices,
        ranks=newest.get("ranks"),
        resumed=resumed,
        problems=problems,
    )


def by_rank(value: object) -> dict[str, list[int]]:
    """`held_bytes` or `sent_bytes` of a done event: kind or axis -> bytes by rank. What has another form is left out.

    >>> by_rank({"weights": [8, 8], "host": None})
    {'weights': [8, 8]}
    """
    if not isinstance(value, Mapping):
        return {}
    return {
        str(name): [int(one) for one in numbers]
        for name, numbers in value.items()
        if isinstance(numbers, list) and all(_is_number(one) and math.isfinite(one) for one in numbers)
    }


def seconds_by(value: object) -> dict[str, float]:
    """`offload` of an event, as far as it is finite; empty without."""
    found = {str(name): number(one) for name, one in value.items()} if isinstance(value, Mapping) else {}
    return {name: seconds for name, seconds in found.items() if math.isfinite(seconds)}


def number(value: object) -> float:
    """NaN for what is none."""
    return float(value) if _is_number(value) else math.nan  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < MOST


def _events(text: str) -> Iterator[tuple[int, Event | None]]:
    """Line numbers from 1, and what stands there; None: it is broken."""
    for index, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                event = None
            yield index, event if isinstance(event, dict) else None


def _step(event: Event) -> Step | None:
    place = event.get("step")
    if not isinstance(place, int) or not _is_number(place) or place < 0:
        return None
    names = ("loss", "tokens", "grad_norm", "lr", "seconds")
    if any(name not in event or not (event[name] is None or _is_number(event[name])) for name in names):
        return None
    return Step(
        number=place,
        skipped=event.get("skipped") is True,
        offload=seconds_by(event.get("offload")),
        mfu=number(event.get("mfu")),
        **{name: number(event[name]) for name in names},
    )


def _told(broken: Sequence[int], lines: int, *, ends: bool) -> list[str]:
    if not broken:
        return []
    if list(broken) == [lines] and not ends:
        return [
            "The last line of metrics.jsonl is cut short, as of a run that was ended while it wrote; it is left out."
        ]
    listed = ", ".join(map(str, broken[:MOST_TOLD])) + (", .." if len(broken) > MOST_TOLD else "")
    many = len(broken) > 1
    return [
        f"{'Lines' if many else 'Line'} {listed} of metrics.jsonl cannot be read and {'are' if many else 'is'} left "
        "out."
    ]
