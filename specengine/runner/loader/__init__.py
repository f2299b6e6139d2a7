"""Finds a model by name, reads its configuration, tokenizer and weights, and builds it.

engine/build.py calls it, and so do the commands that need a model without an engine. Start with
source.py (name -> files), then load.py (files -> model on the device) and mover.py (which threads
read what). Nothing that comes with a checkpoint is executed.
"""
