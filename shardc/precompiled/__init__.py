"""Programs that are compiled once and loaded by every rank: text and JSON, checked against what they are used for."""

from shardc.precompiled.identity import Identity
from shardc.precompiled.load import Precompiled, load
from shardc.precompiled.save import save_program
from shardc.precompiled.store import Store

__all__ = ["Identity", "Precompiled", "Store", "load", "save_program"]
