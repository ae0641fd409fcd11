"""A `Pending` that is over."""


class Done:
    """What has happened already."""

    def wait(self) -> None:
        return None


DONE = Done()
