"""What layouts have in common whose files hold the state of one rank each, with the tensors that it has in memory.

*How they are called*: `grid` has the names of files by pp, dp, ep and tp as data, `folders` those in ``model`` and
``optim``, `tags` what a root holds. *How they are read*: a layout derives its class from that in `layout`, and that of
its files from the one in `files`; `splits`, `arrays`, `copies`, `state`, `optimizer`, `stage_numbers` and `content` put
the parts of all ranks together, and `reading` opens and verifies. *How they are written*: `plan`, `writing`, `new_job`
and `rewriting`.
"""
