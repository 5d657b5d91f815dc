"""orbax directories of arrays, as written by MaxText, flax and other programs: read with tensorstore, without JAX.

`layout` defines the layouts and finds tags, `metadata` parses the JSON of an item, `tensorstore_arrays` decodes arrays,
`name_rules` maps them to a torch model, `scan` opens a checkpoint. `writing` plans saves and conversions, `chunk_grid`
the chunks of arrays, `renamed_model` models under the names of a JAX program.
"""
