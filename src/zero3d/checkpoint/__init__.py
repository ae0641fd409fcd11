"""Checkpoints: saved anywhere, resumed on anything, whole or absent."""
