"""Tensor operations: a plain reference and the fast form side by side, same signature."""
