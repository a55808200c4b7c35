"""The captured round: the whole of a round on fixed shapes, run without the host.

The eager round (`hf_dart.decoding.session`) asks the device for numbers several times and launches a few thousand
small kernels; on a GPU both take longer than the target's weights take to be read. Here every tensor of a round has
one shape and one place for as long as rows lie in one tier, and nothing is read back, so that the round can be
compiled by `torch.compile` without a graph break and replayed as one CUDA graph:

    propose  draft (one pass of the head), candidates, tree of N nodes, padded to a bucket with empty ones
    accept   one forward of the target over the tree; the target's own token at every node; the path they take,
             cut at the end of the text and at the length limit
    commit   the path's keys and values move after the committed ones; counters move on; the tokens go to a ring

Where things lie (`cache.FixedCache`): a tier has T slots per row for committed tokens, position p in slot p, and
after them N slots for the tree, the same for all rows and rounds. Rows have their own lengths, as tensors. When one
of them might outgrow T, the call goes on in the tier twice as long: what attention reads follows the text, not what
might become of it. Each (batch, bucket, tier) is one `fixed_round.FixedRound` with its state and its graph
(`graphs.Launch`).

Rows of a batch share one budget of nodes, and those that have ended get none (`budget`): the target runs over the
likeliest nodes of all trees as over one row of tokens, and attention alone knows which row a node belongs to. Once half
of the rows have ended, the others move to rounds of fewer rows (`tier.Tier.seats`).

Tokens that are sampled are drawn with the noise of stock's generator (`hf_dart.decoding.noise`). The host draws it,
outside of the graph, for as many positions as the rounds under way may reach, into rows that the graph reads by
position. A row of a batch that has come to the end of them stands still until slower ones have made room. Logits
processors that read scores, or tokens and lengths that the device knows, are part of the round (`processing`).

The host (`loop`) launches a round and meanwhile reads the tokens of the round before from the ring; so it learns one
round late that all rows have ended, and that last round changes nothing, as ended rows stand still on the device.

Trees grow as on any device, n-grams included; the texts lie on the device for that, where copies of earlier text are
looked up too, as deep as the head drafts (`trees.copies.BatchLookup`).

What only the host can do (other processors, stopping criteria, edit passes, other drafters) is done in eager rounds
around a captured forward of the target (`forward.Forward`) and a captured pass of the head (`draft`).

`compile` turns it on for a pair of target and head; `engine.Engine` says what each call takes, and leaves it to the
eager round where the target cannot run on fixed shapes, or a round fails. All give the same tokens.
"""
