"""Tensor parallelism: which part of which matrix each rank holds, and what they exchange to compute as one."""
