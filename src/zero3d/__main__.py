"""`zero3d`, `python -m zero3d` and `torchrun -m zero3d` are one command."""

import sys


def entry() -> None:
    """Runs the command. An interrupt while it is still being loaded is an interrupt, not a fault."""
    try:
        from zero3d.cli.main import entry as command
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    command()


if __name__ == "__main__":
    entry()
