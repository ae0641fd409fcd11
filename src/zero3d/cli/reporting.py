"""What a verb that starts no ranks does with an error."""

import json
import sys
from collections.abc import Callable

from zero3d.cli.failure import as_known
from zero3d.errors import Zero3dError


def reporting_errors(work: Callable[[], None], *, as_json: bool) -> int:
    """-> the exit code. An error is one short text on stderr and, with --json, a line on stdout."""
    try:
        work()
    except (Zero3dError, OSError, MemoryError) as error:
        known = as_known(error)
        print(f"zero3d: {known}", file=sys.stderr)
        if as_json:
            print(json.dumps(known.as_event()))
        return known.exit_code
    return 0
