"""How numbers look on the screen."""


def size(num_bytes: float) -> str:
    """Such as `16.6 GB`; decimal, as in the tables of the papers."""
    return _scaled(num_bytes, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)), "B")


def count(number: float) -> str:
    """Such as `1.85 M`."""
    return _scaled(number, (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)), "")


def _scaled(number: float, units: tuple[tuple[str, float], ...], smallest: str) -> str:
    for unit, scale in units:
        if number >= 0.9995 * scale:
            return f"{number / scale:#.3g}".rstrip(".") + f" {unit}"
    return f"{number:.0f} {smallest}".rstrip()


def seconds(duration: float) -> str:
    """Such as `3:07`."""
    minutes, rest = divmod(round(duration), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
