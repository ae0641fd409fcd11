"""What ranks did and when: recorded, brought together, written as a trace and drawn beside the plan."""
