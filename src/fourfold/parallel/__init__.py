"""How a model is spread over ranks: one file per axis; apply is a page of calls in a stated order."""
