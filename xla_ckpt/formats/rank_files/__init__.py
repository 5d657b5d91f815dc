"""Formats with one file for each rank, which contains the tensors that the rank had in memory.

A format describes its files in a `RankFileFormat` (`layout`) or derives a class from `OneFilePerRank` (`reading`) or
`RankFiles` (`files`); its layout derives from `RankLayout`. `file_names` parses file names into rank coordinates.
Reading: `split_inference`, `arrays`, `model`, `optimizer` and `reading` reassemble global arrays from the parts of all
ranks. Writing: `writing` for saves, `conversion` for conversions. These modules do not depend on the
program that writes the files.
"""
