"""What a rank computes in a step, and in which order."""
