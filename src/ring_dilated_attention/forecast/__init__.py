"""What a job would compute, send, hold and take: ledger, clock, whole models, comparison. Predicts, runs nothing."""
