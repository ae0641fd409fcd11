"""Settings of every test: one thread a rank, loopback only."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch

torch.set_num_threads(1)
