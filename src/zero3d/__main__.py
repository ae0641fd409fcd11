"""`python -m zero3d` and `torchrun -m zero3d` are the command `zero3d`."""

from zero3d.cli.main import entry

if __name__ == "__main__":
    entry()
