"""What layouts have in common whose files hold the state of one rank each, with the tensors that it has in memory.

They write by the modules here. They are read by those of `xla_ckpt.layouts.nxd`.
"""
