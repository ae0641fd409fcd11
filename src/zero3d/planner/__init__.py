"""What a run will hold, from its configuration alone."""
