"""Decides which requests run next, and records what came of it: queues, batches, KV slots, ends.

Start with scheduler.py, whose Scheduler the engine's loop calls, then admission.py (which waiting
requests start) and retraction.py (memory for the next round). ledger.py owns the KV slots of
requests, lifecycle.py frees them. Nothing here runs a model.
"""
