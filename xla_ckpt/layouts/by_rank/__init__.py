"""What layouts have in common whose files hold the state of one rank each, with the tensors that it has in memory.

*What a layout says*: in `form`, as values, how its files are called and what they hold; or in a class derived from that
in `one_file_each` or `files`. Its own class is derived from that in `layout`. *How its files are called*: `grid` has
their names by pp, dp, ep and tp, `tags` what a root holds. *How they are read*: `splits`, `arrays`, `copies`, `state`,
`optimizer`, `stage_numbers` and `content` put the parts of all ranks together, and `reading` opens and verifies. *How
they are written*: `plan`, `writing`, `new_job` and `rewriting`. Nothing here names a program whose files these are.
"""
