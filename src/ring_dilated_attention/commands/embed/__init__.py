"""`rda embed`: slides to embeddings."""
