"""Finds out why a drafter's tokens are hardly ever accepted; docs/laboratory/doctor.md."""
