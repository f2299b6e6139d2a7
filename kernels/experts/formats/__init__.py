"""Formats of experts' weights, one a file: what packed.py's ExpertFormat asks for. They import
Triton, and are loaded where products run in it."""
