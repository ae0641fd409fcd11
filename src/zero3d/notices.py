"""What the user should know of a model that no error says."""

from collections.abc import Iterator

from torch import nn


def notices(built: str, model: nn.Module, placement: str = "", *, has_blocks: bool, gathers: bool) -> str:
    """Sentences, or nothing. `built`: how weights were made; `gathers`: weights are whole only while they are used;
    `placement`: of which ranks share a machine."""
    return " ".join(filter(None, [*_each(built, model, has_blocks, gathers), placement]))


def _each(built: str, model: nn.Module, has_blocks: bool, gathers: bool) -> Iterator[str]:
    if built:
        yield f"{built}."
    if gathers and not has_blocks:
        yield (
            "No list of repeated blocks was found: each forward gathers the whole model. "
            'Name the list with model.blocks = "path.of.the.list".'
        )
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        yield (
            "Batch normalisation uses the statistics of each rank's own micro-batch, so numbers depend on how the "
            "batch is cut; full_state_dict has rank 0's running statistics."
        )
