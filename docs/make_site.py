"""What the site has beside the pages here; mkdocs.yml names this file as a hook.

- pages that are made: the examples, CONTRIBUTING.md and CHANGELOG.md; and in one the command's verbs, from their help;
- links that leave this folder, which are right in the repository, lead to those pages;
- `<!-- not run: why -->` above a block of code, which tests count, becomes a line that readers see.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.main import get_command

from zero3d.cli.main import app

EXAMPLES = "reference/examples.md"
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
"""Files above this folder -> the pages that stand for them."""
VERBS = "<!-- verbs -->"
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
NOT_RUN = re.compile(r"^<!-- not run: (.+?) -->$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made."""
    root = _root(config)
    made = {EXAMPLES: _examples(root)}
    for source, page in ROOT_PAGES.items():
        if page != "index.md":
            made[page] = _text(root, source)
    for page, content in made.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Links out of this folder, and blocks that are not run."""
    name = page.file.src_uri
    # Pages from the root are written as from there.
    source = next((f"../{one}" for one, made in ROOT_PAGES.items() if made == name and one != "README.md"), name)

    def target(found: re.Match[str]) -> str:
        link, anchor = found.group(1), found.group(2) or ""
        path = normpath(join(dirname(source), link))
        if path.startswith("../examples/"):
            path, anchor = EXAMPLES, "#" + _anchor(path.removeprefix("../examples/"))
        elif path.startswith("../docs/"):
            path = path.removeprefix("../docs/")
        elif path.startswith("../"):
            path = ROOT_PAGES.get(path.removeprefix("../"), "")
            if not path:
                return found.group(0)
        elif source == name:
            return found.group(0)
        return relpath(path, dirname(name) or ".") + anchor

    if VERBS in markdown:
        markdown = markdown.replace(VERBS, "".join(_verbs(get_command(app), "zero3d", 2)))
    return NOT_RUN.sub(r'<p class="not-run">No test runs this: \1.</p>', LINK.sub(target, markdown))


def _examples(root: str) -> str:
    parts = ["# Examples\n\nWhat the folder `examples` of the repository has.\n"]
    for file in sorted((Path(root) / "examples").glob("*.*")):
        if file.suffix in (".py", ".toml"):
            language = file.suffix.removeprefix(".").replace("py", "python")
            parts.append(f"\n## {file.name}\n\n```{language}\n{file.read_text(encoding='utf-8').rstrip()}\n```\n")
    return "".join(parts)


def _verbs(command: Any, name: str, level: int) -> Iterator[str]:
    """A section a verb, with the table of its arguments and options, from the texts behind `--help`."""
    for verb, one in getattr(command, "commands", {}).items():
        path = f"{name} {verb}"
        yield f"\n{'#' * level} {path}\n\n{one.help or ''}\n"
        if hasattr(one, "commands"):
            yield from _verbs(one, path, level + 1)
            continue
        yield "\n| | default | meaning |\n|---|---|---|\n"
        for parameter in one.params:
            is_option = parameter.param_type_name == "option"
            shown = parameter.metavar or ("" if getattr(parameter, "is_flag", False) else parameter.name.upper())
            words = ", ".join(f"`{word}`" for word in parameter.opts) if is_option else f"`{shown}`"
            takes = f" {shown}" if is_option and shown else ""
            default = "" if parameter.default in (None, False) else f"`{parameter.default}`"
            told = " ".join((getattr(parameter, "help", None) or "").split())
            cells = (words + takes, "needed" if parameter.required else default, told)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _root(config: MkDocsConfig) -> str:
    return dirname(config.config_file_path)


def _text(root: str, name: str) -> str:
    with open(join(root, name), encoding="utf-8") as file:
        return file.read()
