"""One file of `torch.save` as a layout: a whole state, or a part of it, in a ``.pt`` that torch alone reads."""
