"""Small changes that break one idea each, and the runner that shows which tests notice them (`make mutants`)."""
