#!/bin/sh
# A model of 70 billion parameters on 512 GPUs, planned and rehearsed on a laptop: nothing is downloaded or started.
set -eu
zero3d plan --model llama3-70b --devices 512 --device H100-80GB --global-batch 1024 --top 3
zero3d memory --params 70B --dp 8,64,512
