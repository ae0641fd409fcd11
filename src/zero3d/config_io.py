"""From TOML, dicts and `key=value` overrides to one tree of values, and back; errors that name key and place.

Knows nothing of single options: types and texts come from the models' JSON schema.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero3d.errors import ConfigError

Tree = dict[str, Any]
Schema = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""section -> key -> JSON schema of the key's values."""


@dataclass
class Origin:
    """Where values came from, so that an error can point there."""

    path: Path | None = None
    text: str = ""
    overrides: dict[str, str] = field(default_factory=dict)

    def of(self, dotted: str) -> str:
        """Such as `examples/demo.toml, line 7` or `--set zero.level=7`."""
        for key, setting in self.overrides.items():
            if key == dotted or key.startswith(f"{dotted}."):
                return f"--set {setting}"
        if self.path is None:
            return ""
        line = _line_of(self.text, dotted)
        return f"{self.path}, line {line}" if line else str(self.path)


def read_toml(path: Path) -> tuple[Tree, Origin]:
    """The file's values; a ConfigError when it is missing or not TOML."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}", hint=_other_files(path)) from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder, not a TOML file", hint=_other_files(path / "x")) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", hint="A configuration is a TOML file.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="Give a file that you may read.") from None
    try:
        return tomllib.loads(text), Origin(path, text)
    except tomllib.TOMLDecodeError as error:
        # tomllib says "Invalid value (at line 3, column 5)" or "... (at end of document)".
        what, _, at = str(error).partition(" (at ")
        line = re.match(r"line \d+", at)
        raise ConfigError(
            f"{path} is not TOML: {what[:1].lower()}{what[1:]}",
            where=line[0] if line else at.rstrip(")"),
            hint='A line is [section], or key = value; text stands in quotes, such as name = "adamw".',
        ) from None


def override(tree: Tree, origin: Origin, settings: Sequence[str], schema: Schema) -> None:
    """Writes each `section.key=value` into `tree`; values are TOML, and bare words are text."""
    for setting in settings:
        dotted, equals, value = (part.strip() for part in setting.partition("="))
        section, dot, key = dotted.partition(".")
        if not (equals and dot and section and key):
            raise ConfigError(
                f"--set {setting} does not have the form section.key=value",
                hint="Such as --set zero.level=3.",
            )
        origin.overrides[dotted] = setting
        taken = schema.get(section, {}).get(key, {})
        if not isinstance(tree.setdefault(section, {}), dict):
            raise ConfigError(
                f"{section} is a section and has no value of its own",
                where=origin.of(section),
                hint=f"Write [{section}] above its keys.",
            )
        tree[section][key] = _value(value, only_text=taken.get("type") == "string" and "enum" not in taken)


def _value(text: str, only_text: bool) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text
    return text if only_text and not isinstance(value, str) else value


def explain(
    problems: Iterable[Mapping[str, Any]], origin: Origin, schema: Schema, other_words: Mapping[str, str]
) -> ConfigError:
    """One error for all that pydantic found (its `errors()`). `other_words`: a wrong key -> the known one."""
    texts: dict[str, tuple[str, str]] = {}
    for problem in problems:
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            return ConfigError(cause.message, hint=cause.hint, where=origin.of(cause.where))
        path = [str(part) for part in problem["loc"]]
        dotted = ".".join(path[:2])
        if problem["type"] == "extra_forbidden":
            texts.setdefault(dotted, _unknown(path, schema, other_words))
        elif len(path) == 1:
            texts.setdefault(dotted, (f"{dotted} is a section, not a key", f"Write [{dotted}] above its keys."))
        else:
            taken = expected(schema[path[0]][path[1]])
            given = json.dumps(problem["input"], default=str) if problem["type"] != "missing" else "fewer"
            texts.setdefault(
                dotted, (f"{dotted} takes {taken}, not {given}", _such_as(dotted, schema[path[0]][path[1]]))
            )
    first = next(iter(texts))
    if len(texts) == 1:
        message, hint = texts[first]
        return ConfigError(message, where=origin.of(first), hint=hint)
    lines = [
        "  " + str(ConfigError(message, where=origin.of(dotted), hint=hint)).replace("\n", ". ")
        for dotted, (message, hint) in texts.items()
    ]
    return ConfigError(
        f"{len(texts)} keys of the configuration are not right:\n" + "\n".join(lines),
        hint="All keys and what they take are in docs/configuration.md.",
    )


def _such_as(dotted: str, schema: Mapping[str, Any]) -> str:
    """A value that would do: the default, where there is one."""
    default = schema.get("default")
    if default in (None, "", [], {}):
        return f"Leave it out, or see {dotted} in docs/configuration.md."
    return f"Such as {dotted} = {_toml(default)}, the default."


def _unknown(path: Sequence[str], schema: Schema, other_words: Mapping[str, str]) -> tuple[str, str]:
    """An unknown section or key, and the known one that was probably meant."""

    def nearest(word: str, words: Iterable[str]) -> list[str]:
        return difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)

    if path[-1] in other_words:
        return f"there is no key {'.'.join(path)}", f"It is {other_words[path[-1]]} here."
    known = [f"{section}.{key}" for section, keys in schema.items() for key in keys]
    if len(path) == 1:
        homes = [dotted for dotted in known if dotted.endswith(f".{path[0]}")]
        near = homes or nearest(path[0], schema)
        hint = f"Did you mean {near[0]}?" if near else f"Sections are {join(schema, 'and')}."
        return f"there is no section or key {path[0]}", hint
    section, key = path[0], path[1]
    same_key = [dotted for dotted in known if dotted.endswith(f".{key}")]
    in_section = [f"{section}.{word}" for word in nearest(key, schema[section])]
    anywhere = nearest(f"{section}.{key}", known)
    near = same_key or in_section or anywhere
    hint = f"Did you mean {near[0]}?" if near else f"[{section}] has {join(schema[section], 'and')}."
    return f"there is no key {section}.{key}", hint


def expected(schema: Mapping[str, Any]) -> str:
    """What a key takes, in words, from its JSON schema."""
    if "anyOf" in schema:
        return join((expected(one) for one in schema["anyOf"] if one.get("type") != "null"), "or")
    if "enum" in schema or "const" in schema:
        return join((json.dumps(one) for one in schema.get("enum", [schema.get("const")])), "or")
    if schema["type"] == "array":
        if "prefixItems" in schema:
            return f"a list of {len(schema['prefixItems'])}, each {expected(schema['prefixItems'][0])}"
        return f"a list, each {expected(schema['items'])}"
    if schema["type"] == "object":
        return f"a table, each value {expected(schema['additionalProperties'])}"
    noun = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
    limits = {"minimum": "at least", "exclusiveMinimum": "above"}
    limits |= {"maximum": "at most", "exclusiveMaximum": "below"}
    bounds = [f"{words} {schema[name]:.12g}" for name, words in limits.items() if name in schema]
    return " ".join((noun[schema["type"]], " and ".join(bounds))).rstrip()


def join(words: Iterable[str], last: str) -> str:
    """Such as `a, b or c`."""
    *most, end = words
    return f"{', '.join(most)} {last} {end}" if most else end


def write_toml(tree: Mapping[str, Mapping[str, Any]], notes: Mapping[str, str]) -> str:
    """Sections and keys as TOML; `notes`: section.key -> comment. None, which TOML lacks, stays a comment."""
    lines: list[str] = []
    for section, keys in tree.items():
        lines += [f"[{section}]"]
        for key, value in keys.items():
            note = notes.get(f"{section}.{key}", "")
            if value is None:
                lines += [f"# {key} =" + (f"  # {note}" if note else "")]
                continue
            line = f"{key} = {_toml(value)}"
            lines += [f"{line:<34} # {note}" if note else line]
        lines += [""]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, float):
        return repr(value)
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f") if isinstance(value, str) else text


def _line_of(text: str, dotted: str) -> int | None:
    """The line on which `section.key`, or [section], stands; reads line by line, enough for a hint."""
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\s*([^\]]+?)\s*\]", line)
        key = re.match(r"\s*([\w.-]+)\s*=", line)
        if header:
            section = header[1]
        here = section if header else f"{section}.{key[1]}".lstrip(".") if key else None
        if here == dotted:
            return number
    return None


def _other_files(path: Path) -> str:
    """What there is in place of a file that is missing."""
    folder = path.parent
    if not folder.is_dir():
        return f"There is no folder {folder} either."
    there = {
        str(one)
        for place in (folder, folder / "examples")
        for one in place.glob("*.toml")
        if one.name != "pyproject.toml"
    }
    if not there:
        return "Give the path of a TOML file; examples/demo.toml of the repository is one to start from."
    near = difflib.get_close_matches(str(path), there, n=1, cutoff=0.6) or sorted(there)[:5]
    return f"Did you mean {join(near, 'or')}?"
