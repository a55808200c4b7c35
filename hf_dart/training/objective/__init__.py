"""What a drafter learns: blocks of drafts of one text, and the losses over them."""
