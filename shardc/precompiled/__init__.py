"""Saved programs: text and JSON that every rank loads, checked against the model, mesh and plan in use."""

from shardc.precompiled.load import Precompiled, load
from shardc.precompiled.program_key import ProgramKey
from shardc.precompiled.save import save_program
from shardc.precompiled.store import Store

__all__ = ["Precompiled", "ProgramKey", "Store", "load", "save_program"]
