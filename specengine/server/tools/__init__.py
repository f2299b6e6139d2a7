"""Formats in which models call tools, a file each. format.py is what a format is, json_call.py what
most of them share, registry.py names them, lark.py and constrain.py write the grammar that
generated calls follow. Start with format.py, then hermes.py.
"""
