"""How payload files lay regions of bytes out: codecs. Pure."""
