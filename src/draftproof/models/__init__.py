"""Targets: models whose output counts, one architecture a file, and the code that loads them."""
