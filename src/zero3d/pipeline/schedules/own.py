"""A schedule of the user's own, from a text: one line a rank, actions separated by blanks.

    # 2 ranks, one stage each, 3 micro-batches
    F0 F1 B0 F2 B1 B2
    F0 B0 F1 B1 F2 B2

Where a rank holds several stages every action names its own: F0.2 is the forward of micro-batch 0 in stage 2. Empty
lines, and what follows a #, are left out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero3d.errors import ConfigError
from zero3d.pipeline.action import Action, Kind, read, written
from zero3d.pipeline.legal import check as check_legal
from zero3d.pipeline.schedules.registry import Named, named

FORMS = "Write F, B, I or W and the micro-batch, as in F0, or with the stage, as in F0.2: micro-batch 0 in stage 2."


@dataclass(frozen=True, kw_only=True)
class OwnSchedule(Named):
    """A text's schedule: for the numbers that the text is for, and no others."""

    ranks: Sequence[Sequence[Action]]

    @property
    def num_stages(self) -> int:
        return 1 + max(action.stage for actions in self.ranks for action in actions)

    @property
    def num_micro_batches(self) -> int:
        return 1 + max(action.micro_batch for actions in self.ranks for action in actions)

    def check_stages(self, stages: int, ranks: int) -> None:
        self.check(stages, ranks, self.num_micro_batches)

    def splits_backward(self, stages: int, ranks: int) -> bool:
        return any(action.kind is Kind.WEIGHT for actions in self.ranks for action in actions)

    def usual_ranks(self, stages: int) -> int:
        return len(self.ranks)

    def check(self, stages: int, ranks: int, micro_batches: int) -> None:
        found = (self.num_stages, len(self.ranks), self.num_micro_batches)
        if found != (stages, ranks, micro_batches):
            raise ConfigError(
                f"{self.name} is not for {stages} stages, {ranks} ranks and {micro_batches} micro-batches",
                hint="It is for {} stages, {} ranks and {} micro-batches.".format(*found),
            )


def find(name: str) -> Named:
    """The schedule of that name, or in the text file of that name (.txt). Raises `ConfigError`."""
    if not name.endswith(".txt"):
        return named(name)
    try:
        return parse(Path(name).read_text(encoding="utf-8"), name)
    except UnicodeDecodeError:
        raise ConfigError("this is no text", where=name, hint=FORMS) from None
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}", hint="Is the path right?") from None


def parse(text: str, name: str) -> OwnSchedule:
    """The schedule that `text` writes; `name` is how errors call the text, such as its path.

    Raises `ConfigError` that names line and word for what is no action, and for a schedule that is not legal
    (`legal.check`).
    """
    lines = [
        (number, words) for number, line in enumerate(text.splitlines(), 1) if (words := line.partition("#")[0].split())
    ]
    if not lines:
        raise ConfigError("no actions in this schedule", where=name, hint="Write one line a rank, as in: F0 F1 B0 B1")
    ranks = [list(_line(words, rank, f"{name}, line {number}")) for rank, (number, words) in enumerate(lines)]
    stages_named = {len(word.split(".")) > 1 for _, words in lines for word in words}
    if len(stages_named) > 1:
        short = next((number, word) for number, words in lines for word in words if "." not in word)
        raise ConfigError(
            f"{short[1]} names no stage, other actions do",
            where=f"{name}, line {short[0]}",
            hint=f"Name the stage in all actions, as in {short[1]}.0, or in none.",
        )
    check_legal(ranks, where=name)
    placed = [sorted({action.stage for action in actions}) for actions in ranks]
    return OwnSchedule(name=name, ranks=ranks, make=lambda *_: ranks, placement=lambda *_: placed, stages_per_rank=None)


def as_text(ranks: Iterable[Iterable[Action]]) -> str:
    """What `parse` reads."""
    return "".join(" ".join(words) + "\n" for words in written(ranks))


def _line(words: Sequence[str], rank: int, where: str) -> Iterable[Action]:
    for place, word in enumerate(words, 1):
        found = read(word)
        if found is None:
            letters = ", ".join(kind.value for kind in Kind)
            kinds = "" if word[:1] in letters else f" (kinds are {letters})"
            raise ConfigError(f"{word!r} is no action{kinds}", where=f"{where}, word {place}", hint=FORMS)
        kind, micro_batch, stage = found
        yield Action(kind, rank if stage is None else stage, micro_batch)
