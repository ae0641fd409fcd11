"""From other tools to zero3d: their configurations read as ours."""
