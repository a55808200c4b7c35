"""The decoding loop: propose, grow, verify, walk, commit."""
