"""orbax's own directories of arrays, as MaxText, flax and others write them: read with tensorstore, without jax.

`tags` says by which names of files a tag is known, `metadata` what its JSON says, `chunks` how its arrays are decoded,
`names` what they are to a model of torch, and `scan` how one is opened. `item` says what a state is to orbax, `grid`
into which chunks its arrays are cut, and `writing` what a save or a conversion writes. `layout` has the object itself.
"""
