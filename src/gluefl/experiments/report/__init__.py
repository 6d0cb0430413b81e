"""Journals → one page to look at, figures for a paper, a live view. Nothing here is needed to run anything."""
