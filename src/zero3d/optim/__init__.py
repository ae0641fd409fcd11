"""The update: sums that ranks agree on, clipping, learning rate, optimizers on shards."""
