"""Writes docs/configuration.md from the texts in src/zero3d/config.py. Run it after a key has changed.

Usage: python docs/make_configuration.py
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero3d.config import Config
from zero3d.config_io import expected

PAGE = Path(__file__).with_name("configuration.md")

HEAD = """\
# Configuration

<!-- Made by docs/make_configuration.py from the texts in src/zero3d/config.py. Change those, not this page. -->

A configuration is a TOML file with the sections below. Every key has a default, so a file holds only what differs:
[examples/demo.toml](../examples/demo.toml) is one. `zero3d.Engine` takes the same as a dict of sections, as a
`zero3d.Config`, or as the path of such a file.

- On the command line `--set section.key=value` overrides one key and may be repeated: `--set zero.level=3`.
- An unknown key is refused with the nearest known one; so is a value of another type, or one that clashes with
  another key. That happens before any rank starts where it can be known there, with exit code 2 and values that work.
- `"auto"` and keys left out are resolved before the first step. The screen shows the result, and `config.toml` in
  the run's folder has every key of it. (Where something is offloaded, two stay: to `offload.fraction` each rank, and to
  `offload.threads` each machine, has an answer of its own.)

`zero3d.Engine` is given model, loss, optimizer and batches by the caller. What is left to the configuration then:
`run.seed`, `run.steps` (for the schedule) and `run.timeout_seconds`; `model.blocks`; of `[optimizer]` the schedule and
`clip_norm`, and the settings of an optimizer that is given by name; and all of `[parallel]`, `[zero]`, `[offload]`,
`[precision]` and `[recompute]`. `parallel.micro_batch` cuts what each call of `engine.step` is given; where
`data.global_batch` is set, it is checked against the ranks. `[checkpoint]` is for `zero3d train`: `engine.save` is
told what to do.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for section, keys in Config.key_schemas().items():
        rows = [_row(key, schema) for key, schema in keys.items()]
        parts += [f"\n## [{section}]\n\n| key | default | takes | meaning |\n|---|---|---|---|\n", *rows]
    return "".join(parts)


def _row(key: str, schema: Mapping[str, Any]) -> str:
    default = schema["default"]
    cells = [
        f"`{key}`",
        "left out" if default is None else f"`{json.dumps(default)}`",
        expected(schema),
        " ".join(schema["description"].split()),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
