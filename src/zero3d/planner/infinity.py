"""Memory and bandwidth as ZeRO-Infinity counts them (Rajbhandari et al. 2021, arXiv:2104.07857, sections 3 and 4).

Its models have 12 l h^2 parameters and 20 bytes of states of each: 16-bit weights and gradients, and in fp32 weights,
gradients and two moments. Here `micro_batch` of a shape is bsz: the sequences of a GPU or of a node, as the function
says.

>>> shape = Shape(layers=128, hidden=25600, heads=256, sequence=1024, micro_batch=4)
>>> round(states(shape) / 2**40, 2), round(working_activations(shape) / 2**30, 2)
(18.31, 3.56)
"""

from zero3d.planner.activations import Shape

STATES = 20
"""Bytes a parameter."""


def states(shape: Shape) -> int:
    """Bytes of model states on all devices together: 240 l h^2 (section 3)."""
    return STATES * 12 * shape.layers * shape.hidden**2


def activations(shape: Shape) -> int:
    """Bytes of all activations of `micro_batch` sequences, none computed again: those between two checkpoints for each
    block."""
    return working_activations(shape) * shape.layers


def working_activations(shape: Shape, every: int = 1) -> int:
    """Bytes of activations between two checkpoints, `every` blocks apart: bsz s ci (16 h + 2 a s) (equation 5)."""
    one = 16 * shape.hidden + 2 * shape.heads * shape.sequence
    return shape.micro_batch * shape.sequence * every * one


def working_states(shape: Shape) -> int:
    """Bytes that the largest product's weights and gradients take on a device, whole for a moment: 4 h 4 h (equation
    4: of a matrix h x 4h, 2 bytes each)."""
    return 4 * shape.hidden * 4 * shape.hidden


def intensity_of_weights(shape: Shape) -> int:
    """FLOPs per byte of weights and gradients that moves: s bsz (equation 9)."""
    return shape.sequence * shape.micro_batch


def intensity_of_optimizer(shape: Shape) -> float:
    """FLOPs per byte of optimizer state that moves: s bsz / 4 (equation 10)."""
    return shape.sequence * shape.micro_batch / 4


def intensity_of_checkpoints(shape: Shape, every: int = 1) -> int:
    """FLOPs per byte of checkpoints that moves: 24 h ci (equation 11)."""
    return 24 * shape.hidden * every


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """The part of `peak` FLOP/s that is left where nothing overlaps, at `bandwidth` bytes/s (equation 6)."""
    return intensity * bandwidth / (intensity * bandwidth + peak)


def bandwidth(intensity: float, efficiency: float, peak: float) -> float:
    """Bytes/s that give this efficiency: the same, solved.

    >>> round(bandwidth(1024, 0.5, 70e12) / 1e9, 1)
    68.4
    """
    return efficiency / (1 - efficiency) * peak / intensity
