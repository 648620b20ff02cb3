"""`rda embed`: computes embeddings of pathology slides."""
