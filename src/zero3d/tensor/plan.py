"""Plans: which module is cut over tensor-parallel ranks in which style. Pure.

A plan is a table from patterns of module paths (`*` stands for any text) to styles; what it does not name stays whole.
Several styles of one module are joined by "+".

    colwise                 outputs are cut; of attention, in whole heads     y = x A_r        A = [A_0 A_1 ...]
    colwise(unit)           the same in units of so many rows
    kv, kv(unit)            the same, and heads that are fewer than ranks are held by several
    qkv(heads, kv_heads)    colwise; rows of q, k and v lie one after the other
    gate_up                 colwise; rows of two projections lie one after the other
    colwise_gather_output   colwise, and outputs are gathered
    rowwise                 inputs are cut, outputs are summed                y = sum_r x_r A_r
    rowwise_split_input     the same for inputs that are whole
    vocab                   an embedding's rows, or an output layer's: logits stay cut (zero3d.cross_entropy)
    experts                 a module with 3-dim weights, of which the plan names each
    partial                 whole weights that are used on what is cut: gradients are summed
    replicate               whole, and so stays everything below it
    divide(name, ...)       attributes of the module that count what is cut: 1/t of their value
    regroup(name, ...)      attributes that count heads to a KV head: fewer where several ranks hold one

With sequence parallelism, blocks run on 1/t of the sequence, and these say where it is whole:

    gather                  the module's input is gathered; what is in it is cut
    whole                   the same, and what is in it is not cut, or looks after itself; its output is cut again
    sequence                a module outside the blocks that runs on 1/t of the sequence
    sequence_end            the same, and its output is gathered

Names that Transformers uses for the same are understood.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from zero3d.errors import ConfigError

ARGUMENTS: dict[str, tuple[int, int]] = {
    "colwise": (0, 1),
    "kv": (0, 1),
    "qkv": (2, 2),
    "gate_up": (0, 0),
    "colwise_gather_output": (0, 0),
    "rowwise": (0, 0),
    "rowwise_split_input": (0, 0),
    "vocab": (0, 0),
    "experts": (0, 0),
    "partial": (0, 0),
    "replicate": (0, 0),
    "divide": (1, 99),
    "regroup": (1, 99),
    "gather": (0, 0),
    "whole": (0, 0),
    "sequence": (0, 0),
    "sequence_end": (0, 0),
}
"""Style -> the least and the largest number of its arguments."""

OTHER_NAMES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "packed_colwise": "gate_up",
    "embedding_rowwise": "vocab",
    "moe_tp_experts": "experts",
    "replicated_with_grad_allreduce": "partial",
    "replicated": "replicate",
}

_STYLE = re.compile(r"(\w+)\s*(?:\(([\w\s,.]*)\))?")


@dataclass(frozen=True)
class Style:
    """A name of `ARGUMENTS`, and what stood in its brackets."""

    name: str
    arguments: tuple[str, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(int(argument) for argument in self.arguments)

    def __str__(self) -> str:
        return self.name + (f"({', '.join(self.arguments)})" if self.arguments else "")


def parse(text: str, where: str) -> tuple[Style, ...]:
    """The styles of "colwise(64)" or "gather + divide(num_heads)". Raises `ConfigError`, which names `where`."""
    styles = []
    for part in text.split("+"):
        found = _STYLE.fullmatch(part.strip())
        name = OTHER_NAMES.get(found.group(1), found.group(1)) if found else part.strip()
        if found is None or name not in ARGUMENTS:
            near = get_close_matches(name, [*ARGUMENTS, *OTHER_NAMES], n=1)
            raise ConfigError(
                f'parallel.plan: "{where}" has the style "{part.strip()}", which there is not',
                hint=f"Did you mean {near[0]}?" if near else f"Styles: {', '.join(ARGUMENTS)}.",
            )
        arguments = tuple(one.strip() for one in (found.group(2) or "").split(",") if one.strip())
        least, most = ARGUMENTS[name]
        of_names = name in ("divide", "regroup")
        numbers = of_names or all(one.isdecimal() and int(one) for one in arguments)
        if not least <= len(arguments) <= most or not numbers:
            wanted = f"{least}" if least == most else f"{least} to {most}"
            what = "names" if of_names else "whole numbers from 1"
            raise ConfigError(
                f'parallel.plan: "{where}" has the style "{part.strip()}"',
                hint=f"{name} takes {wanted if most else 'no'} arguments" + (f", {what}." if most else "."),
            )
        styles.append(Style(name, arguments))
    return tuple(styles)


@dataclass(frozen=True)
class Chosen:
    """What a plan says of one module or parameter; `own`: the user's plan."""

    path: str
    styles: tuple[Style, ...]
    own: bool = False

    def style(self, *names: str) -> Style | None:
        """The first of its styles that is one of `names`."""
        return next((style for style in self.styles if style.name in names), None)

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    def holds(self, path: str) -> bool:
        """Whether `path` is this one's, or lies below it."""
        return path == self.path or path.startswith(f"{self.path}.")


def choose(plan: Mapping[str, str], paths: Iterable[str], own: Mapping[str, str]) -> list[Chosen]:
    """What is said of each module, or parameter, that a pattern matches, in the order of `paths`.

    Of patterns that match one path the last counts, and those of `own`, the user's, before all of `plan`. Nothing is
    said of what lies in a module that shall stay whole. Raises `ConfigError` for a pattern of `own` that matches none.
    """
    known = list(paths)
    found: dict[str, tuple[tuple[Style, ...], bool]] = {}
    for table in (plan, own):
        for pattern, text in table.items():
            styles = parse(text, pattern)
            matched = [path for path in known if fnmatchcase(path, pattern)]
            if not matched and table is own:
                near = get_close_matches(pattern.replace("*", "0"), known, n=3, cutoff=0.3) or known[1:4]
                raise ConfigError(
                    f'parallel.plan: no module matches "{pattern}"',
                    hint=f"Paths are those of model.named_modules(), such as {', '.join(near)}; * stands for any text.",
                )
            found.update((path, (styles, table is own)) for path in matched)
    chosen = [Chosen(path, *found[path]) for path in known if path in found]
    whole = [one for one in chosen if one.style("replicate")]
    return [one for one in chosen if not any(other.holds(one.path) for other in whole)]
