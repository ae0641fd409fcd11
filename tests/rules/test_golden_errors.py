"""Every refusal is listed in a golden file, so that a new or another one is read by somebody; and each has a way out.

Reads source text alone. `python -m tests.refusals` writes the file anew.
"""

from tests.refusals import GOLDEN, PROBLEM, empty_hints, kinds, listing, refusals


def test_every_refusal_says_what_to_do() -> None:
    without = [f"{one.place}: {one.kind}({one.message!r})" for one in refusals() if not one.hint or one.empty]
    assert not without + empty_hints()


def test_refusals_are_those_of_the_golden_file() -> None:
    found, written = (set(f"{text}\n".split("\n\n")) for text in (listing(), GOLDEN.read_text(encoding="utf-8")))
    new, gone = found - written, written - found
    assert not new | gone, "\n".join(
        [
            "refusals have changed; read them below, then run `python -m tests.refusals`",
            *(f"+ {one}" for one in sorted(new)),
            *(f"- {one}" for one in sorted(gone)),
        ]
    )


def test_the_list_is_of_what_users_meet() -> None:
    """The reader finds each kind of error, constants as texts, and choices."""
    assert {"UsageError", "ConfigError", "DataError", "DivergedError", "ReportedError"} <= kinds()
    raised = {one.kind for one in refusals()}
    assert {"UsageError", "ConfigError", "DataError", "OutOfSpaceError", PROBLEM} <= raised
    text = listing()
    assert "zero.level = {config.zero.level} is outside 0 to 3" in text
    assert "Levels: 0 shards nothing over dp, 1 the optimizer state, 2 also gradients, 3 also parameters." in text
