"""orbax directories of arrays, as MaxText, flax and others write them: read with tensorstore, without jax.

`layout` has the layouts and finds tags, `metadata` parses the JSON of an item, `tensorstore_arrays` decodes arrays,
`name_rules` maps them to a torch model, `scan` opens a checkpoint. `writing` plans saves and conversions, `chunk_grid`
the chunks of arrays, `renamed_model` models under the names of a JAX program.
"""
