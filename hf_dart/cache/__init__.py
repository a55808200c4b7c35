"""What the target keeps of the text while trees are verified: slots, windows, and what is handed back."""
