"""Reuse files of an earlier checkpoint (`SaveOptions.share`)."""
