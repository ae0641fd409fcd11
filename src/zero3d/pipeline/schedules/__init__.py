"""Schedules: pure functions (stages, ranks, micro-batches) -> the actions of each rank, in order."""
