"""The page at /dashboard: static files, and one endpoint of JSON that feeds them.

`static/uPlot.*` is uPlot 1.6.32 as npm has it (MIT, see uPlot.LICENSE); the rest is ours.
"""
