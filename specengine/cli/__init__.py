"""The `specengine` command: a file a subcommand, which reads flags and shows results.

Start with main.py, which lists the subcommands, then args.py, which makes flags of the fields of
configurations. What subcommands do is in server/, lab/ and engine/.
"""
