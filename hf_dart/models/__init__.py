"""The model that is drafted for, whoever drafts for it."""
