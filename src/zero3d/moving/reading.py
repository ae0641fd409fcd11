"""The keys of another tool's configuration while they are read: which are used up, and what has come of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from zero3d.config import Config
from zero3d.errors import UsageError

AUTO: Final = "auto"


class Taken(NamedTuple):
    """Their key and what it is here: `ours` is a key, such as zero.level."""

    theirs: str
    ours: str
    value: Any


class LeftOut(NamedTuple):
    """A key without one of ours. `needed`: False where nothing has to be said in its place."""

    theirs: str
    why: str
    needed: bool


class Open(NamedTuple):
    """What the file does not settle: `ours` stays at its default, or at a guess, until it is set."""

    theirs: str
    ours: str
    why: str


@dataclass(kw_only=True)
class Converted:
    """A tree of sections for `Config.load`, and what became of each key."""

    tree: dict[str, dict[str, Any]] = field(default_factory=dict)
    taken: list[Taken] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    open: list[Open] = field(default_factory=list)

    @property
    def notes(self) -> dict[str, str]:
        """Comments for the TOML: our key -> theirs."""
        return {one.ours: f"from {one.theirs}" for one in self.taken}


class Reading:
    """The keys of a file as dotted paths, those that are used up, and what has come of them."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._values = _flat(settings)
        self._used = set[str]()
        self.out = Converted()

    def get(self, path: str, default: Any = None) -> Any:
        """A value, now used up. "auto", and null, are `default`."""
        self._used.add(path)
        value = self._values.get(path)
        return default if value in (None, AUTO) else value

    def is_auto(self, path: str) -> bool:
        return self._values.get(path) == AUTO

    def has(self, path: str) -> bool:
        """Whether the key, or one below it, is there."""
        return any(f"{one}.".startswith(f"{path}.") for one in self._values)

    def number(self, path: str, kind: type[int] | type[float]) -> Any:
        """The same for a number; JSON's 1e3 is whole as well. UsageError: it is none."""
        value = self.get(path)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and value != int(value)):
            raise UsageError(
                f"{path} = {json.dumps(value)} is no {'whole ' if kind is int else ''}number",
                hint=f'Mend it in the file; "{AUTO}" leaves it open.',
            )
        return kind(value)

    def take(self, theirs: str, ours: str, value: Any) -> None:
        section, _, key = ours.partition(".")
        self.out.tree.setdefault(section, {})[key] = value
        self.out.taken.append(Taken(theirs, ours, value))

    def take_number(self, theirs: str, ours: str, kind: type[int] | type[float]) -> Any:
        value = self.number(theirs, kind)
        if value is not None:
            self.take(theirs, ours, value)
        elif self.is_auto(theirs):
            self.leave_open(theirs, ours)
        return value

    def leave_open(self, theirs: str, ours: str, why: str = "") -> None:
        """Once a key of ours: the first reason is told."""
        if any(one.ours == ours for one in self.out.open):
            return
        section, _, key = ours.partition(".")
        default = Config.key_schemas()[section][key].get("default")
        self.out.open.append(Open(theirs, ours, why or f'"auto" in the file; it stays {json.dumps(default)}'))

    def leave_out(self, theirs: str, why: str, *, needed: bool = True) -> None:
        self._used.add(theirs)
        self.out.left_out.append(LeftOut(theirs, why, needed))

    def below(self, path: str) -> list[str]:
        """Keys below `path` that nothing has asked for yet."""
        return sorted(one for one in set(self._values) - self._used if one.startswith(f"{path}."))

    def list_the_rest(self, known: Sequence[tuple[Mapping[str, str], bool]]) -> None:
        """Whatever nothing has asked for, or says "auto" and is in no list yet.

        known: tables of key -> why, and whether something is needed in its place.
        """
        listed = {name for one in (*self.out.taken, *self.out.left_out, *self.out.open) for name in one[0].split(", ")}
        unheard = {path for path in self._used & set(self._values) if self.is_auto(path)} - listed
        for path in sorted({*(set(self._values) - self._used), *unheard}):
            words = path.split(".")
            begins = [".".join(words[:length]) for length in range(len(words), 0, -1)]
            found = [LeftOut(path, why[one], needed) for one in begins for why, needed in known if one in why]
            other = "its default here stands" if path in unheard else "zero3d knows no such key"
            self.out.left_out.append(found[0] if found else LeftOut(path, other, path not in unheard))


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Dotted path -> value; lists are values. A section without keys is a value as well."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{path}.")
        else:
            found[path] = value
    return found
