"""`zero3d show layout CONFIG`: what each rank would hold. Starts no ranks, makes no weights, reads no text."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from zero3d.cli import checks, reduce_table, train
from zero3d.cli.offload_tables import offloads
from zero3d.cli.options import AllowCode, AsJson, ConfigPath, Options, Settings
from zero3d.cli.tables import KINDS, layout_of, part_of
from zero3d.config import Config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from zero3d.models.presets import Build
    from zero3d.outline import Outline
    from zero3d.params import ParamInfo

FILE_WIDTH = 120
"""Columns where the output is no terminal."""
MOST_RANKS = 1_000_000


def command(
    config: ConfigPath,
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--ranks", min=1, max=MOST_RANKS, help="Ranks in all; left out, the product of the sizes."),
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
    allow_code: AllowCode = False,
) -> None:
    """Show who holds what: blocks, slices of each parameter, and ZeRO's parts."""
    options = Options(
        config=config,
        settings=tuple(settings or ()),
        ranks=ranks,
        json=as_json,
        debug=False,
        allow_code=allow_code,
    )
    raise typer.Exit(train.reporting_errors(lambda: _work(options), options))


def _work(options: Options) -> None:
    given = Config.load(options.config, options.settings)
    checks.check_code(given, options.allow_code)
    parallel = given.parallel
    fewest = (1 if parallel.dp == "auto" else parallel.dp) * parallel.tp * parallel.pp
    # As `zero3d train` would resolve it: every key as one that was set.
    config = Config.load(given.model_dump()).resolved(options.ranks or fewest, native_bf16=False)
    checks.check_schedule(config)
    choices = reduce_table.choices(given, options.ranks or fewest)
    found = _outline(config, allow_code=options.allow_code)
    if options.json:
        print(json.dumps(as_event(config, found) | {"reduce": reduce_table.as_event(choices, found)}))
        return
    from rich.console import Console
    from rich.text import Text

    from zero3d.cli.layout_tables import parts

    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    for part in (*parts(config, found, console.width), reduce_table.table(config, choices, found)):
        console.print(part, highlight=False)
        if isinstance(part, Text):  # A table ends with an empty line by itself.
            console.print()


def _outline(config: Config, *, allow_code: bool) -> "Outline":
    # Here, not above: what is wrong in the configuration is told before torch is loaded.
    from zero3d.models.presets import build_function
    from zero3d.outline import outline

    vocabulary = checks.vocabulary_of(config)
    build = build_function(config.model, vocabulary, config.data.sequence_length, allow_code=allow_code)
    return outline(_without_weights(build, config.run.seed), config)


def _without_weights(build: "Build", seed: int) -> "nn.Module":
    import torch

    from zero3d.errors import UsageError
    from zero3d.initial import draw

    try:
        with torch.device("meta"):
            return build()
    except UsageError:
        raise
    except Exception:
        # Code of the user's own that looks at values: it is built as ranks build it.
        return draw(build, seed).model


def as_event(config: Config, found: "Outline") -> dict[str, object]:
    """What programs read. blocks: the first and the last, or null; stages: the same of each of its stages;
    parameters: elements that the rank's part of the model has before ZeRO shards them, padding counted; keeps: after
    that, as part [number, of so many], and bytes on the device; away: bytes elsewhere, with offload."""
    layout = layout_of(config)
    held = [found.held(pp) for pp in range(layout.pp)]
    states = [checks.predicted(config, mine) for mine in held]
    ranks = []
    for rank in range(layout.world):
        place = layout.place(rank)
        stages = found.blocks_of(place.pp)
        blocks = sorted(block for stage in stages for block in stage)
        mine, whole = states[place.pp][config.zero.level], states[place.pp][0]
        ranks.append(
            {
                "rank": rank,
                **place._asdict(),
                "blocks": _ends(blocks),
                "stages": [_ends(stage) for stage in stages],
                "parameters": sum(info.numel for info in held[place.pp]),
                "keeps": {
                    kind: {"part": list(part_of(config, place, held_bytes, getattr(whole, kind))), "bytes": held_bytes}
                    for kind in KINDS
                    for held_bytes in [getattr(mine, kind)]
                },
                **({"away": {"host_bytes": mine.host, "disk_bytes": mine.disk}} if offloads(config) else {}),
            }
        )
    return {"ranks": ranks, "tensors": {info.name: _tensor(info, found) for info in found.infos}}


def _ends(blocks: "Sequence[int]") -> list[int] | None:
    return [blocks[0], blocks[-1]] if blocks else None


def _tensor(info: "ParamInfo", found: "Outline") -> dict[str, object]:
    """slices: by tp index, ranges [start, stop) of dim `dim`, then so many zeros; empty where every rank has all.
    pp: the indices that have it."""
    slicing = info.slicing
    about: dict[str, object] = {"shape": list(info.shape), "style": found.styles.get(info.name), "slices": []}
    about["pp"] = found.stages.ranks_of(info.name)
    if slicing is not None:
        about["slices"] = [
            {"dim": slicing.dim, "ranges": [list(one) for one in ranges], "padding": padding}
            for ranges, padding in zip(slicing.ranges, slicing.padding, strict=True)
        ]
    return about
