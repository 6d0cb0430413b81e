"""A federation on one machine."""
