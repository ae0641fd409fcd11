"""Settings of every test: one thread a rank, loopback only. They hold for the processes that tests start too."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
