"""What is written down about attempts, and read back: ledger, evidence, goodput, submissions."""
