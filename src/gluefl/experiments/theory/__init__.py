"""Sticky sampling on paper: staleness, variance, which sizes to choose."""
