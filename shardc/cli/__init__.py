"""The command line: one module per command, each with ``HELP``, ``add_arguments`` and ``run``."""
