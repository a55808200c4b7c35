"""The commands of `hf-dart`, one module each: `add` puts a command into the parser.

torch and transformers are imported by the functions that need them: --help must not wait for them.
"""
