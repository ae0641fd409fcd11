"""The command: one small file a verb; launch.py starts ranks, rank.py is what each of them runs."""
