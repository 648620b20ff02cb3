"""Who owns what, where rows lie, who shares them, and what each rank does with them. Integers only, no torch."""
