"""Drafters: cheap guesses at the next tokens, right or wrong at no risk to the output."""
