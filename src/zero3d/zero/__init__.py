"""ZeRO: what of a model's states each data-parallel rank keeps, and when the rest is brought or sent."""
