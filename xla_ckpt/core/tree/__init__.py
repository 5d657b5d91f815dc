"""State trees: nested containers, plain values and named array leaves."""
