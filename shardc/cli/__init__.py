"""The command line: each module defines its ``COMMANDS``."""
