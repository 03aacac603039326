"""The commands, by what they work on: arguments to calls, results to text or JSON. No logic."""

from moepack.commands import machine, packing, programs
from moepack.commands.app import app

__all__ = ["app", "machine", "packing", "programs"]
