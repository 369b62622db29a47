"""The head lab: making, choosing and checking draft heads for a target."""
