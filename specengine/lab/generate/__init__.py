"""Training data: the target answers prompts, from files or of its own writing."""
