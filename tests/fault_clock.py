"""Clocks that jump, for tests/faults.py: a library that is loaded before all others adds to what the clock says.

Of wall-clock time alone, as when a machine's clock is set; the machine's own is left as it is. How many seconds each
rank's clock is off is in a file that the rank maps.
"""

import struct
import subprocess
from pathlib import Path

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile double *off;

__attribute__((constructor)) static void begin(void) {
    const char *folder = getenv("CLOCKS"), *rank = getenv("RANK");
    char path[4096];
    if (!folder || !rank) return;
    snprintf(path, sizeof path, "%s/clock%s", folder, rank);
    int file = open(path, O_RDONLY);
    if (file < 0) return;
    void *map = mmap(0, sizeof *off, PROT_READ, MAP_SHARED, file, 0);
    if (map != MAP_FAILED) off = map;
    close(file);
}

static long long shift(void) { return off ? (long long)*off : 0; }

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int bad = real(id, now);
    if (!bad && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
    return bad;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (out) *out = found.tv_sec;
    return found.tv_sec;
}
"""


def build(folder: Path) -> dict[str, str]:
    """What a rank's environment needs so that its clock can `jump`."""
    (folder / "clock.c").write_text(SOURCE)
    library = folder / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, folder / "clock.c", "-ldl"], check=True, timeout=60)
    for rank in range(2):
        jump(folder, rank, 0.0)
    return {"LD_PRELOAD": str(library), "CLOCKS": str(folder)}


def jump(folder: Path, rank: int, seconds: float) -> None:
    """From now on the clock of the rank is `seconds` ahead."""
    path = folder / f"clock{rank}"
    mode = "r+b" if path.exists() else "w+b"
    with path.open(mode) as file:
        file.write(struct.pack("d", seconds))
