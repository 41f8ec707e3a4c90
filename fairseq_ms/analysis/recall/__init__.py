"""How far back a model can recall a symbol, beside how far it can see by formula."""
