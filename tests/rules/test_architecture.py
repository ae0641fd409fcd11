"""The architecture as a test: who may import whom, what is exported, how long a file may be.

Reads source text alone: nothing of zero3d is imported, so nothing here needs torch.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "zero3d"
FILES = sorted(SRC.rglob("*.py"))
NAMES = [str(path.relative_to(SRC)) for path in FILES]

PURE = [
    "layout.py",
    "config.py",
    "config_io.py",
    "config_checks.py",
    "errors.py",
    "slicing.py",
    "tensor/plan.py",
    "comm/bucket.py",
    *(f"pipeline/{name}.py" for name in ("action", "bubbles", "legal", "partition", "picture", "simulate")),
    *(name for name in NAMES if name.startswith(("pipeline/schedules/", "planner/"))),
    *(f"calibrate/{name}.py" for name in ("measured", "fit", "profile")),
    "offload/budget.py",
    "offload/machine.py",
    *(f"checkpoint/{name}.py" for name in ("slices", "manifest", "chunks", "folders", "target")),
    *(f"checkpoint/{name}.py" for name in ("place", "storage", "local", "remote")),
    *(f"trace/{name}.py" for name in ("span", "chrome", "timelines", "queue_rows", "picture")),
    *(name for name in NAMES if name.startswith("report/")),
    *(name for name in NAMES if name.startswith("moving/")),
    "optim/clip.py",
    "optim/learning_rate.py",
    *(f"data/{name}.py" for name in ("sources", "tokenizers", "tokens", "prepare", "permutation", "byte_models")),
]
"""Parts without tensors and process groups."""

ALLOWED = {
    "comm": ["comm", "computed", "contracts", "errors", "layout", "mapped", "unwatched"],
    "zero": [
        "zero",
        "comm",
        "blueprint",
        "computed",
        "config",
        "contracts",
        "errors",
        "exact",
        "mapped",
        "params",
        "precision",
        "recompute",
        "trees",
    ],
    "optim": [
        "optim",
        "comm.bucket",
        "comm.flat",
        "computed",
        "config",
        "contracts",
        "errors",
        "exact",
        "params",
        "zero.shard",
    ],
    "pipeline": [
        "pipeline",
        "comm.texts",
        "config",
        "contracts",
        "errors",
        "params",
        "randomness",
        "linears",
        "stand_in",
        "trees",
        "unfit",
        "zero.guard",
        "zero.shard",
    ],
    "tensor": [
        "tensor",
        "blueprint",
        "config",
        "contracts",
        "errors",
        "models.losses",
        "params",
        "slicing",
        "linears",
        "stand_in",
        "trees",
        "unfit",
        "zero.shard",
    ],
    "planner": [
        "planner",
        "comm.bucket",
        "config",
        "errors",
        "layout",
        "offload.budget",
        *(f"pipeline.{name}" for name in ("action", "partition", "schedules", "simulate")),
    ],
    "calibrate": [
        "calibrate",
        "comm.mesh",
        "contracts",
        "layout",
        "offload.adamw",
        "planner.hardware",
        "planner.workload",
    ],
    "data": ["data", "config", "errors"],
    "moving": ["moving", "config", "errors"],
    "models": ["models", "blueprint", "config", "errors"],
    "checkpoint": [
        "checkpoint",
        "assemble",
        "comm.bucket",
        "comm.mesh",
        "comm.roll",
        "comm.texts",
        "contracts",
        "errors",
        "models.weight_files",
        "params",
        "slicing",
        "zero.shard",
    ],
    "offload": [
        "offload",
        *(f"comm.{name}" for name in ("bucket", "done", "mesh", "streams", "texts")),
        "computed",
        "config",
        "contracts",
        "errors",
        "exact",
        "mapped",
        "optim",
        "precision",
        "zero.beside",
        "zero.replica",
        "zero.shard",
    ],
    "integrations": [
        "integrations",
        "blueprint",
        "checkpoint.folders",
        "comm.mesh",
        "config",
        "contracts",
        "engine",
        "errors",
        "optim.own",
        "own_loop",
        "pipeline.calling",
        "precision",
        "reports",
    ],
    "trace": [
        "trace",
        "comm.done",
        "comm.texts",
        "contracts",
        "engine",
        "layout",
        "pipeline.action",
        "pipeline.picture",
        "pipeline.simulate",
        "records",
        "unwatched",
    ],
    "report": [
        "report",
        *(f"checkpoint.{name}" for name in ("folders", "manifest", "place")),
        "cli.style",
        "config",
        "config_io",
        "errors",
        "layout",
        *(f"pipeline.{name}" for name in ("action", "picture", "simulate")),
        "planner.bubble",
        "records",
        *(f"trace.{name}" for name in ("queue_rows", "span", "timelines")),
        "train",
    ],
}
"""Package -> the parts of zero3d that it may import. Each parallelism knows an axis, and none of the others."""

EXPORTED = [
    "Config",
    "ConfigError",
    "DataError",
    "DivergedError",
    "Engine",
    "EvaluateReport",
    "NonFiniteError",
    "OutOfSpaceError",
    "RankFailedError",
    "ReleasedParameterError",
    "Sharded",
    "StepReport",
    "UsageError",
    "Zero3dError",
    "cross_entropy",
    "pretrained",
    "rehearse",
    "shard",
    "verify",
]


@cache
def tree(name: str) -> ast.Module:
    return ast.parse((SRC / name).read_text(encoding="utf-8"), name)


def imports(node: ast.AST, *, when_imported: bool = False) -> Iterator[str]:
    """Dotted names that the code below `node` imports; `from a import b` gives a and a.b.

    `when_imported`: those alone that run as the module is imported, not in functions or for types.
    """
    for child in ast.iter_child_nodes(node):
        if when_imported and (
            isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        ):
            continue
        if isinstance(child, ast.Import):
            yield from (one.name for one in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield from (f"{child.module}.{one.name}" for one in child.names)
            yield str(child.module)
        else:
            yield from imports(child, when_imported=when_imported)


def files_of(dotted: str) -> Iterator[str]:
    """The files that importing `dotted` runs: the module's, and those of the packages it is in."""
    parts = dotted.split(".")[1:]
    for length in range(len(parts) + 1):
        path = "/".join(parts[:length])
        yield from (name for name in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if name in NAMES)


