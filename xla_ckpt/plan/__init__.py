"""Every decision of a save or a restore, before any action. Pure."""
