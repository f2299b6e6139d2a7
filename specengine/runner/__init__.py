"""Runs one model on one device: weights, attention, captured graphs, memory.

Target and draft workers subclass TpModelWorker (worker.py), which owns a ModelRunner. Importable by
engine, draft, target and scheduler; imports layers, memory, core and kernels. Start with
model_runner.py, then graph_cache.py (how graphs are captured, counted and replayed) and
forward_graphs/ (which forwards have graphs).
"""
