"""From a source of text to batches.

    source ──> documents ──(tokenizer)──> token files: train, heldout ──> (step, dp index) -> batch

`batches` alone imports torch; everything before it is numpy and files.
"""
