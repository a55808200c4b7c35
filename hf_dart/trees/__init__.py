"""Draft trees: what a candidate is worth (`scoring`), and which tree is grown from that."""
