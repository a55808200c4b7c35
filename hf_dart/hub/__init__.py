"""Files of models, local or on the Hub: read strictly, loaded, described on cards and pushed."""
