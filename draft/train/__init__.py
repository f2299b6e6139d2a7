"""Training of drafters and small targets."""
