"""Models that ship with zero3d: plain torch, nothing of zero3d inside."""
