"""Saved programs: text and JSON that every rank loads, checked against the model, mesh and plan in use."""

from shardc.precompiled.identity import Identity
from shardc.precompiled.load import Precompiled, load
from shardc.precompiled.save import save_program
from shardc.precompiled.store import Store

__all__ = ["Identity", "Precompiled", "Store", "load", "save_program"]
