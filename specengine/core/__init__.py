"""What all packages above share: batches, requests, configuration, interfaces, errors.

Start with batch.py (the forms of a batch, and the legend of shapes), then config.py (all options)
and registry.py (everything that can be named). drafter.py, spec.py, model.py and interfaces.py are
what packages that may not import each other agree on. platform.py and platforms/ stand for the
hardware, parallel.py and sharing.py for several ranks. Imports kernels alone.
"""
