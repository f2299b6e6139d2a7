"""Where a model writes its reasoning. tags.py reads it between two tags, registry.py names the
parsers. (GPT-OSS writes it in a channel: server/tools/gpt_oss.py.) Start with registry.py.
"""
