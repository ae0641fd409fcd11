"""Ranks and what moves between them."""
