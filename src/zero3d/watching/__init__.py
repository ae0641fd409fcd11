"""What is noticed while a run goes on: a loss that jumps, a rank that is slow, memory that grows."""
