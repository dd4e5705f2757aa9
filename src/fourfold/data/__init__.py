"""A global sample order cut by arithmetic; corpora; token files; one position as the whole state."""
