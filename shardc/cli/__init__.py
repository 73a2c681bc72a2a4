"""The command line: each module has its ``COMMANDS``."""
