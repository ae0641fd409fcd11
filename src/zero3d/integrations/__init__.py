"""zero3d inside of other libraries' training loops. Each module needs its library: the extra `hf`."""
