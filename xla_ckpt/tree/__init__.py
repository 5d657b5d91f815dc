"""What a state is: nested containers, plain values, and named array leaves. Pure."""
