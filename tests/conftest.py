"""Settings of every test: one thread a rank, loopback only. They hold for the processes that tests start too."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

from hypothesis import settings

# The same examples in every run; `--hypothesis-profile=long` looks for new ones.
settings.register_profile("short", max_examples=30, derandomize=True)
settings.register_profile("long", max_examples=500, print_blob=True)
settings.load_profile("short")
