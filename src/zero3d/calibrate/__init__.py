"""Measures what this machine's ranks compute, move and send, for the planner."""
