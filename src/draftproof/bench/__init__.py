"""Measurement: prompts, the two arms in processes of their own, interleaved pairs, run folders."""
