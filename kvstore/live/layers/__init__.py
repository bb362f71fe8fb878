"""One class a kind of layer: rows that are attended, rings, recurrent vectors, Nyström states."""
