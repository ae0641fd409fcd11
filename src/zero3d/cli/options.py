"""What the command line of `zero3d VERB` says, and that as words again: for a rank, or for a person to repeat."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[Path, typer.Argument(help="A TOML file, such as examples/demo.toml.", metavar="CONFIG")]
Ranks = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--ranks",
        min=1,
        help="Ranks to start on this machine. Left out: parallel.dp, or one a GPU, or one a CPU core.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key, such as zero.level=3. May be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON lines for programs on stdout.")]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="Allow model.path to import and run your Python code.")]
Debug = Annotated[bool, typer.Option("--debug", help="Tracebacks, and all that ranks print.")]
"""Options that verbs have in common."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says, beside the configuration. `more`: words that this verb alone knows."""

    config: Path
    settings: tuple[str, ...]
    ranks: int | None
    json: bool
    debug: bool
    allow_code: bool
    verb: str = "train"
    more: tuple[str, ...] = ()

    def as_arguments(self) -> list[str]:
        """The command line of one rank."""
        flags = {"--json": self.json, "--debug": self.debug}
        return [*self._common(self.settings, self.ranks), *(flag for flag, on in flags.items() if on)]

    def repeated(self, changes: Mapping[str, str], ranks: int | None) -> list[str]:
        """The same for a person, with `changes` set and `ranks` started; keys that change are not said twice."""
        return self._common(self.changed(changes), ranks)

    def changed(self, changes: Mapping[str, str]) -> tuple[str, ...]:
        """The settings with those of `changes`; an empty value takes the key out."""
        kept = [one for one in self.settings if one.partition("=")[0].strip() not in changes]
        return (*kept, *(f"{key}={value}" for key, value in changes.items() if value))

    def _common(self, settings: tuple[str, ...], ranks: int | None) -> list[str]:
        start = [] if ranks is None else ["-n", str(ranks)]
        code = ["--allow-code"] if self.allow_code else []
        sets = [word for setting in settings for word in ("--set", setting)]
        return [self.verb, str(self.config), *self.more, *start, *code, *sets]
