"""What every rank would import for itself is imported once, before ranks are forked: torch's optimizers pull it in."""

import torch._dynamo  # noqa: F401

from zero3d import linears

linears.LARGE = 1 << 10
"""The weights of tests' small models are large ones, whose gradients are computed in place."""
