"""Design spaces: one file for each kind of operator, and the vocabulary that they share."""
