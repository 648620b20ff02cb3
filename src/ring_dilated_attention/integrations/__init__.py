"""The library in the models and trainers of others: one place per ecosystem, imported by nothing else here."""
