"""What every rank would import for itself is imported once, before ranks are forked: torch's optimizers pull it in."""

import torch._dynamo  # noqa: F401
