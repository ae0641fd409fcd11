"""The learning rate of a step as a part of its peak. Pure, stateless: a resumed run needs the step alone."""

from math import cos, pi

from zero3d.config import Optimizer


def factor(step: int, steps: int, options: Optimizer) -> float:
    """For step `step` (0 is the first) of `steps`: linear warm-up, then constant, linear or cosine.

    >>> options = Optimizer(schedule="linear", warmup=2)
    >>> [round(factor(step, 6, options), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < options.warmup:
        return (step + 1) / options.warmup
    done = (step - options.warmup) / max(steps - options.warmup, 1)
    done = min(done, 1.0)
    if options.schedule == "linear":
        left = 1.0 - done
    elif options.schedule == "cosine":
        left = 0.5 * (1.0 + cos(pi * done))
    else:
        return 1.0
    return options.final_lr + (1.0 - options.final_lr) * left
