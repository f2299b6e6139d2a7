"""An answer's text into reasoning, content and tool calls, as it arrives. reader.py is what parsers
read from, json_text.py reads JSON, answer.py is what they write to. The formats themselves are in
server/tools and server/reasoning. Start with reader.py.
"""
