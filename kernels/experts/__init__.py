"""Mixtures of experts: which experts a row chooses, and the products of the chosen ones.

Called by `layers` alone. Start with route.py, then experts.py.
"""
