"""Every error has an exit code and three short texts; of many ranks' errors one is told."""

import inspect
import signal

import pytest

from zero3d import errors
from zero3d.cli.failure import Failure, as_known, describe, root_cause
from zero3d.errors import ConfigError, NonFiniteError, OutOfSpaceError, RankFailedError, Zero3dError

CODES = {
    "Zero3dError": 4,
    "UsageError": 2,
    "ConfigError": 2,
    "DataError": 2,
    "ReleasedParameterError": 2,
    "OutOfSpaceError": 3,
    "NonFiniteError": 4,
    "DivergedError": 4,
    "RankFailedError": 4,
}


def test_exit_codes() -> None:
    found = {
        name: one.exit_code for name, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, Zero3dError)
    }
    assert found == CODES


def test_the_text_is_what_where_what_to_do() -> None:
    error = ConfigError("zero.level = 7", where="demo.toml, line 3", hint="Levels are 0 to 3.")
    assert str(error) == "zero.level = 7 (demo.toml, line 3)\nLevels are 0 to 3."
    assert error.as_event() == {
        "event": "error",
        "code": 2,
        "message": "zero.level = 7 (demo.toml, line 3)",
        "hint": "Levels are 0 to 3.",
    }


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (MemoryError(), OutOfSpaceError, 3),
        (RuntimeError("CUDA out of memory. Tried to allocate"), OutOfSpaceError, 3),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), OutOfSpaceError, 3),
        (OSError(28, "No space left on device"), OutOfSpaceError, 3),
        (ValueError("what"), RankFailedError, 4),
        (ConfigError("what"), ConfigError, 2),
    ],
)
def test_errors_from_elsewhere_become_ours(error: Exception, kind: type[Zero3dError], code: int) -> None:
    known = as_known(error)
    assert type(known) is kind and known.exit_code == code


def failure(rank: int, error: Exception, seconds: float) -> Failure:
    code = as_known(error).exit_code
    return Failure(rank=rank, code=code, written=describe(error, rank, seconds, "trace"))


def test_the_cause_is_told_and_not_its_echoes() -> None:
    lost = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:33")
    cause = root_cause(
        [
            failure(0, lost, 1.0),
            failure(2, NonFiniteError("loss is nan"), 2.0),
            failure(1, RankFailedError("?"), 0.5),
        ]
    )
    assert cause is not None and cause.message == "loss is nan" and cause.where == "rank 2"
    assert cause.exit_code == 4 and cause.trace == "trace"


def test_bad_input_names_no_rank() -> None:
    cause = root_cause([failure(rank, ConfigError("bad", where="demo.toml"), rank) for rank in range(2)])
    assert cause is not None and cause.where == "demo.toml" and cause.exit_code == 2


def test_a_killed_rank_is_the_cause_of_what_the_others_say() -> None:
    killed = Failure(rank=1, code=-signal.SIGKILL)
    cause = root_cause([failure(0, ValueError("first"), 0.0), killed])
    assert cause is not None and "rank 1 was ended by SIGKILL" in cause.message
    assert cause.exit_code == 4 and "memory" in cause.hint


def test_a_rank_that_left_without_a_word() -> None:
    cause = root_cause([Failure(rank=3, code=7, last_words="libfoo: bye"), failure(0, RankFailedError("?"), 0.0)])
    assert cause is not None and "rank 3 ended with code 7" in cause.message and "libfoo: bye" in cause.hint


def test_no_failure_no_cause() -> None:
    assert root_cause([]) is None
