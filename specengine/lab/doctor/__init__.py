"""Finds out why a drafter's tokens are hardly ever accepted; docs/notes/doctor.md."""
