"""All that can be known before a rank starts. Each check raises one error that names a way out."""

import importlib.util
import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from zero3d.cli import machine
from zero3d.cli.offload_tables import offloads
from zero3d.cli.style import size
from zero3d.config import Config
from zero3d.data.prepare import Prepared, Progress, prepare
from zero3d.data.sources import STDLIB
from zero3d.data.tokenizers import tokenizer_for
from zero3d.data.tokens import TokenFile, is_token_file
from zero3d.errors import ConfigError, DataError, UsageError
from zero3d.planner.bubble import actions, num_stages
from zero3d.planner.memory import ModelStates, at_each_level

if TYPE_CHECKING:
    from zero3d.params import ParamInfo

TO_FILL_IN = "package.module:function"
"""The model.path that `zero3d plan` writes where only the user can name the function."""
PROCESS_BYTES = 350 << 20
"""What a rank takes before it holds anything: Python and torch."""


def check_code(config: Config, allow_code: bool) -> None:
    """Code that a configuration names runs only when the command line says so too."""
    if config.model.path == TO_FILL_IN:
        raise ConfigError(
            f"model.path = {TO_FILL_IN!r} is to be filled in: [model] has no key for a Transformers folder",
            hint="Name your function, which returns that model; to rehearse it, zero3d dryrun CONFIG --model FOLDER.",
        )
    if config.model.path is not None and not allow_code:
        raise ConfigError(
            f"model.path = {config.model.path!r} would import and run Python code",
            hint="If you trust it, add --allow-code.",
        )


