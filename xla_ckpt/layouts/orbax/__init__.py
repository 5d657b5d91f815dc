"""orbax's own directories of arrays, as MaxText, flax and others write them: read with tensorstore, without jax.

`tags` says by which names of files a tag is known, `metadata` what its JSON says, `chunks` how its arrays are decoded,
`scan` how one is opened, `rewriting` what a conversion writes, and `layout` has the object itself.
"""