def below(dotted: str, *packages: str) -> bool:
    return any(dotted == package or dotted.startswith(f"{package}.") for package in packages)


def loaded_with(name: str) -> set[str]:
    """All that is imported, here and further on, as file `name` is imported."""
    found, files, todo = set[str](), set[str](), [name, "__init__.py"]
    while todo:
        one = todo.pop()
        if one not in files:
            files.add(one)
            fresh = set(imports(tree(one), when_imported=True))
            found |= fresh
            todo += [file for dotted in fresh if below(dotted, "zero3d") for file in files_of(dotted)]
    return found


def calls(name: str) -> Iterator[str]:
    """Names that are called in a file, such as `print` or `torch.load`."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def is_in(name: str, *packages: str) -> bool:
    return name.startswith(tuple(f"{package}/" for package in packages))


@pytest.mark.parametrize("name", PURE)
def test_pure_parts_load_no_torch(name: str) -> None:
    assert not [dotted for dotted in imports(tree(name)) if below(dotted, "torch")]
    assert not [dotted for dotted in loaded_with(name) if below(dotted, "torch")]


@pytest.mark.parametrize(
    "name",
    [
        "__init__.py",
        "__main__.py",
        "cli/main.py",
        "cli/train.py",
        "cli/verify.py",
        "cli/show.py",
        "cli/show_layout.py",
        "cli/show_checkpoint.py",
        "cli/export.py",
        "cli/report.py",
        "cli/top.py",
        "cli/memory.py",
        "cli/calibrate.py",
        "cli/checks.py",
        "cli/convert.py",
        "cli/doctor.py",
    ],
)
def test_the_command_loads_torch_only_once_its_input_is_checked(name: str) -> None:
    assert not [dotted for dotted in loaded_with(name) if below(dotted, "torch")]


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_what_they_may(package: str) -> None:
    allowed = [f"zero3d.{part}" for part in ALLOWED[package]]
    wrong = {
        f"{name}: {dotted}"
        for name in NAMES
        if is_in(name, package)
        for dotted in imports(tree(name))
        # `from zero3d import config` gives zero3d too: the module that is meant is the other name.
        if below(dotted, "zero3d") and dotted != "zero3d" and not below(dotted, *allowed)
    }
    assert not wrong


@pytest.mark.parametrize("name", ["models/gpt.py", "models/llama.py", "models/losses.py"])
def test_models_know_nothing_of_zero3d(name: str) -> None:
    assert not [dotted for dotted in imports(tree(name)) if below(dotted, "zero3d")]


def test_only_comm_and_the_launcher_know_torch_distributed() -> None:
    using = {
        name
        for name in NAMES
        if any(below(dotted, "torch.distributed") for dotted in imports(tree(name)))
        or any(ast.unparse(node) == "torch.distributed" for node in ast.walk(tree(name)))
    }
    assert {name for name in using if not is_in(name, "comm")} == {"cli/launch.py"}
    assert {name for name in using if is_in(name, "comm")} <= {"comm/mesh.py", "comm/process_axis.py", "comm/wire.py"}


@pytest.mark.parametrize(("name", "most"), [("step.py", 90), ("assemble.py", 130)])
def test_step_and_assemble_are_short_and_branch_on_no_parallelism(name: str, most: int) -> None:
    assert len((SRC / name).read_text(encoding="utf-8").splitlines()) <= most
    tests = [node.test for node in ast.walk(tree(name)) if isinstance(node, ast.If | ast.IfExp | ast.While)]
    tests += [node.subject for node in ast.walk(tree(name)) if isinstance(node, ast.Match)]
    tests += [test for node in ast.walk(tree(name)) if isinstance(node, ast.comprehension) for test in node.ifs]
    for test in tests:
        assert not re.search(r"\b(level|pp|tp|offload)\b", ast.unparse(test)), ast.unparse(test)


def test_one_place_reads_the_level() -> None:
    """Elsewhere the number is checked, predicted from and shown, never acted upon."""
    reading = {
        name
        for name in NAMES
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Attribute) and node.attr == "level" and isinstance(node.ctx, ast.Load)
    }
    running = {name for name in reading if is_in(name, "zero", "comm", "optim", "pipeline") or "/" not in name}
    assert running == {"zero/levels.py", "config.py", "config_checks.py"}


def test_files_are_short() -> None:
    lengths = {name: len((SRC / name).read_text(encoding="utf-8").splitlines()) for name in NAMES}
    assert not {name: length for name, length in lengths.items() if length > 400}


def test_no_pickle() -> None:
    modules = ("pickle", "cPickle", "dill", "marshal", "shelve")
    assert not [name for name in NAMES if any(below(dotted, *modules) for dotted in imports(tree(name)))]
    # `zero3d export --format torch` is asked for by name; nothing reads such a file.
    using = {name: {"torch.save", "torch.load"} & set(calls(name)) for name in NAMES}
    assert {name: used for name, used in using.items() if used} == {"checkpoint/torch_file.py": {"torch.save"}}


def test_no_bare_except() -> None:
    bare = {
        f"{name}:{node.lineno}"
        for name in NAMES
        for node in ast.walk(tree(name))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    }
    assert not bare


def test_library_code_neither_prints_nor_exits() -> None:
    forbidden = {"print", "exit", "quit", "sys.exit", "os._exit", "breakpoint", "input"}
    found = {name: forbidden & set(calls(name)) for name in NAMES if not is_in(name, "cli") and name != "__main__.py"}
    assert not {name: used for name, used in found.items() if used}


def test_environment_variables_are_read_where_ranks_start() -> None:
    readers = {
        name
        for name in NAMES
        for node in ast.walk(tree(name))
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.environb"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and {"environ", "getenv"} & names_in(node))
    }
    assert {name for name in readers if not is_in(name, "cli")} <= {"comm/mesh.py"}


def names_in(node: ast.ImportFrom) -> set[str]:
    return {one.name for one in node.names}


def test_public_names_are_those_that_are_promised() -> None:
    """Adding one is a decision, removing one breaks users: both change this list."""
    values = [
        ast.literal_eval(node.value)
        for node in tree("__init__.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert values == [EXPORTED]


MACHINE = re.compile(r"(?<![\w.])/(?:home|root|Users|work|tmp|mnt|scratch|opt)/|[A-Z]:\\\\")
"""Paths that only one machine has."""
TEXTS = [
    path
    for place in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "docs", "src", "examples", "benchmarks")
    for path in ([ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*")))
    if path.suffix in (".py", ".md", ".svg", ".toml", "") and path.is_file() and ".mypy_cache" not in path.parts
]


def test_no_text_names_a_path_of_one_machine() -> None:
    found = {str(path.relative_to(ROOT)): MACHINE.findall(path.read_text(encoding="utf-8")) for path in TEXTS}
    assert not {name: paths for name, paths in found.items() if paths}