def choose_ranks(config: Config, asked: int | None) -> int:
    """-n, or what parallel.dp says, or one a GPU, or one a core."""
    layout = config.parallel
    if asked is not None:
        return asked
    if layout.dp != "auto":
        return layout.dp * layout.tp * layout.pp
    share = layout.tp * layout.pp
    return max((machine.gpus() or machine.cpu_cores()) // share, 1) * share


def check_started(asked: int | None, world: int) -> None:
    """Where a launcher has started the ranks, -n can only say the same number."""
    if asked is not None and asked != world:
        raise ConfigError(
            f"-n {asked}, and a launcher has started {world} rank{'s' * (world > 1)}",
            hint="Leave -n out and tell the launcher how many to start.",
        )


def check_restarted(environment: Mapping[str, str], *, resume: bool) -> None:
    """Where a launcher starts ranks again after a failure, they go on from what was saved."""
    number = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if number and not resume:
        raise UsageError(
            f"this is restart {number} of the launcher, and without --resume the run would begin anew",
            hint="Add --resume to the command that torchrun starts: without a checkpoint it begins anew too.",
        )


def check_ranks(config: Config, ranks: int) -> None:
    """The layout and the batch fit the number of ranks, and so does bare memory."""
    check_schedule(config.resolved(ranks, native_bf16=False))
    _check_memory(ranks, PROCESS_BYTES, "without any model")


def check_schedule(config: Config) -> None:
    """The pipeline's schedule is there, for these numbers of stages and micro-batches. `config`: resolved."""
    actions(config)
    sizes, number = config.parallel.stage_blocks, num_stages(config)
    if sizes and len(sizes) != number:
        raise ConfigError(
            f"parallel.stage_blocks = {list(sizes)} is for {len(sizes)} stages, and there are {number}: "
            f"parallel.pp x stages_per_rank = {config.parallel.pp} x {config.parallel.stages_per_rank}",
            hint="Give each stage its number of blocks, or leave parallel.stage_blocks out.",
        )


def check_gpus(ranks: int) -> None:
    """One rank a GPU, where there are GPUs."""
    gpus = machine.gpus()
    if gpus and ranks > gpus:
        raise ConfigError(
            f"{ranks} ranks for {gpus} GPU{'s' if gpus > 1 else ''}; a GPU takes one rank",
            hint=f"Start {gpus} (-n {gpus}), or set CUDA_VISIBLE_DEVICES= (nothing) to train on the CPU.",
        )


def check_folder(out: Path) -> None:
    """run.out can be made and written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(
            f"run.out = {str(out)!r} cannot be written: {error.strerror}",
            hint="Choose another folder, such as --set run.out=runs/mine.",
        ) from None


def check_source(config: Config) -> None:
    """data.source is there; a relative path is told in full, as it hangs on the current folder."""
    source = config.data.source
    path = Path(source).expanduser()
    if source == STDLIB or path.exists():
        return
    raise DataError(
        f"data.source = {source!r} does not exist: there is no {path.absolute()}",
        hint=f'Give "{STDLIB}", a text file, a folder of text files, or a prepared token file; a relative path '
        "starts at the current folder.",
    )


@contextmanager
def only_run_in(out: Path) -> Iterator[None]:
    """No other run writes into run.out meanwhile, where the system has locks on files."""
    if importlib.util.find_spec("fcntl") is None:
        yield
        return
    import fcntl

    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another run is writing into run.out = {str(out)!r}",
                hint="Wait for it, or choose another folder, such as --set run.out=runs/mine.",
            ) from None
        yield


def prepare_data(config: Config, progress: Progress | None, name: str = "") -> Prepared:
    """The token files, made here once, so that ranks only map them."""
    if not name:
        check_source(config)
    return prepare(config.data, tokens_folder(config), progress, name=name)


def vocabulary_of(config: Config) -> int:
    """Token kinds, without reading any text."""
    if brings_tokens(config):
        return TokenFile.open(Path(config.data.source).expanduser()).header.vocabulary
    return tokenizer_for(config.data.tokenizer).vocabulary


def brings_tokens(config: Config) -> bool:
    """Whether data.source is a token file, whose vocabulary is its own."""
    return config.data.source != STDLIB and is_token_file(Path(config.data.source).expanduser())


def tokens_folder(config: Config) -> Path:
    return Path(config.run.out) / "tokens"


def check_model(config: Config, prepared: Prepared, ranks: int, allow_code: bool) -> None:
    """The model can be built and cut, the optimizer exists, and all ranks' model states fit into memory."""
    # Here, not above: what is wrong in the configuration is told before torch is loaded.
    import torch

    from zero3d.models.presets import build_function
    from zero3d.optim.assignment import assign
    from zero3d.outline import outline

    build = build_function(config.model, prepared.vocabulary, config.data.sequence_length, allow_code=allow_code)
    resolved = config.resolved(ranks, native_bf16=False)
    try:
        with torch.device("meta"):
            model = build()
            check_forward(config, model.forward)
        found = outline(model, resolved)
    except UsageError:
        raise
    except Exception:
        # Code of the user's own that needs real tensors: what the ranks say of it is closer to the cause.
        return
    assignment = assign(config.optimizer.name, config.optimizer, config.zero.whole_parameters, found.infos)
    found.tensor.refuse_whole(assignment.whole)
    if machine.gpus():
        return
    each = [predicted(resolved, found.held(pp)) for pp in range(resolved.parallel.pp)]
    most = max((one[resolved.zero.level] for one in each), key=lambda states: states.total)
    there = f" ({size(most.device)} of the device and {size(most.host)} offloaded)" if offloads(resolved) else ""
    _check_memory(ranks, PROCESS_BYTES + most.total, f"with {size(most.total)} of model states each{there}")


def predicted(config: Config, held: "Sequence[ParamInfo]") -> list[ModelStates]:
    """Model states at each level of a rank whose part of the model has these parameters. `config`: resolved."""
    assert config.parallel.dp != "auto", "resolved"
    numel = {kind: sum(info.numel for info in held if info.trainable is kind) for kind in (True, False)}
    return at_each_level(config, numel[True], config.parallel.dp, numel[False])


def check_forward(config: Config, forward: Callable[..., object]) -> None:
    """The model can be called with token ids by name."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # some native functions tell nothing
        return
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    given = {one.name for one in parameters if one.name in ("tokens", "targets") and one.kind in by_name}
    open_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needs = [
        one.name
        for one in parameters
        if one.name not in given and one.default is inspect.Parameter.empty and one.kind not in open_kinds
    ]
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    if not needs and ("tokens" in given or takes_all):
        return
    taken = ", ".join(map(str, parameters)) or "nothing"
    wrong = f"needs {needs[0]!r}, which no batch has" if "tokens" in given else "takes no keyword `tokens`"
    raise ConfigError(
        f"model.path = {config.model.path!r}: forward({taken}) {wrong}",
        hint="forward must accept a keyword `tokens` ([B, T] ids) and return logits [B, T, vocabulary].",
    )


def _check_memory(ranks: int, bytes_a_rank: int, what: str) -> None:
    free = machine.free_memory()
    if free is None or ranks * bytes_a_rank <= free:
        return
    fits = free // bytes_a_rank
    ways = [f"start at most {fits} (-n {fits})"] if fits else []
    raise ConfigError(
        f"{ranks} rank{'s' if ranks > 1 else ''} {what} need about {size(ranks * bytes_a_rank)}, "
        f"and this machine has {size(free)} of memory free",
        hint=" or ".join([*ways, "use a higher zero.level, or a smaller model"]).capitalize() + ".",
    )
