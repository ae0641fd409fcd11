"""The rehearsal: `assemble` and `step` unchanged, on tensors without data, as one rank of a world of any size."""
