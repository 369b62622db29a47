"""A run folder as one HTML page that opens offline: it draws what was published and computes nothing new."""
